"""``POST /admin/v1/purge``: deletes cached prompts of a key, of a salt, of an age, or all, on all servers."""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from router.admin.audited_call import note_attempt, note_change
from router.fleet.links.worker_watch import Worker
from router.http.bodies.json_body import body_schema, read_json
from router.http.openai_errors import shown
from router.serving.services import Services, services_of
from wire.errors import InvalidRequestError, TwinfangError, UnavailableError
from wire.messages.cache_salt import owner_of_given, owner_of_key
from wire.messages.purge import MAX_WAIT_S, PurgeNews, PurgePrefixes

WAIT_S = 30.0
"""How long requests under way are waited for, unless the call says otherwise."""
MAX_HOURS = 24 * 365 * 100
_NAME = re.compile(r"[!-~]{1,512}")
_TARGETS = ("key", "cache_salt", "older_than_hours", "everything")

router = APIRouter()


class PurgeBody(BaseModel):
    """Names what is to be deleted, by one of the first four fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    key: str | None = None
    """Name of an API key, or `tenant:` and the tenant of a token."""
    cache_salt: str | None = None
    """A salt that requests without a key have sent."""
    older_than_hours: Annotated[float, Field(ge=0, le=MAX_HOURS)] | None = None
    everything: Literal[True] | None = None
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = WAIT_S
    """How long requests under way are waited for; 30 by default."""


class PurgeView(BaseModel):
    """What was deleted. Nothing of what was asked for is left on any server."""

    object: Literal["purge"] = "purge"
    num_servers: int
    num_starts: int
    """Cached prompts on devices and in host memory; those in both count twice."""
    num_records: int
    """Cached prompts in files."""
    num_bytes: int
    """Bytes of these in files."""
    warning: str
    """Says so if nothing was found."""


@router.post("/purge", openapi_extra=body_schema(PurgeBody))
async def purge(request: Request) -> PurgeView:
    """Deletes cached prompts from files, host memory and devices of all servers. Answers when they are gone.

    Requests under way are waited for first. A server that can't be reached, or a request that does not end in
    time, is an error (503): what the servers that answered had is deleted then. What clients send after the
    call may be cached again."""
    body = await read_json(request, PurgeBody)
    services = services_of(request)
    target = _audited(body)
    note_attempt(request, **target)
    told = await _purge_all(services.pool.workers(), _wanted(body, services))
    view = PurgeView(
        num_servers=len(told),
        num_starts=sum(news.num_starts for news in told),
        num_records=sum(news.num_records for news in told),
        num_bytes=sum(news.num_bytes for news in told),
        warning="",
    )
    if not view.num_starts and not view.num_records:
        view.warning = _nothing_found(body, services, len(told))
    note_change(request, before=target, after=view.model_dump(exclude={"object"}))
    return view


def _wanted(body: PurgeBody, services: Services) -> PurgePrefixes:
    """Return what servers are asked for. Raises :class:`InvalidRequestError`."""
    given = [name for name in _TARGETS if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give one of {', '.join(_TARGETS)}: what is to be deleted? Got {', '.join(given) or 'none'}"
        )
    if body.older_than_hours is not None:
        return PurgePrefixes(older_than_s=body.older_than_hours * 3600)
    return PurgePrefixes(_owner(body, services), wait_s=body.wait_s)


def _owner(body: PurgeBody, services: Services) -> str | None:
    is_divided = services.config.cache_isolation == "key"
    if body.key is not None:
        if not _NAME.fullmatch(body.key):
            raise InvalidRequestError(f"key must be the name of a key, got {shown(body.key)}", param="key")
        if not is_divided:
            raise InvalidRequestError(
                "keys share cached prompts here (--cache-isolation none), so nobody can say whose they are: "
                "give cache_salt, or everything",
                param="key",
            )
        return owner_of_key(body.key)
    if body.cache_salt is not None:
        if not body.cache_salt:
            raise InvalidRequestError("cache_salt must not be empty", param="cache_salt")
        if is_divided and _has_keys(services):
            raise InvalidRequestError(
                "requests to this router have keys, which their cached prompts belong to: give key",
                param="cache_salt",
            )
        return owner_of_given(body.cache_salt)
    return None


def _has_keys(services: Services) -> bool:
    return services.key_file is not None or services.config.token_issuer is not None


def _audited(body: PurgeBody) -> dict[str, object]:
    """Return what the audit log tells of a call. Salts may be secret, so their digest stands for them."""
    target = body.model_dump(exclude_none=True)
    if body.cache_salt is not None:
        digest = hashlib.sha256(body.cache_salt.encode()).hexdigest()
        target["cache_salt"] = f"sha256:{digest[:16]}"
    return target


async def _purge_all(workers: list[Worker], wanted: PurgePrefixes) -> list[PurgeNews]:
    """Return the answers of all servers. Raises :class:`UnavailableError` if something may be left.

    Servers that drain are asked first: until their prompts are gone, others may take them over.
    """
    told = await _purge_each([one for one in workers if one.drain.is_draining], wanted)
    told += await _purge_each([one for one in workers if not one.drain.is_draining], wanted)
    answers, problems = [], []
    for worker, answer in told:
        name = f"{worker.pool_role} server {worker.address}"
        if isinstance(answer, TwinfangError):
            problems.append(f"{name}: {answer.message}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answers.append(answer)
            if answer.num_under_way:
                problems.append(
                    f"{name}: {answer.num_under_way} requests did not end within {wanted.wait_s:g} s"
                )
    if problems or not workers:
        problem = "; ".join(problems) or "this router has no servers"
        raise UnavailableError.told(
            f"something may be left: {problem}. {len(answers)} of {len(workers)} servers have deleted what "
            "they could: ask again, or end the requests first"
        )
    return answers


async def _purge_each(
    workers: list[Worker], wanted: PurgePrefixes
) -> list[tuple[Worker, PurgeNews | BaseException]]:
    """Return each server's answer or error."""
    told = await asyncio.gather(*(worker.purge(wanted) for worker in workers), return_exceptions=True)
    return list(zip(workers, told, strict=True))


def _nothing_found(body: PurgeBody, services: Services, num_servers: int) -> str:
    nothing = f"none of the router's servers ({num_servers}) had such a prompt"
    keys = () if services.key_file is None else services.key_file.keys
    if body.key is None or body.key in {key.name for key in keys}:
        return nothing
    of_issuer = body.key.startswith("tenant:") and services.config.token_issuer is not None
    return nothing if of_issuer else f"{nothing}, and no API key here has the name {shown(body.key)}"
