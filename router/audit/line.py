"""One line of an audit log.

    {"seq":7,"at":"…","event":"call",…,"prev":"<hash of line 6>","hash":"<hash of line 7>"}

A line's hash is the SHA-256 of its bytes before ``,"hash"``. These include the hash of the line before. So
whoever changes, removes or moves a line has to change all lines behind it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROOT = "0" * 64
"""What the first line of all names as the hash of the line before."""
_MARK, _END = b',"hash":"', b'"}'
_TAIL_BYTES = len(_MARK) + 64 + len(_END)
MAX_LINE_BYTES = 64 << 10
MAX_TEXT_CHARS = 256
"""Longer texts are cut: clients choose some of them."""


@dataclass(frozen=True)
class Link:
    """A line's place in the chain."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"


START = Link(0, ROOT)


@dataclass(frozen=True)
class Line:
    """A line whose hash fits its content."""

    link: Link
    prev: str
    values: Mapping[str, Any]


def written(values: Mapping[str, Any], after: Link) -> tuple[bytes, Link]:
    """Return the bytes of the line that follows ``after``, and its place."""
    numbered = {"seq": after.seq + 1, **_cut(dict(values)), "prev": after.hash}
    head = json.dumps(numbered, separators=(",", ":"), ensure_ascii=True).encode()[:-1]
    digest = hashlib.sha256(head).hexdigest()
    return head + _MARK + digest.encode() + _END + b"\n", Link(after.seq + 1, digest)


def parsed(line: bytes) -> Line | None:
    """Return the line, given without its end; None if its hash does not fit its content."""
    head, tail = line[:-_TAIL_BYTES], line[-_TAIL_BYTES:]
    digest = hashlib.sha256(head).hexdigest()
    if tail != _MARK + digest.encode() + _END:
        return None
    try:
        values = json.loads(head + b"}")
        return Line(Link(int(values["seq"]), digest), str(values["prev"]), values)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def now_text() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT_CHARS else f"{value[:MAX_TEXT_CHARS]}…"
    if isinstance(value, dict):
        return {str(name): _cut(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(inner) for inner in value[:MAX_TEXT_CHARS]]
    return value
