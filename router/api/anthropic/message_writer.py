"""Writes the answers of ``POST /v1/messages``: the whole message, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from router.api.anthropic.content_blocks import TEXT, BlockEvents, whole_blocks
from router.api.anthropic.errors import ANTHROPIC_ERRORS
from router.http.error_form import PublicError
from router.models.answer_parts import CallBegun, ContentReader, Part
from router.serving.answer import Answer, Delta
from router.serving.slice_lane import SliceLane
from router.serving.text_request import TextRequest
from router.serving.usage import Usage
from wire.errors import TwinfangError


class MessageWriter:
    """Builds one message from the deltas of its only choice."""

    def __init__(self, request: TextRequest, request_id: str) -> None:
        self._request = request
        self._request_id = request_id
        self._reader = ContentReader() if request.form is None else request.form.reader()
        self._blocks = BlockEvents()
        self._calls_tools = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def begin(self, index: int, answer: Answer, slices: SliceLane) -> None:
        """Do nothing: a message does not repeat its prompt."""

    def keep(self, index: int, delta: Delta) -> Delta:
        """Return ``delta`` as it is: messages have no log-probabilities."""
        return delta

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        content = whole_blocks(self._parts(deltas[0]))
        return self._message(content, usage)

    def written(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> bytes:
        events: list[dict[str, Any]] = []
        if is_first:
            usage = Usage(self._request.num_prompt_tokens, 0, None)
            events.append({"type": "message_start", "message": self._message([], usage)})
            if self._request.form is None:  # the lane for text needs an open block
                events += self._blocks.begin(TEXT)
        events += self._blocks.of(self._parts(delta))
        return _written(events)

    def watched(self, index: int) -> str | None:
        """Leave out texts that would begin a block: each event of a lane is a delta of the open one."""
        watched = self._reader.watched
        kind = "thinking" if watched else "text"
        return watched if self._blocks.kind == kind else None

    def end(self, usage: Usage) -> bytes:
        events = [] if self._blocks.has_begun else self._blocks.begin(TEXT)
        events += self._blocks.end()
        events.append({"type": "message_delta", "delta": self._stop, "usage": _usage_object(usage)})
        events.append({"type": "message_stop"})
        return _written(events)

    def error_end(self, error: TwinfangError) -> bytes:
        return _written([ANTHROPIC_ERRORS.body(PublicError.of(error), self._request_id)])

    def _parts(self, delta: Delta) -> list[Part]:
        """Return the new parts. With the last delta, note why the answer ended."""
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason == "length"
            parts += self._reader.cut() if is_cut else self._reader.finish()
        self._calls_tools |= any(isinstance(part, CallBegun) for part in parts)
        if delta.finish_reason is not None:
            self._stop = self._why(delta)
        return parts

    def _why(self, last: Delta) -> dict[str, Any]:
        """Return why an answer ended. Only a stop sequence is a string in ``stop_reason``; tokens that end an
        answer are numbers."""
        if last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._calls_tools:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._request.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model.name,
            "content": content,
            **self._stop,
            "usage": _usage_object(usage),
        }


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Return the usage. Prompt tokens that were cached count separately."""
    cached = usage.cached_tokens or 0
    written: dict[str, Any] = {
        "input_tokens": usage.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.num_answer_tokens,
    }
    if usage.num_thinking_tokens is not None:
        written["output_tokens_details"] = {"thinking_tokens": usage.num_thinking_tokens}
    return written


def _written(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(map(_event, events))


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))
