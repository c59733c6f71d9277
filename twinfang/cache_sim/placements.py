"""Where a simulated cache keeps states: at fixed distances as servers do today, or as the paper of Marconi
says. Learned placement is the engine's own (:mod:`engine.memory.state_placement`)."""

from __future__ import annotations

from typing import Protocol

from engine.memory.cached_start import Match, Place
from engine.memory.state_placement import Mark
from engine.request import Request
from engine.schedule.cache_modes import CacheMode


class Placement(Protocol):
    """``match.keys`` has the blocks of prompt and answer, as far as the log has ids."""

    def mark(self, match: Match) -> list[Mark]: ...


class FixedPlacement:
    """The places of an engine's cache mode. Lengths are in blocks: the mode has blocks of one token."""

    def __init__(self, mode: CacheMode) -> None:
        self._mode = mode

    def mark(self, match: Match) -> list[Mark]:
        request = Request("simulated", [0] * (len(match.keys) + 1), None)
        request.marks = self._mode.mark(request, match, 1)
        lengths = self._mode.inner_boundaries(request, len(match.nodes), len(match.keys))
        if len(match.keys) > len(match.nodes) and self._mode.keeps(request, len(match.keys)):
            lengths.append(len(match.keys))
        end = len(match.keys)
        return [Mark(length, request.marks.get(length, Place.before_end(end - length))) for length in lengths]


class JudiciousPlacement:
    """At most two states for each request: where it leaves earlier requests, and at its end (Pan and others,
    "Marconi: Prefix Caching for the Era of Hybrid LLMs", arXiv 2411.19379, section 4.1)."""

    def mark(self, match: Match) -> list[Mark]:
        marks = []
        if match.beyond and match.num_matched_blocks < len(match.keys):
            marks.append(Mark(match.num_matched_blocks, Place.BRANCH))
        if len(match.keys) > len(match.nodes):
            marks.append(Mark(len(match.keys), Place.END))
        return marks
