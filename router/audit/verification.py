"""Finds the first line of an audit log that was changed, removed or moved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from router.audit.line import MAX_LINE_BYTES, START, Line, Link, parsed


@dataclass(frozen=True)
class Verdict:
    num_lines: int
    """How many lines are as they were written, from the start."""
    last: Link
    """The last of them."""
    fault: str = ""
    """What is wrong with the line behind them. Empty: nothing, and it is the last one."""


@dataclass(frozen=True)
class _Place:
    file: Path
    number: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}"


def verify(files: Sequence[Path], expected: Link | None = None) -> Verdict:
    """Check files of one chain, the oldest first. ``expected`` is a line that must be there: without it,
    nobody can tell that the last lines were removed. Raises :class:`OSError`."""
    last, before, count, torn = START, None, 0, b""
    has_expected = expected is None or expected == START
    for place, text in _lines(files):
        line = parsed(text)
        if line is None:
            if torn:
                return Verdict(count, last, f"{before}: the line was changed")
            torn, before = text or b"\n", place
            continue
        if torn and line.values.get("torn") != hashlib.sha256(torn).hexdigest():
            return Verdict(count, last, f"{before}: the line was changed")
        torn = b""
        fault = _fault(line, last, place, before, files)
        if fault:
            return Verdict(count, last, fault)
        last, before, count = line.link, place, count + 1
        has_expected = has_expected or line.link == expected
    if torn:
        return Verdict(count, last, f"{before}: the line was changed, or its end was not written")
    if not has_expected:
        assert expected is not None
        why = "the lines at the end were removed" if expected.seq > last.seq else "it was replaced"
        return Verdict(count, last, f"line {expected} is not there: {why}")
    return Verdict(count, last)


def _fault(line: Line, last: Link, place: _Place, before: _Place | None, files: Sequence[Path]) -> str:
    due = last.seq + 1
    if line.link.seq == due:
        if line.prev == last.hash:
            return ""
        return f"{place if before is None else before}: the line was replaced, {place} does not follow it"
    later = next((at for at, one in _parsed_lines(files) if one.link.seq == due and at != place), None)
    if line.link.seq < due:
        return f"{place}: it has number {line.link.seq} where {due} is due: it was moved or written twice"
    if later is not None:
        return f"{place}: it has number {line.link.seq} where {due} is due, which is {later}: they were moved"
    hint = "; give the file before this one first, if there is one" if before is None else ""
    missing = f"line {due} is" if line.link.seq == due + 1 else f"lines {due} to {line.link.seq - 1} are"
    return f"{place}: {missing} missing before it{hint}"


def _parsed_lines(files: Sequence[Path]) -> Iterator[tuple[_Place, Line]]:
    for place, text in _lines(files):
        line = parsed(text)
        if line is not None:
            yield place, line


def _lines(files: Sequence[Path]) -> Iterator[tuple[_Place, bytes]]:
    for path in files:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(2 * MAX_LINE_BYTES):
                number += 1
                yield _Place(path, number), text.removesuffix(b"\n")
