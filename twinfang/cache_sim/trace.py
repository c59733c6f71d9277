"""Logs of prompt hashes: the lines of a file, and the requests that they mean.

The format is that of the Mooncake traces: one JSON object a line.

| field | meaning |
|---|---|
| `timestamp` | when the request came, in milliseconds |
| `input_length` | tokens of the prompt |
| `output_length` | tokens of the answer |
| `hash_ids` | an id for each block of the prompt; equal ids: all up to the block's end is equal |

Ids beyond the prompt's last block are blocks of the answer. A log that has them shows what is cached if
answers return to the cache (conversation return). The last id of a prompt may be of a block that is not full.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wire.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
MAX_LINE_BYTES = 16 << 20
MAX_REQUESTS = 10_000_000
LENGTH_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a log."""

    arrival_s: float
    num_prompt: int
    """Tokens of the prompt."""
    num_answer: int
    ids: tuple[int, ...]
    """An id for each full block of prompt and answer."""

    def num_usable(self, block_tokens: int) -> int:
        """Returns the number of blocks of the prompt that can come from a cache: one token at least has to be
        computed."""
        return min(len(self.ids), (self.num_prompt - 1) // block_tokens)


def read_trace(path: Path, block_tokens: int) -> list[TracedRequest]:
    """Reads a log. Raises :class:`ConfigError` that names the first bad line."""
    try:
        with path.open("rb") as file:
            return list(_requests(file, path, block_tokens))
    except OSError as error:
        raise ConfigError(
            f"the trace {path} can't be read: {error.strerror}; name a readable file"
        ) from error


def _requests(lines: Iterable[bytes], path: Path, block_tokens: int) -> Iterator[TracedRequest]:
    numbers: dict[int | str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; shorten the trace")
        if number > MAX_REQUESTS:
            raise ConfigError(f"{path} has more than {MAX_REQUESTS} lines; cut it into parts")
        try:
            yield _request(json.loads(line), numbers, block_tokens)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error!r}; expected an object with timestamp, input_length, "
                "output_length and hash_ids, the Mooncake format"
            ) from None


def _request(fields: dict[str, object], numbers: dict[int | str, int], block_tokens: int) -> TracedRequest:
    num_prompt = _length(fields, "input_length")
    num_answer = _length(fields, "output_length")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or not all(isinstance(one, int | str) for one in ids):
        raise ValueError("hash_ids is not a list of numbers or strings")
    arrival = fields.get("timestamp", 0)
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < 1e15:
        raise ValueError("timestamp is not a number of milliseconds")
    full = (num_prompt + num_answer) // block_tokens
    if not num_prompt // block_tokens <= len(ids) <= full + 1:
        raise ValueError(
            f"{len(ids)} hash_ids for {num_prompt} + {num_answer} tokens don't fit blocks of {block_tokens} "
            "tokens; name the log's own block with --trace-block"
        )
    return TracedRequest(
        float(arrival) / 1000.0,
        num_prompt,
        num_answer,
        tuple(numbers.setdefault(one, len(numbers)) for one in ids[:full]),
    )


def _length(fields: dict[str, object], name: str) -> int:
    value = fields[name]
    lowest = 1 if name == "input_length" else 0
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < LENGTH_LIMIT:
        raise ValueError(f"{name} {value!r} is not a number of tokens of at least {lowest}")
    return value


def write_trace(requests: Iterable[TracedRequest], path: Path) -> None:
    """Writes a log that :func:`read_trace` reads."""
    with path.open("w", encoding="utf-8") as file:
        for one in requests:
            fields = {
                "timestamp": round(one.arrival_s * 1000),
                "input_length": one.num_prompt,
                "output_length": one.num_answer,
                "hash_ids": list(one.ids),
            }
            file.write(json.dumps(fields, separators=(",", ":")) + "\n")
