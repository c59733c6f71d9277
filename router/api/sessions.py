"""``POST /v1/sessions/retain``, ``/release``, ``/prefetch``, ``/fork``: what becomes of a session's cached
prompts.

A client reaches only sessions of its own API key (:mod:`router.api.session_name`).
"""

from __future__ import annotations

import math
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from router.access.cache_salt import cache_salt
from router.access.client import client_of
from router.api.openai.schemas import answers
from router.api.session_name import checked_session_id, session_id_of, session_name
from router.api.text_body import ranged
from router.http.bodies.json_body import body_schema, read_json
from router.http.json_answer import JsonAnswer
from router.http.openai_errors import shown
from router.serving.services import services_of
from wire.errors import InvalidRequestError
from wire.messages.sessions import MAX_OWNER_CHARS, MAX_RETAIN_S, SessionAction, TendSession

router = APIRouter()


class SessionBody(BaseModel):
    """Names a session as its requests do."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None


class RetainBody(SessionBody):
    seconds: float | None = ranged(1, MAX_RETAIN_S)


class ForkBody(SessionBody):
    new_session_id: str | None = None
    """The session that begins."""


class SessionAnswer(BaseModel):
    object: Literal["session"]
    model: str
    num_servers: int
    """Servers that answered."""
    num_starts: int
    """Starts, on all servers, that are retained now, that go before others, that a device has now, or that
    the new session begins from."""
    num_tokens: int
    """Tokens of the longest of them."""
    over_quota: bool
    """Whether a start was not retained because the quota is used up."""


@router.post("/v1/sessions/retain", responses=answers(SessionAnswer), openapi_extra=body_schema(RetainBody))
async def retain_session(request: Request) -> Response:
    """Keep the session's newest starts in host memory for a time, counted from now."""
    body = await read_json(request, RetainBody)
    seconds = body.seconds
    if seconds is None:
        raise InvalidRequestError(
            f"give seconds: for how long to keep the starts, 1 to {MAX_RETAIN_S:.0f}", param="seconds"
        )
    if not 1 <= seconds <= MAX_RETAIN_S or math.isnan(seconds):
        raise InvalidRequestError(
            f"seconds must be between 1 and {MAX_RETAIN_S:.0f}, got {shown(seconds)}", param="seconds"
        )
    return await _tend(request, body, "retain", seconds)


@router.post("/v1/sessions/release", responses=answers(SessionAnswer), openapi_extra=body_schema(SessionBody))
async def release_session(request: Request) -> Response:
    """Retain nothing of the session, and let its own starts be given up before all others."""
    return await _tend(request, await read_json(request, SessionBody), "release")


@router.post(
    "/v1/sessions/prefetch", responses=answers(SessionAnswer), openapi_extra=body_schema(SessionBody)
)
async def prefetch_session(request: Request) -> Response:
    """Bring the session's longest start from host memory to the device, before its next request needs it."""
    return await _tend(request, await read_json(request, SessionBody), "prefetch")


@router.post("/v1/sessions/fork", responses=answers(SessionAnswer), openapi_extra=body_schema(ForkBody))
async def fork_session(request: Request) -> Response:
    """Let a new session begin from the session's newest starts. Both go on without giving up the other's."""
    body = await read_json(request, ForkBody)
    if body.new_session_id is None:
        raise InvalidRequestError(
            "give new_session_id: the session that begins from session_id", param="new_session_id"
        )
    new_id = checked_session_id(body.new_session_id, "new_session_id")
    return await _tend(request, body, "fork", into_id=new_id)


async def _tend(
    request: Request, body: SessionBody, action: SessionAction, for_s: float = 0.0, into_id: str = ""
) -> Response:
    services, client = services_of(request), client_of(request)
    model = services.models.find(body.model)
    session_id = session_id_of(request, body.session_id, body.prompt_cache_key)
    if not session_id:
        raise InvalidRequestError("give session_id: the call is for one session", param="session_id")
    if session_id == into_id:
        raise InvalidRequestError(
            f"new_session_id must differ from session_id, both are {shown(into_id)}", param="new_session_id"
        )
    salt = cache_salt(client.api_key, body.cache_salt or "", services.config.cache_isolation)
    name, into = (session_name(client.api_key, salt, one) for one in (session_id, into_id))
    call = TendSession(name, action, client.name[:MAX_OWNER_CHARS], for_s, into)
    told = await model.servers.tend_session(call)
    answer = SessionAnswer(
        object="session",
        model=model.name,
        num_servers=len(told),
        num_starts=sum(news.num_starts for news in told),
        num_tokens=max((news.num_tokens for news in told), default=0),
        over_quota=any(news.over_quota for news in told),
    )
    return JsonAnswer(answer.model_dump())
