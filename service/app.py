"""The FastAPI application: its routes, the access checks, and a shortcut past routing for
predictions."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from confpred._version import __version__
from confpred.errors import InvalidInput
from confpred.model.card import CARD, SIGNATURE, card_of
from confpred.predict.predictor import Predictor
from confpred.problem.device import KNOWN, get_device

from . import Settings, generations, logs, pages, requests, schema, tokens
from .child import Channel, Gone
from .exchange import ADMITTED, Exchange, announced_id, take
from .generations import Generation, Loaded, published
from .metrics import Metrics, exposition
from .predict import Predict
from .requests import RequestError, shorten

#: Scopes that a token needs to POST to a path; every other request needs ``read``.
SCOPES: dict[str, tokens.Scope] = {"/v1/jobs": "admin", "/v1/measurements": "write"}
SCOPES |= dict.fromkeys(("/v1/models/reload", "/v1/models/rollback"), "admin")
#: Headers that browsers and proxies add.
_FOREIGN = ("origin", "x-forwarded-for", "forwarded")
#: Seconds after which a thread that waits for the interpreter gets it. Python's default of 5 ms is
#: as long as a whole cached reply may take while batches are computed.
_SWITCH_S = 0.0005
#: Threads that write uploads; they mostly wait for the disk.
_UPLOADS = 4

_router = APIRouter()


def create_app(
    settings: Settings,
    predictor: Predictor | Loaded | None = None,
    accepted: Sequence[tokens.Token] = (),
) -> FastAPI:
    """Return the application. It loads the model of `settings` on start, unless it gets a
    `predictor`, or generations that are loaded. `accepted` are the access tokens.

    Raises (on start, not in this call):
        ModelError, DataError, InvalidInput: the model or the plan cannot be used; see
            `Predictor.load`.
        StorageError: the folder of measurements cannot be used.
    """
    metrics = Metrics(logs.lost)
    predict = Predict(settings, metrics, _generation)

    def refused(client: tuple[str, int] | None, status: int, seconds: float) -> None:
        """Count and log a request that the protocol refused."""
        metrics.served("none", status, seconds)
        if settings.access_log:
            logs.write_refused(client, status, seconds)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        how: dict[str, Any] = {"plan": settings.plan, "further": generations.FURTHER}
        loaded = predictor or Predictor.load(settings.model, **how)
        if isinstance(loaded, Predictor):
            loaded = Loaded(generations.of(loaded))
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        # One thread: predictions hold the interpreter, so more threads would only delay the loop.
        with (
            ThreadPoolExecutor(1, "predict") as executor,
            ThreadPoolExecutor(_UPLOADS, "upload") as app.state.uploading,
        ):
            predict.start(executor)
            if settings.exchange is not None:
                app.state.exchange = Exchange(Path(settings.exchange))
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
    app.state.settings, app.state.metrics, app.state.tokens = settings, metrics, accepted
    app.state.refused = refused
    app.state.loaded = app.state.supervisor = app.state.exchange = None
    route = _predict_route(predict)
    app.router.routes.insert(0, route)
    app.include_router(_router)
    pages.install(app, predict, _loaded, _listed)
    app.add_middleware(_Shortcut, route=route)
    if settings.tokens is not None:
        app.add_middleware(Guard)
    app.add_middleware(logs.Access, metrics=metrics, log=settings.access_log)
    requests.install(app)
    schema.install(app, settings)
    return app


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries of these error statuses in the OpenAPI description of a route."""
    return {status: {"model": requests.ErrorReply} for status in statuses}


class _Shortcut:
    """ASGI middleware that calls the route of predictions directly, because routing would take a
    tenth of their time."""

    def __init__(self, app: ASGIApp, route: APIRoute) -> None:
        self._app, self._route = app, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != self._route.path or scope.get("method") != "POST":
            return await self._app(scope, receive, send)
        scope["route"] = self._route
        try:
            return await self._route.app(scope, receive, send)
        except (RequestError, InvalidInput) as error:
            return await requests.refusal(error)(scope, receive, send)


def _predict_route(predict: Predict) -> APIRoute:
    """Return the route to `predict`: FastAPI describes it, and ASGI calls it directly."""

    async def described() -> None: ...

    labels = {"name": "predict", "summary": "The best configs of one problem or many"}
    how: dict[str, Any] = {"methods": ["POST"], "response_model": schema.PredictReply, **labels}
    how["responses"] = _refusals(400, 404, 413, 415, 422, 429, 500, 503)
    route = APIRoute("/v1/predict", described, openapi_extra=schema.PREDICT_BODY, **how)
    route.app = predict
    return route


@_router.get("/v1/devices", summary="The devices that can be asked for", responses=_refusals(503))
async def devices(request: Request, response: Response) -> schema.DevicesReply:
    current = _loaded(request.app).current
    response.headers["etag"] = f'"{current.digest}"'
    own = {model.device.key: model.device for model in current.predictor.models.values()}
    served = []
    for device in {**KNOWN, **own}.values():
        model = current.model_of(device.key)
        version, digest = (None, None) if model is None else (model.version, model.digest)
        fields = dataclasses.asdict(device)
        served.append(schema.ServedDevice(**fields, model=version, digest=digest))
    return schema.DevicesReply(served)


@_router.get("/v1/models", summary="The models that are loaded", responses=_refusals(503))
async def models(request: Request, response: Response) -> schema.ModelsReply:
    reply = await _listed(request.app)
    response.headers["etag"] = f'"{reply.generation}"'
    return reply


async def _listed(app: FastAPI) -> schema.ModelsReply:
    """Return the reply that lists all loaded models, and those that retraining has published beside
    them."""
    reply = _models(_loaded(app))
    if (exchange := app.state.exchange) is not None:
        digests = {model.digest for model in reply.models}
        for path, read in await asyncio.to_thread(published, exchange.folder):
            if read.digest not in digests:
                beside = schema.ServedModel.of(path.name, read.digest, read.card, in_use=False)
                reply.models.append(beside)
    return reply


def _models(loaded: Loaded) -> schema.ModelsReply:
    """Return the reply that lists all loaded models."""
    used = [
        schema.ServedModel.of(model.version, model.digest, model.card, in_use=True)
        for model in loaded.current.predictor.models.values()
    ]
    return schema.ModelsReply(
        loaded.current.digest,
        used,
        [
            schema.FormerModel(device, model.version, model.digest, generation.digest)
            for generation in loaded.others
            for device, model in generation.predictor.models.items()
        ],
    )


@_router.get(
    "/v1/models/{digest}/{file}",
    summary="A file of a model, or the part of it that Range names",
    response_class=FileResponse,
    responses=_refusals(404, 503),
)
async def model_file(request: Request, digest: str, file: str) -> Response:
    exchange: Exchange | None = request.app.state.exchange
    folder = _loaded(request.app).folder_of(digest)
    if folder is None and exchange is not None:
        beside = await asyncio.to_thread(published, exchange.folder)
        folder = next((path for path, read in beside if read.digest == digest), None)
    # The name of a file might be a path to another folder, or one that no card lists.
    has_it = folder is not None and (folder / file).parent == folder and (folder / file).is_file()
    if folder is None or not has_it or file not in {CARD, SIGNATURE, *_files_of(folder)}:
        message = f"no model that /v1/models lists has this file: {shorten(f'{digest}/{file}')}"
        raise RequestError(404, "not_found", message, "path", None, "a file that its card lists")
    return FileResponse(folder / file, media_type="application/octet-stream")


def _files_of(folder: Path) -> Mapping[str, str]:
    """Return the digests of the files of a model, by name."""
    return card_of(folder).card.files


@_router.post(
    "/v1/measurements",
    summary="Send measurements, a Parquet file as confpred sample writes them",
    status_code=202,
    responses=_refusals(401, 403, 404, 413, 415, 422, 429, 507),
    openapi_extra=schema.MEASUREMENTS_BODY,
)
async def submit(request: Request) -> schema.Submission:
    """Keep the file; it is on the disk when the reply is sent, and is checked soon afterwards."""
    headers, state = dict(request.scope["headers"]), request.app.state
    key, length = announced_id(headers), headers.get(b"content-length", b"")
    exchange, body = _exchange(request.app), request.stream()
    if state.settings.tokens is None:
        _check_local(request, "write")
    token = request.scope.get(logs.TOKEN, "local")
    return await take(exchange, state.settings, key, length, body, token, state.uploading)


@_router.get("/v1/measurements", summary="The uploads in the data", responses=_refusals(404))
async def submissions(request: Request) -> schema.SubmissionsReply:
    return schema.SubmissionsReply(await asyncio.to_thread(_exchange(request.app).admitted))


@_router.get("/v1/measurements/{upload}", summary="An upload by its id", responses=_refusals(404))
async def submission(request: Request, upload: str) -> schema.Submission:
    return await _upload(request.app, upload)


@_router.get(
    "/v1/measurements/{upload}/rows",
    summary="The rows of an upload that are in the data, as Parquet",
    response_class=FileResponse,
    responses=_refusals(404),
)
async def submitted_rows(request: Request, upload: str) -> Response:
    sent, path = await _upload(request.app, upload), _exchange(request.app).path(ADMITTED, upload)
    if not (sent.rows and path.exists()):
        raise _unknown_upload(upload)
    return FileResponse(path, media_type=schema.PARQUET)


async def _upload(app: FastAPI, upload: str) -> schema.Submission:
    """Return the upload with this id, or raise a RequestError."""
    submission = await asyncio.to_thread(_exchange(app).find, upload)
    if submission is None:
        raise _unknown_upload(upload)
    return submission


def _unknown_upload(upload: str) -> RequestError:
    message = f"no upload with rows here has the id {shorten(upload)!r}"
    return RequestError(404, "not_found", message, "id", shorten(upload), "the id of an upload")


@_router.get("/v1/jobs", summary="Retraining: what waits, runs and is done")
async def jobs(request: Request) -> schema.JobsReply:
    exchange: Exchange | None = request.app.state.exchange
    return schema.JobsReply([] if exchange is None else await asyncio.to_thread(exchange.jobs))


@_router.post(
    "/v1/jobs",
    summary="Retrain a device's model",
    status_code=202,
    responses=_refusals(401, 403, 404, 422),
    openapi_extra=schema.JOB_QUERY,
)
async def retrain(request: Request) -> schema.Job:
    """Add a job, which waits for its turn when the reply is sent."""
    device = get_device(request.query_params.get("device"))  # type: ignore[arg-type]
    exchange = _exchange(request.app)
    if request.app.state.settings.tokens is None:
        _check_local(request)
    return await asyncio.to_thread(exchange.add_job, device.key)


def _exchange(app: FastAPI) -> Exchange:
    """Return the folder of measurements, or raise a RequestError."""
    exchange: Exchange | None = app.state.exchange
    if exchange is None:
        message = "this server takes no measurements; confpred serve --exchange FOLDER does"
        raise RequestError(404, "no_exchange", message)
    return exchange


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
    counted = {"counts": state.metrics.rows(), "processes": {"0": os.getpid()}}
    if supervisor is not None:
        with contextlib.suppress(Gone):
            counted = await supervisor.ask("metrics")
    models = state.loaded.current.predictor.models if state.loaded else {}
    exchanged = await asyncio.to_thread(state.exchange.counts) if state.exchange else []
    counts = [*counted["counts"], *exchanged]
    text = await asyncio.to_thread(exposition, counts, counted["processes"], models)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@_router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


def _loaded(app: FastAPI) -> Loaded:
    """Return the loaded generations; raise a RequestError before the start and after the end."""
    loaded: Loaded | None = app.state.loaded
    if loaded is None:
        message = "no model is loaded; ask again in a moment"
        raise RequestError(503, "not_ready", message, headers={"retry-after": "1"})
    return loaded


def _generation(scope: Scope) -> Generation:
    """Return the generation that answers a request: the one that it names, or the current one."""
    loaded = _loaded(scope["app"])
    query = scope["query_string"]
    version = QueryParams(query).get("version") if query else None
    return loaded.current if version is None else loaded.find(version)


_CHANGES = _refusals(401, 403, 409, 503)


@_router.post("/v1/models/reload", summary="Read models and the plan again", responses=_CHANGES)
async def reload(request: Request) -> schema.ChangeReply:
    """Switch all workers to the models and the plan on disk, or none; the reply comes
    afterwards."""
    return await _ask_for_change(request, "reload")


@_router.post("/v1/models/rollback", summary="Return to what answered", responses=_CHANGES)
async def rollback(request: Request) -> schema.ChangeReply:
    """Switch all workers to the former models and plan, or none; the reply comes afterwards."""
    return await _ask_for_change(request, "rollback")


async def _ask_for_change(request: Request, word: str) -> schema.ChangeReply:
    """Send `word`, reload or rollback, to the supervisor, and return its answer as the reply."""
    state = request.app.state
    if state.settings.tokens is None:  # else `Guard` has checked the token
        _check_local(request)
    supervisor: Channel | None = state.supervisor
    if supervisor is None:
        message = "this application runs without confpred serve"
        raise RequestError(409, "not_supervised", message)
    try:
        answer = await supervisor.ask(word)
    except Gone:
        raise RequestError(503, "not_ready", "the server is ending") from None
    if "error" in answer:
        message = f"nothing has changed: {answer['error']}"
        raise RequestError(409, f"{word}_refused", message)
    served = _models(state.loaded)
    return schema.ChangeReply(answer["outcome"], served.generation, served.models, served.former)


def _check_local(request: Request, scope: tokens.Scope = "admin") -> None:
    """Refuse clients on other machines. A page in a browser and a proxy count as another machine,
    because anybody may use them."""
    foreign = next((name for name in _FOREIGN if name in request.headers), None)
    if foreign or request.client is None or not tokens.is_loopback(request.client.host):
        message = "only a program on the server's machine may do this, as there are no tokens"
        allowed = f"a token of scope {scope}, on a server that was given --tokens"
        raise RequestError(403, "forbidden", message, foreign, None, allowed)


class Guard:
    """ASGI middleware that refuses a request without a token that allows it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in schema.OPEN:
            return await self._app(scope, receive, send)
        needed = SCOPES.get(scope["path"], "read") if scope["method"] == "POST" else "read"
        secret = _secret(scope)
        token = None if secret is None else tokens.find(scope["app"].state.tokens, secret)
        status, code = 401, "unauthorized"
        allowed = f"Bearer and a token of scope {needed}"
        details = "" if secret is None else ', error="invalid_token"'
        message = f"the request has {'no' if secret is None else 'an unknown'} token"
        if token is not None:
            scope[logs.TOKEN] = token.name
            if token.allows(needed):
                return await self._app(scope, receive, send)
            status, code, allowed = 403, "forbidden", f"a token of scope {needed}"
            details = f', error="insufficient_scope", scope="{needed}"'
            message = f"the token {shorten(token.name)!r} is not for this"
        challenge = {"www-authenticate": f'Bearer realm="confpred"{details}'}
        error = RequestError(status, code, message, "authorization", None, allowed, challenge)
        reply = requests.refusal(error)
        if _is_page(scope):
            reply.headers.append("www-authenticate", 'Basic realm="confpred", charset="UTF-8"')
        return await reply(scope, receive, send)


def _is_page(scope: Scope) -> bool:
    """Return whether a browser may send the token as a password. It would send it with every later
    request, so no path that changes something is such a page."""
    return scope["path"] in pages.PATHS and scope["method"] == "GET"


def _secret(scope: Scope) -> bytes | None:
    """Return the secret in the Authorization header: None without that header, empty if its scheme
    is not allowed here."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            if scheme.lower() == b"basic" and _is_page(scope):
                with contextlib.suppress(binascii.Error):
                    return base64.b64decode(secret.strip()).partition(b":")[2]
            return secret.strip() if scheme.lower() == b"bearer" else b""
    return None
