"""One line of a batch's input: OpenAI's request object.

{"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "…", "messages": […]}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_CUSTOM_ID = 1024
MAX_SHOWN = 80


class BadLineError(Exception):
    """A line is no request; the message says why."""


@dataclass(frozen=True)
class RequestLine:
    """A request of the input."""

    number: int
    """Counts from 1, empty lines too."""
    custom_id: str
    path: str
    """Below an endpoint's base URL: ``/chat/completions``."""
    body: dict[str, Any]

    @property
    def model(self) -> str | None:
        """The model that the line asks for."""
        model = self.body.get("model")
        return model if isinstance(model, str) else None


def parse_line(number: int, text: bytes) -> RequestLine:
    """Returns the request of a line. Raises :class:`BadLineError`."""
    try:
        request = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadLineError(f"is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise BadLineError("is no JSON object")
    custom_id, body, url = request.get("custom_id"), request.get("body"), request.get("url")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        expected = f"expected a string of 1 to {MAX_CUSTOM_ID:,} characters"
        raise BadLineError(f"has custom_id {_shown(custom_id)}: {expected}")
    if request.get("method") != "POST":
        raise BadLineError(f"has method {_shown(request.get('method'))}: expected POST")
    if url not in URLS:
        raise BadLineError(f"has url {_shown(url)}: expected {', '.join(URLS[:-1])} or {URLS[-1]}")
    if not isinstance(body, dict):
        raise BadLineError(f"has body {_shown(body)}: expected an object")
    if body.get("stream"):
        raise BadLineError("has stream in its body: answers of a batch are not streamed, leave it out")
    return RequestLine(number, custom_id, url.removeprefix("/v1"), body)


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
