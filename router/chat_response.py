"""The answers of ``POST /v1/chat/completions``: the whole object, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.answer import Answer, Delta
from router.logprobs import chat_logprobs
from router.text_request import TextRequest


class ChatWriter:
    """Builds the JSON objects of one request from the deltas of its choices."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._tokenizer = request.model.tokenizer
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head = {
            "id": request.id,
            "object": kind,
            "created": request.created,
            "model": request.model.name,
        }

    def whole(self, deltas: Sequence[Delta], answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(i, delta, "message", {"role": "assistant", "content": delta.text, "refusal": None})
            for i, delta in enumerate(deltas)
        ]
        return {**self._head, "choices": choices, **self._prompt_token_ids()}

    def chunks(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> list[dict[str, Any]]:
        """The role stands alone before a choice's first text."""
        chunks = []
        if is_first:
            opening = self._choice(index, Delta(), "delta", {"role": "assistant", "content": ""})
            chunks.append({**self._head, "choices": [opening], **self._prompt_token_ids()})
        has_ended = delta.finish_reason is not None
        news = {} if has_ended and not delta.text else {"content": delta.text}
        return [*chunks, {**self._head, "choices": [self._choice(index, delta, "delta", news)]}]

    def last_chunk(self) -> dict[str, Any]:
        return {**self._head, "choices": []}

    def _choice(self, index: int, delta: Delta, name: str, news: dict[str, Any]) -> dict[str, Any]:
        request = self._request
        wants_logprobs = request.logprobs is not None and bool(delta.logprobs)
        choice = {
            "index": index,
            name: news,
            "logprobs": chat_logprobs(delta.logprobs, self._tokenizer) if wants_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _prompt_token_ids(self) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": self._request.prompts[0].token_ids}
