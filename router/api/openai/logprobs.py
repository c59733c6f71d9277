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
"""The maximum number of log-probabilities of all choices in one step: as many as a request has with OpenAI's
own maxima of ``n`` and ``top_logprobs``. The event loop needs a microsecond or two to write each
log-probability."""
MAX_KEPT = 1 << 20
"""The maximum number of log-probabilities of an answer that is not streamed, and also of a request's echoed
prompts. The router keeps these log-probabilities until all have come, and each takes 30 to 70 bytes."""


def check_in_step(num_choices: int, num_top: int, *, param: str) -> None:
    """Raise :class:`InvalidRequestError` if one step would have too many log-probabilities."""
    num = num_choices * (1 + num_top)
    if num > MAX_IN_STEP:
        fewer_top = MAX_IN_STEP // num_choices - 1
        raise InvalidRequestError(
            f"{num_choices} choices with {num_top} alternatives a token make {num} log-probabilities a step, "
            f"the limit is {MAX_IN_STEP}: ask for at most {fewer_top} alternatives, or for fewer choices",
            param=param,
        )


def check_echoed(num_tokens: int, num_top: int, *, param: str) -> None:
    """Raise :class:`InvalidRequestError` if echoed prompts would have too many log-probabilities.

    ``num_tokens`` is the number of prompt tokens; each prompt counts once for each of its choices.
    """
    num = num_tokens * (1 + num_top)
    if num > MAX_KEPT:
        raise InvalidRequestError(
            f"{num_tokens} tokens of echoed prompts, once a choice, with {num_top} alternatives each make "
            f"{num} log-probabilities, the limit is {MAX_KEPT}: ask for fewer alternatives or choices, or "
            "send shorter prompts",
            param=param,
        )


def check_in_one_piece(num_choices: int, max_tokens: int, num_top: int, *, param: str) -> None:
    """Raise :class:`InvalidRequestError` if an answer that is not streamed could have too many
    log-probabilities.

    ``param`` is the field that limits the answer's length.
    """
    num = num_choices * max_tokens * (1 + num_top)
    if num > MAX_KEPT:
        raise InvalidRequestError(
            f"{num_choices} choices of {max_tokens} tokens with {num_top} alternatives each make {num} "
            f"log-probabilities, the limit without streaming is {MAX_KEPT}: set stream to true, or ask "
            f"for at most {longest_in_one_piece(num_choices, num_top)} {param}",
            param=param,
        )


def longest_in_one_piece(num_choices: int, num_top: int) -> int:
    """Return how many tokens each choice of an answer that is not streamed may have."""
    return MAX_KEPT // (num_choices * (1 + num_top))


class JsonList:
    """A JSON list that grows by pieces. Each piece is converted to JSON as it comes; the whole list is copied
    only once, at the end.

    An answer may have a million log-probabilities. Converting all of them at once would block the event loop,
    and until then they would take twice the memory, as Python objects.
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
"""Stands for minus infinity, which JSON can't express."""

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

Row = tuple[str, float | None, dict[str, float] | None, int]
"""One token: its name, its log-probability, the best alternatives and the number of characters before it."""


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
    # The token itself comes first, then the best alternatives. So there may be one entry more than asked for.
    best = {entry.token_id: entry.logprob} | dict(entry.top)
    return (
        tokenizer.decode_token(entry.token_id),
        max(entry.logprob, MIN_LOGPROB),
        {tokenizer.decode_token(i): max(value, MIN_LOGPROB) for i, value in best.items()},
        offset,
    )


class WrittenTable:
    """The columns of a table, converted to JSON piece by piece, because the whole table is too long to be
    converted at once."""

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
    """The rows of a prompt's table, computed a few at a time."""

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
        """Return the columns of the next rows; empty lists after the last row."""
        rows = list(islice(self._rows, num_rows))
        return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}


def _prompt_rows(
    prompt: Prompt, logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer, detokenizer: Detokenizer
) -> Iterator[Row]:
    """Yield a prompt's rows. The first token has no probability, because no token comes before it."""
    first, *rest = prompt.token_ids
    yield tokenizer.decode_token(first), None, None, 0
    num_chars = len(detokenizer.push(first))
    for token_id, entry in zip(rest, logprobs, strict=True):
        yield _row(entry, num_chars, tokenizer)
        num_chars += len(detokenizer.push(token_id))


def chat_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return one object for each token, in the form of the chat API. ``bytes`` are the exact bytes of a
    token."""

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
