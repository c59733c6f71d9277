"""Log-probabilities in the forms of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.detokenizer import Detokenizer
from router.prompt import Prompt
from router.tokenizer import Tokenizer
from wire.generation import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say."""


class LogprobsTable:
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


def chat_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """One object a token, the form of the chat API; ``bytes`` say exactly what a token stands for."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.decode_token(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        named(entry.token_id, entry.logprob) | {"top_logprobs": [named(*best) for best in entry.top]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}
