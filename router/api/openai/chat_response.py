"""Writes the answers of ``POST /v1/chat/completions``: the whole object, and the chunks of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from router.api.openai.logprobs import JsonList, chat_logprobs
from router.models.tools.call_scanner import CallScanner, Found
from router.models.tools.tool_format import ToolCall
from router.serving.answer import Answer, Delta
from router.serving.slice_lane import SliceLane
from router.serving.text_request import TextRequest


class ChatWriter:
    """Builds the JSON objects of one request from the deltas of its choices."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._tokenizer = request.model.tokenizer
        self._scanners: dict[int, CallScanner] = {}
        self._kept: dict[int, JsonList] = {}
        """Log-probabilities of an answer that is not streamed, by choice, already converted to JSON."""
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head = {
            "id": request.id,
            "object": kind,
            "created": request.created,
            "model": request.model.name,
        }

    async def begin(self, index: int, answer: Answer, slices: SliceLane) -> None:
        """Do nothing: a chat's prompt is not echoed."""

    def keep(self, index: int, delta: Delta) -> Delta:
        """Convert the log-probabilities in ``delta`` to JSON and keep them; return the rest of the delta.
        Only for answers that are not streamed."""
        if self._request.logprobs is None:
            return delta
        self._kept.setdefault(index, JsonList()).add(chat_logprobs(delta.logprobs, self._tokenizer))
        return replace(delta, logprobs=[], text_offsets=[])

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = [self._whole_choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self._head, "choices": choices, **self._prompt_token_ids()}

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        found = self._search(index, delta)
        message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
        if found.calls:
            message["content"] = found.content or None
            message["tool_calls"] = [_call(call) for call in found.calls]
        return self._choice(index, delta, "message", message)

    def chunks(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> list[dict[str, Any]]:
        """Return the chunks for one choice's new delta. A choice's first chunk has only the role. A tool call
        comes in one chunk, once it is complete."""
        chunks = []
        if is_first:
            opening = self._choice(index, Delta(), "delta", {"role": "assistant", "content": ""})
            chunks.append({**self._head, "choices": [opening], **self._prompt_token_ids()})
        num_before = self._num_calls(index)
        found = self._search(index, delta)
        has_ended = delta.finish_reason is not None
        if not (found.content or found.calls or has_ended) and self._may_leave_out:
            return chunks
        news: dict[str, Any] = {}
        if found.content or not (has_ended or found.calls):
            news["content"] = found.content
        if found.calls:
            news["tool_calls"] = [
                {"index": number, **_call(call)} for number, call in enumerate(found.calls, num_before)
            ]
        return [*chunks, {**self._head, "choices": [self._choice(index, delta, "delta", news)]}]

    def last_chunk(self) -> dict[str, Any]:
        return {**self._head, "choices": []}

    def _search(self, index: int, delta: Delta) -> Found:
        """Return a choice's new text and tool calls. Without tools all of it is text."""
        tool_use = self._request.tool_use
        if tool_use is None:
            return Found(delta.text)
        if index not in self._scanners:
            self._scanners[index] = tool_use.scanner()
        scanner = self._scanners[index]
        found = scanner.push(delta.text)
        if delta.finish_reason is not None:
            last = scanner.cut() if delta.finish_reason == "length" else scanner.finish()
            found.content += last.content
            found.calls += last.calls
        return found

    @property
    def _may_leave_out(self) -> bool:
        """Whether chunks without content and calls, which occur while a call is incomplete, are left out."""
        request = self._request
        return request.tool_use is not None and request.logprobs is None and not request.return_token_ids

    def _num_calls(self, index: int) -> int:
        return self._scanners[index].num_calls if index in self._scanners else 0

    def _choice(self, index: int, delta: Delta, name: str, news: dict[str, Any]) -> dict[str, Any]:
        request = self._request
        calls_tools = delta.finish_reason == "stop" and self._num_calls(index) > 0
        choice = {
            "index": index,
            name: news,
            "logprobs": self._logprobs(index, delta),
            "finish_reason": "tool_calls" if calls_tools else delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, index: int, delta: Delta) -> dict[str, Any] | None:
        kept = self._kept.pop(index, None)
        if kept is not None:
            return {"content": kept.json, "refusal": None}
        if self._request.logprobs is None or not delta.logprobs:
            return None
        return {"content": chat_logprobs(delta.logprobs, self._tokenizer), "refusal": None}

    def _prompt_token_ids(self) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": self._request.prompts[0].token_ids}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
