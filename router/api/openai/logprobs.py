"""Log-probabilities in the forms of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import orjson

from router.api.sampling_fields import MAX_N
from router.models.prompt import Prompt
from router.models.tokenizer import Tokenizer
from router.serving.detokenizer import Detokenizer
from wire.errors import InvalidRequestError
from wire.messages.generation import TokenLogprobs
from wire.messages.sampling_params import MAX_LOGPROBS

MAX_IN_STEP = MAX_N * (1 + MAX_LOGPROBS)
"""Of all choices in one step: OpenAI's own maxima of ``n`` and ``top_logprobs`` together. The event loop
writes each of them, in a microsecond or two."""
MAX_KEPT = 1 << 20
"""Of answers in one piece, and of prompts that are echoed: the router keeps them until all are there, and
each has 30 to 70 bytes."""


def check_in_step(num_choices: int, num_top: int, *, param: str) -> None:
    """Raises :class:`InvalidRequestError` if a step would bring too many."""
    num = num_choices * (1 + num_top)
    if num > MAX_IN_STEP:
        fewer_top = MAX_IN_STEP // num_choices - 1
        raise InvalidRequestError(
            f"{num_choices} choices with {num_top} alternatives a token make {num} log-probabilities a step, "
            f"the limit is {MAX_IN_STEP}: ask for at most {fewer_top} alternatives, or for fewer choices",
            param=param,
        )


def check_echoed(num_tokens: int, num_top: int, *, param: str) -> None:
    """``num_tokens`` are the prompts', each counted once a choice. Raises as :func:`check_in_step`."""
    num = num_tokens * (1 + num_top)
    if num > MAX_KEPT:
        raise InvalidRequestError(
            f"{num_tokens} tokens of echoed prompts, once a choice, with {num_top} alternatives each make "
            f"{num} log-probabilities, the limit is {MAX_KEPT}: ask for fewer alternatives, or echo less",
            param=param,
        )


def check_in_one_piece(num_choices: int, max_tokens: int, num_top: int, *, param: str) -> None:
    """Of an answer that is no stream. Raises as :func:`check_in_step`; ``param`` says how long it may be."""
    num = num_choices * max_tokens * (1 + num_top)
    if num > MAX_KEPT:
        raise InvalidRequestError(
            f"{num_choices} choices of {max_tokens} tokens with {num_top} alternatives each make {num} "
            f"log-probabilities in one piece, the limit is {MAX_KEPT}: set stream to true, or ask for at "
            f"most {longest_in_one_piece(num_choices, num_top)} {param}",
            param=param,
        )


def longest_in_one_piece(num_choices: int, num_top: int) -> int:
    """Tokens that each choice may have."""
    return MAX_KEPT // (num_choices * (1 + num_top))


class JsonList:
    """Grows by pieces, each written as it comes, so that the whole is only copied at the end.

    An answer may have a million log-probabilities: to write them in one go would hold up the event loop, and
    as objects they take twice the memory.
    """

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, values: Sequence[Any]) -> None:
        if values:
            self._pieces.append(orjson.dumps(values)[1:-1])

    def extend(self, later: JsonList) -> None:
        self._pieces += later._pieces

    @property
    def json(self) -> orjson.Fragment:
        return orjson.Fragment(b"[" + b",".join(self._pieces) + b"]")


MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say."""

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

Row = tuple[str, float | None, dict[str, float] | None, int]
"""One token: its name, its log-probability, the best alternatives and the characters before it."""


class LogprobsTable:
    """Log-probabilities as four parallel lists, the form of the completions API."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def add(self, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]) -> None:
        for entry, offset in zip(logprobs, offsets, strict=True):
            for column, value in zip(
                self.columns.values(), _row(entry, offset, self._tokenizer), strict=True
            ):
                column.append(value)


def _row(entry: TokenLogprobs, offset: int, tokenizer: Tokenizer) -> Row:
    # The token itself stands first, the best alternatives behind it: up to one more than asked for.
    best = {entry.token_id: entry.logprob} | dict(entry.top)
    return (
        tokenizer.decode_token(entry.token_id),
        max(entry.logprob, MIN_LOGPROB),
        {tokenizer.decode_token(i): max(value, MIN_LOGPROB) for i, value in best.items()},
        offset,
    )


class WrittenTable:
    """Columns of a table that is too long to be written in one go."""

    def __init__(self, columns: dict[str, JsonList] | None = None) -> None:
        self._columns = {name: JsonList() for name in COLUMNS} if columns is None else columns

    def add(self, columns: dict[str, list[Any]]) -> None:
        for name, values in columns.items():
            self._columns[name].add(values)

    def extend(self, later: WrittenTable) -> None:
        for name, values in later._columns.items():
            self._columns[name].extend(values)

    def copy(self) -> WrittenTable:
        copied = WrittenTable()
        copied.extend(self)
        return copied

    @property
    def columns(self) -> dict[str, Any]:
        return {name: values.json for name, values in self._columns.items()}


class PromptTable:
    """A prompt's rows, taken some at a time."""

    def __init__(
        self,
        prompt: Prompt,
        logprobs: Sequence[TokenLogprobs],
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
    ) -> None:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._rows = _prompt_rows(prompt, logprobs, tokenizer, detokenizer)

    def next(self, num_rows: int) -> dict[str, list[Any]]:
        """The columns of the next rows; empty lists behind the last one."""
        rows = list(islice(self._rows, num_rows))
        return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}


def _prompt_rows(
    prompt: Prompt, logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer, detokenizer: Detokenizer
) -> Iterator[Row]:
    """The prompt's first token has no probability, as nothing stands before it."""
    first, *rest = prompt.token_ids
    yield tokenizer.decode_token(first), None, None, 0
    num_chars = len(detokenizer.push(first))
    for token_id, entry in zip(rest, logprobs, strict=True):
        yield _row(entry, num_chars, tokenizer)
        num_chars += len(detokenizer.push(token_id))


def chat_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One object a token, the form of the chat API; ``bytes`` say exactly what a token stands for."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.decode_token(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": tokenizer.token_bytes(token_id),
        }

    return [
        named(entry.token_id, entry.logprob) | {"top_logprobs": [named(*best) for best in entry.top]}
        for entry in logprobs
    ]
