"""Routes that manage the server: reload the models, and roll back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from . import access, errors, schema
from .channel import Channel, Gone

router = APIRouter()
#: Headers of browsers and of proxies.
_FOREIGN = ("origin", "x-forwarded-for", "forwarded")
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": errors.ErrorReply} for status in (401, 403, 409, 503)
}


@router.post("/v1/models/reload", summary="Read models and the plan again", responses=_REFUSALS)
async def reload(request: Request) -> schema.ChangeReply:
    """All workers answer by what was read when this is answered, or none does."""
    return await _change(request, "reload")


@router.post("/v1/models/rollback", summary="Return to what answered before", responses=_REFUSALS)
async def rollback(request: Request) -> schema.ChangeReply:
    """All workers answer by the former models and plan when this is answered, or none does."""
    return await _change(request, "rollback")


async def _change(request: Request, word: str) -> schema.ChangeReply:
    _check(request)
    supervisor: Channel | None = request.app.state.supervisor
    if supervisor is None:
        error = errors.Error("not_supervised", "this application runs without confpred serve")
        raise errors.RequestError(503, error)
    try:
        answer = await supervisor.ask(word)
    except Gone:
        error = errors.Error("not_ready", "the server is ending")
        raise errors.RequestError(503, error) from None
    if "error" in answer:
        error = errors.Error(f"{word}_refused", f"nothing has changed: {answer['error']}")
        raise errors.RequestError(409, error)
    served = schema.models(request.app.state.loaded)
    return schema.ChangeReply(answer["outcome"], served.generation, served.models, served.former)


def _check(request: Request) -> None:
    """Without tokens, only who is on this machine may manage the server, and not by a page in a
    browser or through a proxy, which anybody may be behind."""
    if request.app.state.settings.tokens is not None:
        return  # `access.Guard` has looked at the token
    foreign = [name for name in _FOREIGN if name in request.headers]
    if foreign or request.client is None or not access.is_loopback(request.client.host):
        error = errors.Error(
            "forbidden",
            "only a program on the server's machine may manage it, as there are no tokens",
            foreign[0] if foreign else None,
            allowed="a token of scope admin, on a server that was given --tokens",
        )
        raise errors.RequestError(403, error)
