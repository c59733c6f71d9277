"""Parts of documents that a run writes: the text between two marks."""

from __future__ import annotations

from pathlib import Path


def replace_between(document: Path, begin: str, end: str, text: str) -> None:
    """Puts ``text`` between the marks. Raises :class:`ValueError` if the document has no marks."""
    before, found_begin, rest = document.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{document} has no marks to write between: {begin} … {end}")
    document.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
