"""Choices of one prompt that start from the state that one of them has computed or read.

The first choice, the *source*, is an ordinary request; the others are its *forks* and wait for it. The source
stops when all its tokens but the last are computed. In the next plan each fork shares the source's full
blocks and gets copies of its last block and its state. Forks that find no room begin as preempted requests:
they share one copy in host memory (docs/decisions/037-forks.md).

If the source ends before that, so do its forks.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.request import Request


class Forks:
    """Knows which forks wait for which source."""

    def __init__(self) -> None:
        self.waiting: dict[str, Request] = {}
        """The forks that wait, by request id. They own no memory."""
        self._sources: dict[str, Request] = {}

    def add(self, source: Request) -> None:
        """Lets the forks of a request wait for it, if it has any."""
        if source.forks:
            self._sources[source.request_id] = source
            self.waiting |= {fork.request_id: fork for fork in source.forks}

    def ready(self, running: Mapping[str, Request]) -> list[Request]:
        """Returns the sources among the running requests that have computed all tokens but the last."""
        return [
            source
            for name, source in self._sources.items()
            if name in running and source.num_computed == source.plannable
        ]

    def take(self, source: Request) -> list[Request]:
        """Returns the forks of ``source``, which wait no longer."""
        forks, source.forks = source.forks, []
        self._sources.pop(source.request_id, None)
        for fork in forks:
            del self.waiting[fork.request_id]
        return forks

    def drop(self, fork: Request) -> None:
        """Forgets a fork that ends. This has no effect on a request that does not wait for a source."""
        if self.waiting.pop(fork.request_id, None) is None:
            return
        source = next(one for one in self._sources.values() if fork in one.forks)
        source.forks.remove(fork)
        if not source.forks:
            del self._sources[source.request_id]
