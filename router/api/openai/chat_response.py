"""Writes the answers of ``POST /v1/chat/completions``: the whole object, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, assert_never

from router.api.openai.chunks import ChunkEvents, error_end, usage_object
from router.api.openai.logprobs import JsonList, chat_logprobs
from router.models.answer_parts import (
    CallArguments,
    CallBegun,
    Content,
    ContentReader,
    Part,
    PartReader,
    Reasoning,
    gathered,
)
from router.serving.answer import Answer, Delta
from router.serving.slice_lane import SliceLane
from router.serving.text_request import TextRequest
from router.serving.usage import Usage
from wire.errors import TwinfangError


class ChatWriter:
    """Builds the JSON objects of one request from the deltas of its choices."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._tokenizer = request.model.tokenizer
        self._events = ChunkEvents(request)
        self._readers: dict[int, PartReader] = {}
        self._calling: set[int] = set()
        """Choices that have calls."""
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

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = [self._whole_choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self._head, "choices": choices, **self._prompt_token_ids(), "usage": usage_object(usage)}

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        whole = gathered(self._parts(index, delta))
        message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None}
        message |= _reasoning(whole.reasoning)
        if whole.calls:
            message["content"] = whole.content or None
            message["tool_calls"] = [_begun(call.id, call.name, call.arguments) for call in whole.calls]
        return self._choice(index, delta, "message", message)

    def written(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> bytes:
        """Return the events for one choice's new delta. A choice's first chunk has only the role."""
        chunks = []
        if is_first:
            opening = self._choice(index, Delta(), "delta", {"role": "assistant", "content": ""})
            chunks.append({**self._head, "choices": [opening], **self._prompt_token_ids()})
        parts = self._parts(index, delta)
        if parts or delta.finish_reason is not None or not self._may_leave_out:
            news = _news(parts)
            if not parts and delta.finish_reason is None:
                news["content"] = ""
            chunks.append({**self._head, "choices": [self._choice(index, delta, "delta", news)]})
        return self._events.written(chunks, index, answer)

    def watched(self, index: int) -> str | None:
        return self._reader(index).watched

    def end(self, usage: Usage) -> bytes:
        return self._events.end(self._head, usage)

    def error_end(self, error: TwinfangError) -> bytes:
        return error_end(error)

    def _parts(self, index: int, delta: Delta) -> list[Part]:
        """Return the new parts of a choice."""
        reader = self._reader(index)
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.cut() if delta.finish_reason == "length" else reader.finish()
        if any(isinstance(part, CallBegun) for part in parts):
            self._calling.add(index)
        return parts

    def _reader(self, index: int) -> PartReader:
        if index not in self._readers:
            form = self._request.form
            self._readers[index] = ContentReader() if form is None else form.reader()
        return self._readers[index]

    @property
    def _may_leave_out(self) -> bool:
        """Whether chunks without parts, which occur while a mark is incomplete, are left out."""
        request = self._request
        return request.form is not None and request.logprobs is None and not request.return_token_ids

    def _choice(self, index: int, delta: Delta, name: str, news: dict[str, Any]) -> dict[str, Any]:
        request = self._request
        calls_tools = delta.finish_reason == "stop" and index in self._calling
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


def _news(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the ``delta`` of a chunk."""
    reasoning, content, calls = "", "", dict[int, dict[str, Any]]()
    for part in parts:
        match part:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallBegun(index, call_id, name):
                calls[index] = {"index": index, **_begun(call_id, name, "")}
            case CallArguments(index, text):
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += text
            case _:
                assert_never(part)
    news: dict[str, Any] = _reasoning(reasoning)
    if content:
        news["content"] = content
    if calls:
        news["tool_calls"] = list(calls.values())
    return news


def _reasoning(text: str) -> dict[str, Any]:
    """Return the thinking under both names that clients read: DeepSeek's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _begun(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
