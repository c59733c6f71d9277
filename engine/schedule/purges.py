"""Deletes cached prompts of one owner, or all, from the device and from host memory, between two steps.

What requests under way hold can't be deleted, and they cache more when they go on. So the server first asks
which ones there are (:meth:`Purges.begin`), waits until these have ended, and then purges. Requests that come
later may cache prompts again.
"""

from __future__ import annotations

from itertools import chain

from engine.request import Request
from engine.schedule.scheduler import Scheduler
from wire.messages.purge import PurgePrefixes


class Purges:
    """Purges the caches of one engine. ``kept`` has the answered requests whose states are kept for the next
    turn of a conversation."""

    def __init__(self, scheduler: Scheduler, kept: dict[str, Request]) -> None:
        self._scheduler = scheduler
        self._kept = kept
        self._given_up: list[str] = []

    def begin(self, wanted: PurgePrefixes) -> frozenset[str]:
        """Lets states of conversations be given up with the next step. Returns the ids of all requests whose
        memory is to be purged, which have to end first."""
        for request_id in [name for name, one in self._kept.items() if wanted.covers(one.cache_salt)]:
            del self._kept[request_id]
            self._given_up.append(request_id)
        return self.under_way(wanted)

    def take_given_up(self) -> list[str]:
        """Returns the requests whose states have to be given up since the last call."""
        names, self._given_up = self._given_up, []
        return names

    def under_way(self, wanted: PurgePrefixes) -> frozenset[str]:
        """Returns the ids of the requests that hold memory which is to be purged, and names of what is being
        read into it, written from it or lent."""
        scheduler, owned = self._scheduler, self._scheduler.owned
        ended = chain(scheduler.held.values(), scheduler.quarantined.values())
        requests = chain(scheduler.active, scheduler.forks.waiting.values(), ended)
        names = [one.request_id for one in requests if wanted.covers(one.cache_salt)]
        names += [f"read {n}" for n, one in owned.files.fetches.items() if wanted.covers(one.job.salt)]
        starts = owned.cache.tier.by_last_use()
        names += [f"copy {one.key.hex()}" for one in starts if one.is_pinned and wanted.covers(one.salt)]
        return frozenset(names)

    def purge(self, wanted: PurgePrefixes) -> int:
        """Deletes what is not :meth:`under_way`. Returns the number of starts that were deleted."""
        owned = self._scheduler.owned
        owned.sessions.purge(wanted.covers)
        return owned.cache.purge(wanted.covers) + owned.cache.tier.purge(wanted.covers)
