"""The FastAPI application: routes, and the path from a request's bytes to the reply's."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import confpred
from confpred.predict.choice import answers_json
from confpred.predict.predictor import Predictor
from confpred.problem.device import KNOWN, Device

from . import access, admin, compression, errors, generations, schema, tokens
from .gauges import Gauges
from .generations import Generation, Loaded
from .metrics import Metrics, Telemetry
from .requests import parse, read_body
from .settings import Settings

#: A body up to this long is answered at once: it holds one problem spelled in full, or a few short
#: ones. A longer one goes to a thread, so that a batch does not hold up everyone else's requests.
_INLINE_BYTES = 512

_router = APIRouter()


def create_app(
    settings: Settings,
    predictor: Predictor | Loaded | None = None,
    known: Sequence[tokens.Token] = (),
) -> FastAPI:
    """The application; it loads the model of `settings` on start unless `predictor` is given, which
    may be generations that are loaded. `known` are the tokens of `settings`.

    Raises (on start):
        ModelError: the model folder is missing, damaged or foreign.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loaded = predictor or Predictor.load(settings.model, pins=settings.pins)
        if isinstance(loaded, Predictor):
            loaded = Loaded(generations.of(loaded))
        # One thread: predictions hold the interpreter, and more of them would only delay the loop.
        with ThreadPoolExecutor(1, "predict") as executor:
            app.state.executor = executor
            app.state.loaded, app.state.predictor = loaded, loaded.current.predictor
            yield
            app.state.loaded = app.state.predictor = None

    app = FastAPI(
        title="confpred",
        version=confpred.__version__,
        description=confpred.__doc__.partition("\n")[0] if confpred.__doc__ else "",
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.settings, app.state.metrics, app.state.tokens = settings, metrics, known
    app.state.loaded = app.state.predictor = app.state.supervisor = None
    app.state.server_status = {}
    metrics.add(Gauges(app))
    app.include_router(_router)
    app.include_router(admin.router)
    if settings.tokens is not None:
        app.add_middleware(access.Guard)
    app.add_middleware(Telemetry, metrics=metrics)
    app.add_middleware(access.Access, log=settings.access_log)
    errors.install(app)
    schema.install(app, settings)
    return app


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": errors.ErrorReply} for status in statuses}


@_router.post(
    "/v1/predict",
    summary="The best configs of one problem or many",
    response_model=schema.PredictReply,
    responses=_refusals(400, 404, 413, 415, 422, 500, 503),
    openapi_extra=schema.PREDICT_BODY,
)
async def predict(request: Request) -> Response:
    generation, state = _generation(request), request.app.state
    body = await read_body(request, state.settings)
    work = (generation, state.settings, state.metrics, body)
    if len(body) <= _INLINE_BYTES:
        answer, told = _answer(*work)
    else:
        loop = asyncio.get_running_loop()
        answer, told = await loop.run_in_executor(state.executor, _answer, *work)
    access.note(request.scope, told)
    sent, encoded = await compression.encode(answer, request.headers.get("accept-encoding", ""))
    return Response(sent, headers={**generation.headers, **encoded}, media_type="application/json")


@_router.get("/v1/devices", summary="The devices that can be asked for", responses=_refusals(503))
async def devices(request: Request, response: Response) -> schema.DevicesReply:
    current = _loaded(request).current
    response.headers["etag"] = f'"{current.digest}"'
    served = [_served(device, current) for device in KNOWN.values()]
    return schema.DevicesReply(served)


@_router.get("/v1/models", summary="The models that are loaded", responses=_refusals(503))
async def models(request: Request, response: Response) -> schema.ModelsReply:
    loaded = _loaded(request)
    response.headers["etag"] = f'"{loaded.current.digest}"'
    return schema.models(loaded)


@_router.get("/healthz", summary="Whether the process is up")
@_router.head("/healthz", include_in_schema=False)
async def healthz() -> schema.StatusReply:
    return schema.StatusReply("up")


@_router.get("/readyz", summary="Whether the model is loaded", responses=_refusals(503))
@_router.head("/readyz", include_in_schema=False)
async def readyz(request: Request) -> schema.StatusReply:
    _loaded(request)
    return schema.StatusReply("ready")


@_router.get("/metrics", summary="Counts and times, for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    text = request.app.state.metrics.text()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def _answer(
    generation: Generation, settings: Settings, metrics: Metrics, body: bytes
) -> tuple[bytes, access.Answer]:
    """The reply to the request in `body`; the choices are the library's own, as it writes them."""
    asked = parse(body, settings)
    predictor, model = generation.predictor, generation.model_of(asked.device.key)
    answers = [predictor.rank(problem, asked.device, asked.top) for problem in asked.problems]
    sources = Counter(choices[0].source for choices in answers)
    for source, count in sources.items():
        metrics.problems.labels(source).inc(count)
    digest = None if model is None else model.digest
    told = access.Answer(asked.device.key, Counter(sources), generation.digest, digest)
    return answers_json(answers).encode(), told


def _loaded(request: Request) -> Loaded:
    """The loaded generations; before the start and after the end there are none."""
    loaded: Loaded | None = request.app.state.loaded
    if loaded is None:
        error = errors.Error("not_ready", "no model is loaded; ask again in a moment")
        raise errors.RequestError(503, error)
    return loaded


def _generation(request: Request) -> Generation:
    """The generation that is to answer: the current one, or one that the request names."""
    loaded = _loaded(request)
    if request.scope["query_string"]:
        version = request.query_params.get("version")
        if version is not None:
            return loaded.find(version)
    return loaded.current


def _served(device: Device, current: Generation) -> schema.ServedDevice:
    model = current.model_of(device.key)
    version, digest = (None, None) if model is None else (model.version, model.digest)
    return schema.ServedDevice(**dataclasses.asdict(device), model=version, digest=digest)
