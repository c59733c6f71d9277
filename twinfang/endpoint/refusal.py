"""What went wrong with a request, in one line for people."""

from __future__ import annotations

from typing import Any

import httpx2
import orjson

MAX_SHOWN = 500


def message_of(status: int, body: bytes) -> str:
    """Returns the message of an answer that is no success, with its status."""
    return f"HTTP {status}: {_shown(_message(_parsed(body)) or body.decode(errors='replace'))}"


def message_in(body: Any) -> str:
    """Returns the message of an error object, for example of an event in a stream."""
    return _shown(_message(body) or str(body))


def transport_message(error: httpx2.TransportError, url: str) -> str:
    """Returns what happened to a request that brought no whole answer."""
    said = str(error) or type(error).__name__
    match error:
        case httpx2.ConnectTimeout():
            return f"no connection to {url} within the time for it"
        case httpx2.ConnectError():
            return f"can't connect to {url}: {said}"
        case httpx2.ReadTimeout() | httpx2.WriteTimeout():
            return f"{url} brought nothing for too long; raise --timeout if answers may take longer"
    return f"the connection to {url} was lost: {said}"


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _message(body: Any) -> str:
    """Returns the message of OpenAI's form, of FastAPI's, or nothing."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body)
    text = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return text if isinstance(text, str) else ""


def _shown(text: str) -> str:
    text = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
