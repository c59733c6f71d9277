"""Router processes that did not take part in an answer."""

from __future__ import annotations

from pydantic import BaseModel


class MissingProcess(BaseModel):
    """A process of ``--workers N`` that did not answer in time, perhaps because it is frozen or restarts."""

    process: int
    """Its index, from 0."""
    problem: str


def in_words(missing: list[MissingProcess]) -> str:
    """Name the processes and their problems in one sentence; empty if none is missing."""
    return "; ".join(f"router process {one.process} {one.problem}" for one in missing)
