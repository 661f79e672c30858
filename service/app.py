"""The FastAPI application: routes, and the path from a request's bytes to the reply's."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import confpred
from confpred.model.folder import Model
from confpred.predict.choice import answers_json
from confpred.predict.predictor import Predictor
from confpred.problem.device import KNOWN, Device

from . import errors, schema
from .metrics import Metrics, Telemetry
from .requests import parse, read_body
from .settings import Settings

#: A body up to this long is answered at once: it holds one problem spelled in full, or a few short
#: ones. A longer one goes to a thread, so that a batch does not hold up everyone else's requests.
_INLINE_BYTES = 512

_router = APIRouter()


def create_app(settings: Settings, predictor: Predictor | None = None) -> FastAPI:
    """The application; it loads the model of `settings` on start unless `predictor` is given.

    Raises (on start):
        ModelError: the model folder is missing, damaged or foreign.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loaded = predictor or Predictor.load(settings.model, pins=settings.pins)
        for device in KNOWN:  # so that the first client need not wait for tables
            loaded.choose(schema.EXAMPLE, device)
        # One thread: predictions hold the interpreter, and more of them would only delay the loop.
        with ThreadPoolExecutor(1, "predict") as executor:
            app.state.predictor, app.state.executor = loaded, executor
            yield
            app.state.predictor = None

    app = FastAPI(
        title="confpred",
        version=confpred.__version__,
        description=confpred.__doc__.partition("\n")[0] if confpred.__doc__ else "",
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.settings, app.state.metrics, app.state.predictor = settings, metrics, None
    app.include_router(_router)
    app.add_middleware(Telemetry, metrics=metrics)
    errors.install(app)
    schema.install(app, settings)
    return app


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": errors.ErrorReply} for status in statuses}


@_router.post(
    "/v1/predict",
    summary="The best configs of one problem or many",
    response_model=schema.PredictReply,
    responses=_refusals(400, 413, 415, 422, 500, 503),
    openapi_extra=schema.PREDICT_BODY,
)
async def predict(request: Request) -> Response:
    predictor, state = _predictor(request), request.app.state
    body = await read_body(request, state.settings)
    work = (predictor, state.settings, state.metrics, body)
    if len(body) <= _INLINE_BYTES:
        answer = _answer(*work)
    else:
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(state.executor, _answer, *work)
    return Response(answer, media_type="application/json")


@_router.get("/v1/devices", summary="The devices that can be asked for", responses=_refusals(503))
async def devices(request: Request) -> schema.DevicesReply:
    models = _predictor(request).models
    return schema.DevicesReply([_served(device, models.get(key)) for key, device in KNOWN.items()])


@_router.get("/v1/models", summary="The models that are loaded", responses=_refusals(503))
async def models(request: Request) -> schema.ModelsReply:
    loaded = _predictor(request).models
    return schema.ModelsReply(
        [schema.ServedModel(device, m.version, dict(m.card)) for device, m in loaded.items()]
    )


@_router.get("/healthz", summary="Whether the process is up")
async def healthz() -> schema.StatusReply:
    return schema.StatusReply("up")


@_router.get("/readyz", summary="Whether the model is loaded", responses=_refusals(503))
async def readyz(request: Request) -> schema.StatusReply:
    _predictor(request)
    return schema.StatusReply("ready")


@_router.get("/metrics", summary="Counts and times, for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    text = request.app.state.metrics.text()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def _answer(predictor: Predictor, settings: Settings, metrics: Metrics, body: bytes) -> bytes:
    """The reply to the request in `body`; the choices are the library's own, as it writes them."""
    asked = parse(body, settings)
    answers = [predictor.rank(problem, asked.device, asked.top) for problem in asked.problems]
    for source, count in Counter(choices[0].source for choices in answers).items():
        metrics.problems.labels(source).inc(count)
    return answers_json(answers).encode()


def _predictor(request: Request) -> Predictor:
    """The loaded predictor; before the start and after the end there is none."""
    predictor: Predictor | None = request.app.state.predictor
    if predictor is None:
        error = errors.Error("not_ready", "no model is loaded; ask again in a moment")
        raise errors.RequestError(503, error)
    return predictor


def _served(device: Device, model: Model | None) -> schema.ServedDevice:
    version = None if model is None else model.version
    return schema.ServedDevice(**dataclasses.asdict(device), model=version)
