"""The answers of ``POST /v1/completions``: the whole object, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.answer import Answer, Delta
from router.logprobs import LogprobsTable
from router.prompt import Prompt
from router.text_request import TextRequest


class CompletionWriter:
    """Builds the JSON objects of one request from the deltas of its choices."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._tokenizer = request.model.tokenizer
        self._head = {
            "id": request.id,
            "object": "text_completion",
            "created": request.created,
            "model": request.model.name,
        }

    def whole(self, deltas: Sequence[Delta], answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer in one object; ``deltas[i]`` is all of choice i."""
        choices = [
            self._choice(index, delta, answer, is_first=True)
            for index, (delta, answer) in enumerate(zip(deltas, answers, strict=True))
        ]
        return {**self._head, "choices": choices}

    def chunks(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> list[dict[str, Any]]:
        """One choice's news; the first chunk of a choice also brings what is echoed of its prompt."""
        return [{**self._head, "choices": [self._choice(index, delta, answer, is_first=is_first)]}]

    def last_chunk(self) -> dict[str, Any]:
        """The chunk without choices that ends a stream if usage was asked for."""
        return {**self._head, "choices": []}

    def _choice(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> dict[str, Any]:
        request = self._request
        prompt = request.prompts[index // request.n]
        echoes = request.echo and is_first
        text = self._prompt_text(prompt) + delta.text if echoes else delta.text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if request.logprobs is not None:
            table = LogprobsTable(self._tokenizer)
            if echoes:
                table.add_prompt(prompt, answer.prompt_logprobs or (), request.skip_special_tokens)
            offset = len(self._prompt_text(prompt)) if request.echo else 0
            table.add(delta.logprobs, [offset + position for position in delta.text_offsets])
            choice["logprobs"] = table.columns
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = prompt.token_ids if is_first else None
        return choice

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(
            list(prompt.token_ids), skip_special_tokens=self._request.skip_special_tokens
        )
