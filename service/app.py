"""The FastAPI application: routes, and the path from a request's bytes to the reply's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from confpred._version import __version__
from confpred.errors import InvalidInput
from confpred.predict.predictor import Predictor
from confpred.problem.device import KNOWN, Device

from . import access, admin, errors, generations, page, schema, tokens
from .channel import Channel, Gone
from .gauges import Exposition
from .generations import Generation, Loaded
from .metrics import Metrics, read
from .predict import Predict
from .settings import Settings

#: Seconds after which a thread that wants the interpreter is given it. Python's own 5 ms are as
#: long as a remembered reply may take beside batches in all.
_SWITCH_S = 0.0005

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
    predict = Predict(settings, metrics, _generation)

    def refused(client: tuple[str, int] | None, status: int, seconds: float) -> None:
        """Count and log what the protocol refused."""
        metrics.served("none", status, seconds)
        if settings.access_log:
            access.write_refused(client, status, seconds)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loaded = predictor or Predictor.load(settings.model, plan=settings.plan)
        if isinstance(loaded, Predictor):
            loaded = Loaded(generations.of(loaded))
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        # One thread: predictions hold the interpreter, and more of them would only delay the loop.
        with ThreadPoolExecutor(1, "predict") as executor:
            predict.start(executor)
            app.state.loaded = loaded
            yield
            app.state.loaded = None
        sys.setswitchinterval(usual)

    app = FastAPI(
        title="confpred",
        version=__version__,
        description="confpred: the best kernel configuration for a convolution, in a millisecond.",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # it has a route of its own, as /docs has
    )
    app.state.settings, app.state.metrics, app.state.tokens = settings, metrics, known
    app.state.refused = refused
    app.state.loaded = app.state.supervisor = None
    route = _predict_route(predict)
    app.router.routes.insert(0, route)
    app.include_router(_router)
    app.include_router(admin.router)
    app.add_middleware(_Shortcut, route=route)
    if settings.tokens is not None:
        app.add_middleware(access.Guard)
    app.add_middleware(access.Access, metrics=metrics, log=settings.access_log)
    errors.install(app)
    schema.install(app, settings)
    return app


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": errors.ErrorReply} for status in statuses}


class _Shortcut:
    """ASGI middleware: leads predictions past the router, which takes a tenth of their time."""

    def __init__(self, app: ASGIApp, route: APIRoute) -> None:
        self._app, self._route = app, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != self._route.path or scope.get("method") != "POST":
            return await self._app(scope, receive, send)
        scope["route"] = self._route
        try:
            await self._route.app(scope, receive, send)
        except (errors.RequestError, InvalidInput) as error:
            await errors.refusal(error)(scope, receive, send)
        return None


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
        responses=_refusals(400, 404, 413, 415, 422, 500, 503),
        openapi_extra=schema.PREDICT_BODY,
    )
    route.app = predict
    return route


@_router.get("/v1/devices", summary="The devices that can be asked for", responses=_refusals(503))
async def devices(request: Request, response: Response) -> schema.DevicesReply:
    current = _loaded(request.app).current
    response.headers["etag"] = f'"{current.digest}"'
    own = {model.device.key: model.device for model in current.predictor.models.values()}
    served = [_served(device, current) for device in {**KNOWN, **own}.values()]
    return schema.DevicesReply(served)


@_router.get("/v1/models", summary="The models that are loaded", responses=_refusals(503))
async def models(request: Request, response: Response) -> schema.ModelsReply:
    loaded = _loaded(request.app)
    response.headers["etag"] = f'"{loaded.current.digest}"'
    return schema.models(loaded)


@_router.get("/healthz", summary="Whether the process is up")
@_router.head("/healthz", include_in_schema=False)
async def healthz() -> schema.StatusReply:
    return schema.StatusReply("up")


@_router.get("/readyz", summary="Whether the model is loaded", responses=_refusals(503))
@_router.head("/readyz", include_in_schema=False)
async def readyz(request: Request) -> schema.StatusReply:
    _loaded(request.app)
    return schema.StatusReply("ready")


@_router.get("/metrics", summary="Counts and times, for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    state = request.app.state
    supervisor: Channel | None = state.supervisor
    told = {"counts": state.metrics.told(), "processes": {"0": os.getpid()}}
    if supervisor is not None:
        with contextlib.suppress(Gone):
            told = await supervisor.ask("metrics")
    exposition = Exposition(read(told["counts"]), told["processes"], state.loaded)
    text = await asyncio.to_thread(exposition.text)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@_router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@_router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    return HTMLResponse(page.render(request.app.openapi()), headers=page.HEADERS)


def _loaded(app: FastAPI) -> Loaded:
    """The loaded generations; before the start and after the end there are none."""
    loaded: Loaded | None = app.state.loaded
    if loaded is None:
        error = errors.Error("not_ready", "no model is loaded; ask again in a moment")
        raise errors.RequestError(503, error, {"retry-after": "1"})
    return loaded


def _generation(scope: Scope) -> Generation:
    """The generation that is to answer: the current one, or one that the request names."""
    loaded = _loaded(scope["app"])
    if scope["query_string"]:
        version = QueryParams(scope["query_string"]).get("version")
        if version is not None:
            return loaded.find(version)
    return loaded.current


def _served(device: Device, current: Generation) -> schema.ServedDevice:
    model = current.model_of(device.key)
    version, digest = (None, None) if model is None else (model.version, model.digest)
    return schema.ServedDevice(**dataclasses.asdict(device), model=version, digest=digest)
