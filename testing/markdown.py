"""Reads the parts of a Markdown page that tests check: its links, code and sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testing.repository import ROOT

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(?ms)^ *```.*?^ *```")
_INLINE = re.compile(r"`([^`]+)`")
_INDENTED = re.compile(r"(?m)^(?: {4}|\t)(.*)$")
_LEFT_OUT = {"build", "dist"}


def pages() -> list[Path]:
    """All Markdown pages of the project; hidden folders and built files are left out."""
    folders = [top for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith(".")]
    inner = (page for top in folders if top.name not in _LEFT_OUT for page in top.rglob("*.md"))
    return sorted([*ROOT.glob("*.md"), *inner])


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def broken_links(self) -> Iterator[str]:
        """Links to files of the project that do not exist, or to headings that their page does not have."""
        for link in _LINK.findall(_INLINE.sub("", _FENCED.sub("", self.text))):
            path, _, heading = link.partition("#")
            if "://" in link:
                continue
            target = self.path.parent / path if path else self.path
            if not target.exists() or (heading and heading not in Page(target).anchors()):
                yield link

    def anchors(self) -> set[str]:
        """The names by which links find the page's headings."""
        headings = re.findall(r"(?m)^#+ (.*)$", self.text)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def commands(self) -> list[str]:
        """Code in backticks and indented lines."""
        return [" ".join(code.split()) for code in _INLINE.findall(self.text)] + _INDENTED.findall(self.text)

    def sections(self, level: int) -> dict[str, str]:
        """Text by heading, for all headings of one level. A text ends at the next heading of this or a higher
        level."""
        parts = re.split(rf"(?m)^({'#' * level} .*)$", self.text)
        names = (heading.lstrip("# ") for heading in parts[1::2])
        ends = re.compile(rf"(?m)^#{{1,{level}}} .*")
        return {name: ends.split(body)[0] for name, body in zip(names, parts[2::2], strict=True)}


def in_backticks(text: str) -> list[str]:
    return _INLINE.findall(text)
