"""Blocks and states in host memory. They are restored bit for bit.

They are those of preempted requests, of choices that start from another choice's state
(:mod:`engine.schedule.forks`), and of cached prefixes that the device has given up
(:mod:`engine.memory.host_tier`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.files.neighbours import NoNeighbours, StartNeighbours
from engine.files.start_files import NO_JOBS, FileJobs, NoFiles, StartFiles
from engine.memory.async_copy import Download
from engine.memory.cached_start import HostCopy
from engine.memory.caches import Caches
from engine.memory.host_tier import NO_HOST_MEMORY, HostMemory
from engine.schedule.host_pages import HostPages
from engine.schedule.step_plan import Fork, Swap


@dataclass(frozen=True)
class _Stored:
    kv: Download
    state: Download


class HostStore:
    """Copies of preempted requests' blocks and states, by request id, and the pages of cached prefixes."""

    def __init__(
        self,
        caches: Caches,
        memory: HostMemory = NO_HOST_MEMORY,
        files: StartFiles | None = None,
        neighbours: StartNeighbours | None = None,
    ) -> None:
        """``memory`` is for cached prefixes; preempted requests take what they need besides. ``files`` and
        ``neighbours`` lie behind it."""
        self._caches = caches
        self._files = files or NoFiles()
        self._neighbours = neighbours or NoNeighbours()
        self.pages = HostPages(caches, memory)
        self._stored: dict[str, _Stored] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that preempted requests use now."""
        stored = {id(one): one for one in self._stored.values()}  # forks share one copy
        return sum(one.kv.host.nbytes + one.state.host.nbytes for one in stored.values())

    def save(self, swaps: Iterable[Swap], demoted: Sequence[HostCopy] = ()) -> None:
        """Copies blocks and states out of the pools, before others are written there."""
        self._stored |= {swap.request_id: self._read(swap) for swap in swaps}
        self.pages.save(demoted)

    def fork(self, forks: Iterable[Fork]) -> None:
        """Copies blocks and states of computed prompts for the choices that start from them."""
        caches = self._caches
        for fork in forks:
            source = fork.source
            for copy in fork.copies:
                last = source.block_ids[len(source.block_ids) - len(copy.block_ids) :]
                caches.write_blocks(copy.block_ids, caches.read_blocks(last))
                caches.state[copy.slot].copy_(caches.state[source.slot])
            if fork.stored:
                self._stored |= dict.fromkeys(fork.stored, self._read(source))

    def restore(
        self, swaps: Iterable[Swap], promoted: Sequence[HostCopy] = (), jobs: FileJobs = NO_JOBS
    ) -> None:
        """Copies blocks and states back, into the blocks and slots that they have now.

        Behind these copies and those of :meth:`save`, pages are written to files, and filled from files or
        from other servers.
        """
        # The device copies in the order of these calls. So nobody has to wait until the copies to the host
        # have been made.
        for swap in swaps:
            stored = self._stored.pop(swap.request_id)
            kv = stored.kv.host.to(self._caches.kv.device, non_blocking=True)
            self._caches.write_blocks(swap.block_ids, kv)
            self._caches.state[swap.slot].copy_(stored.state.host, non_blocking=True)
        self.pages.restore(promoted)
        if jobs.reads or jobs.writes:
            memory, settled = self.pages.memory, self.pages.settled()
            for job in jobs.reads:
                source = self._neighbours if job.address else self._files
                source.read(job, memory, settled)
            for job in jobs.writes:
                self._files.write(job, memory, settled)

    def _read(self, swap: Swap) -> _Stored:
        blocks = self._caches.read_blocks(swap.block_ids)
        return _Stored(Download(blocks), Download(self._caches.state[swap.slot]))

    def drop(self, request_id: str) -> None:
        """Drops the copies of a request that was cancelled while it was preempted."""
        self._stored.pop(request_id, None)
