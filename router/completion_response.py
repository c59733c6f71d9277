"""The answers of ``POST /v1/completions``: the whole object, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.answer import Answer, Delta
from router.completion_request import CompletionRequest, Prompt
from router.detokenizer import Detokenizer
from router.tokenizer import Tokenizer
from wire.generation import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say."""


class CompletionWriter:
    """Builds the JSON objects of one request from the deltas of its choices."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._head = {
            "id": request.id,
            "object": "text_completion",
            "created": request.created,
            "model": request.model,
        }

    def whole(
        self, deltas: Sequence[Delta], answers: Sequence[Answer], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer in one object; ``deltas[i]`` is all of choice i."""
        choices = [
            self._choice(index, delta, answer, is_first=True)
            for index, (delta, answer) in enumerate(zip(deltas, answers, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": usage}

    def chunk(
        self, index: int, delta: Delta, answer: Answer, *, is_first: bool, usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One choice's news; the first chunk of a choice also brings what is echoed of its prompt."""
        chunk = {**self._head, "choices": [self._choice(index, delta, answer, is_first=is_first)]}
        if self._request.include_usage:
            chunk["usage"] = usage
        return chunk

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk without choices that ends a stream if usage was asked for."""
        return {**self._head, "choices": [], "usage": usage}

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
            table = _LogprobsTable(self._tokenizer)
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


class _LogprobsTable:
    """Log-probabilities as four parallel lists, the form of the completions API."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add(self, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]) -> None:
        for entry, offset in zip(logprobs, offsets, strict=True):
            # The token itself stands first, the best alternatives behind it: up to one more than asked for.
            best = {entry.token_id: entry.logprob} | dict(entry.top)
            self._row(
                entry.token_id,
                max(entry.logprob, MIN_LOGPROB),
                {self._tokenizer.decode_token(i): max(value, MIN_LOGPROB) for i, value in best.items()},
                offset,
            )

    def add_prompt(
        self, prompt: Prompt, logprobs: Sequence[TokenLogprobs], skip_special_tokens: bool
    ) -> None:
        """The prompt's first token has no probability, as nothing stands before it."""
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)
        offsets, num_chars = [], 0
        for token_id in prompt.token_ids:
            offsets.append(num_chars)
            num_chars += len(detokenizer.push(token_id))
        self._row(prompt.token_ids[0], None, None, 0)
        self.add(logprobs, offsets[1:])

    def _row(self, token_id: int, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        columns = self.columns
        columns["tokens"].append(self._tokenizer.decode_token(token_id))
        columns["token_logprobs"].append(logprob)
        columns["top_logprobs"].append(top)
        columns["text_offset"].append(offset)


def usage_of(num_prompt_tokens: int, num_completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage
