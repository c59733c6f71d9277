"""One streamed answer of an OpenAI endpoint, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import orjson

from twinfang.endpoint.endpoint import Endpoint
from twinfang.endpoint.refusal import message_in, message_of, transport_message
from wire.errors import TwinfangError


class NotAnsweredError(TwinfangError):
    """A request has no answer, or one that broke off."""

    code = "not_answered"


@dataclass(frozen=True)
class Piece:
    """What one event adds to the answer."""

    text: str = ""
    thinking: str = ""
    finish_reason: str = ""
    """Of the last piece: ``stop``, ``length`` and others."""


class AnswerStream:
    """Requests to one endpoint, one after the other on one connection."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._url = endpoint.base_url
        self._client = endpoint.client()

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def pieces(self, path: str, body: dict[str, Any]) -> Iterator[Piece]:
        """Sends ``body`` and yields the answer's pieces as they come. Raises :class:`NotAnsweredError`. An
        iterator that is closed before its end cancels the request."""
        try:
            with self._client.stream("POST", f"{self._url}{path}", json=body | {"stream": True}) as response:
                if response.status_code != 200:
                    raise NotAnsweredError(message_of(response.status_code, response.read()))
                yield from _pieces(response)
        except httpx2.TransportError as error:
            raise NotAnsweredError(transport_message(error, self._url)) from error
        except httpx2.DecodingError as error:
            raise NotAnsweredError(f"{self._url} sent what can't be decompressed: {error}") from error


def _pieces(response: httpx2.Response) -> Iterator[Piece]:
    is_whole = False
    for event in httpx2.EventSource(response):
        if event.data == "[DONE]":
            return
        try:
            chunk = orjson.loads(event.data)
        except orjson.JSONDecodeError as error:
            raise NotAnsweredError(f"the endpoint sent an event that is no JSON: {error}") from error
        if not isinstance(chunk, dict) or "error" in chunk:
            raise NotAnsweredError(message_in(chunk))
        for choice in chunk.get("choices") or ():
            piece = _piece(choice)
            is_whole = is_whole or bool(piece.finish_reason)
            yield piece
    if not is_whole:
        raise NotAnsweredError("the stream ended before the answer's end")


def _piece(choice: dict[str, Any]) -> Piece:
    delta = choice.get("delta") or {}
    return Piece(
        text=choice.get("text") or delta.get("content") or delta.get("refusal") or "",
        thinking=delta.get("reasoning_content") or delta.get("reasoning") or "",
        finish_reason=choice.get("finish_reason") or "",
    )
