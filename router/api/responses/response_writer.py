"""Writes the answers of ``POST /v1/responses``: the whole object, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from router.api.openai.logprobs import chat_logprobs
from router.api.responses.output import Event, Output
from router.http.openai_errors import error_body
from router.models.answer_parts import Content, ContentReader, Part
from router.serving.answer import Answer, Delta
from router.serving.slice_lane import SliceLane
from router.serving.text_request import TextRequest
from router.serving.usage import Usage
from wire.errors import OverloadedError, TwinfangError


class ResponseWriter:
    """Builds the JSON objects of one request from the deltas of its only choice."""

    def __init__(self, request: TextRequest, head: Mapping[str, Any]) -> None:
        """``head`` has the fields of the response that are known before there is an answer."""
        self._request = request
        self._head = head
        self._reader = ContentReader() if request.form is None else request.form.reader()
        self._output = Output(str(head["id"]).removeprefix("resp_"))
        self._finish_reason: str | None = None
        self._num_events = 0
        self.finished: dict[str, Any] | None = None
        """The response, once it is whole."""

    async def begin(self, index: int, answer: Answer, slices: SliceLane) -> None:
        """Do nothing: the prompt is not repeated."""

    def keep(self, index: int, delta: Delta) -> Delta:
        """Take the text and the log-probabilities of ``delta``, whose order counts."""
        self._taken(delta)
        return replace(delta, text="", logprobs=[], text_offsets=[])

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        self._output.end(self._last_status)
        return self._finish(usage)

    def written(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> bytes:
        events: list[Event] = []
        if is_first:
            begun = self._response("in_progress")
            events += ({"type": f"response.{name}", "response": begun} for name in ("created", "in_progress"))
        return self._bytes([*events, *self._taken(delta)])

    def watched(self, index: int) -> None:
        """Take no lane: each event has a number of its own."""

    def end(self, usage: Usage) -> bytes:
        events = self._output.end(self._last_status)
        whole = self._finish(usage)
        return self._bytes([*events, {"type": f"response.{whole['status']}", "response": whole}])

    def error_end(self, error: TwinfangError) -> bytes:
        """Return both events that tell of a failure: some clients know the one, some the other."""
        detail = error_body(error)["error"]
        told = {name: detail[name] for name in ("code", "message", "param")}
        code = "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
        if 400 <= error.http_status < 500 and not isinstance(error, OverloadedError):
            code = "invalid_prompt"
        failed = self._response("failed") | {
            "output": self._output.items,
            "error": {"code": code, "message": detail["message"]},
        }
        return self._bytes(
            [{"type": "error", **told}, {"type": "response.failed", "response": failed}],
        )

    def _taken(self, delta: Delta) -> list[Event]:
        parts: list[Part] = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            parts += self._reader.cut() if delta.finish_reason == "length" else self._reader.finish()
        if not delta.logprobs:
            return self._output.add(parts)
        # A token may have log-probabilities and no text, because it ends the answer or half a code point.
        return self._output.add(
            parts or [Content("")], chat_logprobs(delta.logprobs, self._request.model.tokenizer)
        )

    @property
    def _last_status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _finish(self, usage: Usage) -> dict[str, Any]:
        status = self._last_status
        self.finished = self._response(status) | {
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output.items,
            "usage": _usage_object(usage),
        }
        return self.finished

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def _bytes(self, events: Sequence[Event]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: Event) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = orjson.dumps({"type": event["type"], "sequence_number": number, **event})
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.num_answer_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_thinking_tokens or 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_answer_tokens,
    }
