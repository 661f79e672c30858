"""The FastAPI application: routes, and the path from a request's bytes to the reply's."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import confpred
from confpred.model.folder import Model
from confpred.predict.predictor import Predictor
from confpred.problem.device import KNOWN, Device

from . import errors, schema
from .metrics import Metrics, Telemetry
from .predict import Predict
from .settings import Settings

#: Seconds after which a thread that wants the interpreter is given it. Python's own 5 ms are as
#: long as a remembered reply may take beside batches in all.
_SWITCH_S = 0.0005

_router = APIRouter()


def create_app(settings: Settings, predictor: Predictor | None = None) -> FastAPI:
    """The application; it loads the model of `settings` on start unless `predictor` is given.

    Raises (on start):
        ModelError: the model folder is missing, damaged or foreign.
    """
    metrics = Metrics()
    predict = Predict(settings, metrics, lambda scope: _predictor(scope["app"]))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loaded = predictor or Predictor.load(settings.model, pins=settings.pins)
        for device in KNOWN:  # so that the first client need not wait for tables
            loaded.choose(schema.EXAMPLE, device)
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        # One thread: predictions hold the interpreter, and more of them would only delay the loop.
        with ThreadPoolExecutor(1, "predict") as executor:
            predict.start(executor)
            app.state.predictor = loaded
            yield
            app.state.predictor = None
        sys.setswitchinterval(usual)

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
    app.router.routes.insert(0, _predict_route(predict))
    app.include_router(_router)
    app.add_middleware(Telemetry, metrics=metrics)
    errors.install(app)
    schema.install(app, settings)
    return app


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": errors.ErrorReply} for status in statuses}


def _predict_route(predict: Predict) -> APIRoute:
    """The route to `predict`: FastAPI describes it, and ASGI calls it, with nothing in between."""

    async def described() -> None: ...

    route = APIRoute(
        "/v1/predict",
        described,
        methods=["POST"],
        name="predict",
        summary="The best configs of one problem or many",
        response_model=schema.PredictReply,
        responses=_refusals(400, 413, 415, 422, 500, 503),
        openapi_extra=schema.PREDICT_BODY,
    )
    route.app = predict
    return route


@_router.get("/v1/devices", summary="The devices that can be asked for", responses=_refusals(503))
async def devices(request: Request) -> schema.DevicesReply:
    models = _predictor(request.app).models
    return schema.DevicesReply([_served(device, models.get(key)) for key, device in KNOWN.items()])


@_router.get("/v1/models", summary="The models that are loaded", responses=_refusals(503))
async def models(request: Request) -> schema.ModelsReply:
    loaded = _predictor(request.app).models
    return schema.ModelsReply(
        [schema.ServedModel(device, m.version, dict(m.card)) for device, m in loaded.items()]
    )


@_router.get("/healthz", summary="Whether the process is up")
async def healthz() -> schema.StatusReply:
    return schema.StatusReply("up")


@_router.get("/readyz", summary="Whether the model is loaded", responses=_refusals(503))
async def readyz(request: Request) -> schema.StatusReply:
    _predictor(request.app)
    return schema.StatusReply("ready")


@_router.get("/metrics", summary="Counts and times, for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    text = request.app.state.metrics.text()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def _predictor(app: FastAPI) -> Predictor:
    """The loaded predictor; before the start and after the end there is none."""
    predictor: Predictor | None = app.state.predictor
    if predictor is None:
        error = errors.Error("not_ready", "no model is loaded; ask again in a moment")
        raise errors.RequestError(503, error, {"retry-after": "1"})
    return predictor


def _served(device: Device, model: Model | None) -> schema.ServedDevice:
    version = None if model is None else model.version
    return schema.ServedDevice(**dataclasses.asdict(device), model=version)
