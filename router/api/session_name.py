"""Sessions: requests that continue one another, such as the turns of a conversation or the steps of an agent.

Servers know a session by a name that the router makes of its id, of the API key and of the cache salt. So
nobody can name a session of another key, whatever id they send.
"""

from __future__ import annotations

import hashlib
import json
import re

from fastapi import Request

from router.access.api_keys import ApiKey
from router.access.client import Client
from router.http.openai_errors import shown
from router.http.request_head import header_of
from wire.errors import InvalidRequestError
from wire.messages.sessions import MAX_OWNER_CHARS, NAME_BYTES, TendSession

HEADER = "X-Session-Id"
MAX_CHARS = 256
RETENTIONS = {"in_memory": 0.0, "in-memory": 0.0, "5m": 300.0, "1h": 3600.0, "24h": 86_400.0}
"""Seconds for which a session's starts are retained after a request, by the value of OpenAI's field
``prompt_cache_retention``. Two of them are times of Anthropic's ``cache_control``."""
_ID = re.compile(rf"[!-~]{{1,{MAX_CHARS}}}")


def session_id_of(http: Request, field: str | None, cache_key: str | None) -> str:
    """Return the id of the session that a request belongs to; empty: none.

    The field ``session_id`` comes before the header, and the header before OpenAI's ``prompt_cache_key``,
    which may have any characters. Raises :class:`InvalidRequestError` for an id that is too long or has other
    characters than an id may have.
    """
    header = header_of(http.scope, HEADER.lower().encode())
    for given, param in ((field, "session_id"), (header, HEADER)):
        if given is not None:
            return checked_session_id(given, param)
    return f"prompt_cache_key {cache_key}" if cache_key else ""


def checked_session_id(given: str, param: str) -> str:
    """Return an id. Raises :class:`InvalidRequestError` if it is none."""
    if not _ID.fullmatch(given):
        raise InvalidRequestError(
            f"{param} must have 1 to {MAX_CHARS} characters, all of them printable ASCII without spaces, "
            f"got {len(given)} in {shown(given)}",
            param=param,
        )
    return given


def session_name(key: ApiKey, cache_salt: str, session_id: str) -> str:
    """Return the name by which servers know a session; empty if ``session_id`` is empty."""
    if not session_id:
        return ""
    parts = json.dumps([key.name, cache_salt, session_id]).encode()
    return hashlib.blake2b(parts, digest_size=NAME_BYTES).hexdigest()


def retention_of(name: str, client: Client, given: str | None) -> TendSession | None:
    """Return what servers are told to retain after a request of the session with this name, which may be
    empty. Raises :class:`InvalidRequestError` for an unknown value of ``prompt_cache_retention``."""
    if given is not None and given not in RETENTIONS:
        raise InvalidRequestError(
            f"prompt_cache_retention may be {', '.join(RETENTIONS)}; got {shown(given)}",
            param="prompt_cache_retention",
        )
    for_s = 0.0 if given is None else RETENTIONS[given]
    return TendSession(name, "retain", client.name[:MAX_OWNER_CHARS], for_s) if name and for_s else None
