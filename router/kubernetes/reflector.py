"""Lists pods, then watches them, and lists them again whenever the watch has ended, for whatever reason.

So nothing is missed that happens while the API server is away, and a watch need not be resumed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from router.config import PodDiscovery
from router.kubernetes.cluster import Cluster, Deadlines, open_cluster
from router.kubernetes.cluster_error import ClusterError
from router.kubernetes.metrics import DiscoveryMetrics
from router.kubernetes.watch_lines import WatchEvent

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
"""During the pause, routers keep using the servers that they know. So a shorter pause would gain little, and
it would burden an API server that has just started."""
JITTER = 0.25
"""The pause becomes longer or shorter at random, by up to this share of it, so that many routers do not all
ask at the same moment."""
LASTED_S = 10.0
"""If a watch lasted this long, earlier failures no longer count: the next pause is as short as the first
one."""


class Backoff:
    """Doubles the pause with each failure in a row."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_failures = 0

    def pause_s(self, lasted_s: float) -> float:
        """Return the next pause. ``lasted_s`` is the time that the last list and its watch took until
        they ended or failed."""
        if lasted_s >= LASTED_S:
            self._num_failures = 0
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**self._num_failures)
        self._num_failures = min(self._num_failures + 1, 32)
        return pause_s * self._rng.uniform(1 - JITTER, 1 + JITTER)


log = logging.getLogger(__name__)

WATCH_JITTER = 0.2
"""A watch is made shorter at random, by up to this share, so that routers that started together do not list
pods at the same moment each time."""
ORDINARY = ("gone", "ended")
"""Causes of a watch's end that are not errors."""


class PodObserver(Protocol):
    """Gets lists of pods and changes of pods. Both methods may raise :class:`ClusterError` for objects that
    are not pods. Then all pods are listed again."""

    def listed(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Take all pods that there are."""

    def changed(self, event: WatchEvent) -> None:
        """Take a pod that was added, modified or deleted."""


class Reflector:
    """Passes lists of pods and their changes to an observer, until :meth:`run` is cancelled."""

    def __init__(
        self,
        pods: PodDiscovery,
        observer: PodObserver,
        metrics: DiscoveryMetrics,
        *,
        deadlines: Deadlines | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = "they are not listed yet"
        """Why the observer's pods are not up to date. Empty if they are."""
        self._pods = pods
        self._observer = observer
        self._metrics = metrics
        self._deadlines = deadlines or Deadlines()
        self._rng = rng or random.Random()
        self._clock = clock

    async def run(self) -> None:
        backoff = Backoff(self._rng)
        while True:
            began_s = self._clock()
            try:
                await self._list_and_watch()
                cause = "ended"
            except ClusterError as error:
                cause = error.cause
                self._failed(error)
            self._metrics.relists[cause] += 1
            await asyncio.sleep(backoff.pause_s(self._clock() - began_s))

    async def _list_and_watch(self) -> None:
        """List pods and watch them until the watch has ended without an error."""
        async with open_cluster(self._pods.kubeconfig, self._deadlines) as cluster:
            listed = await cluster.list_pods(self._pods)
            self._metrics.contact()
            self._observer.listed(listed.pods)
            self._succeeded(len(listed.pods))
            await self._watch(cluster, listed.resource_version)

    async def _watch(self, cluster: Cluster, resource_version: str) -> None:
        watch_s = self._deadlines.watch_s * self._rng.uniform(1 - WATCH_JITTER, 1)
        async with aclosing(cluster.watch_pods(self._pods, resource_version, watch_s)) as batches:
            async for events in batches:
                self._metrics.contact()
                for event in events:
                    self._metrics.events[event.type.lower()] += 1
                    if event.type != "BOOKMARK":
                        self._observer.changed(event)

    def _succeeded(self, num_pods: int) -> None:
        if self.problem:
            log.info("pods of namespace %s are watched: %d now", self._pods.namespace, num_pods)
        self.problem = ""

    def _failed(self, error: ClusterError) -> None:
        """Log one line if something is wrong, but not the same line for each attempt."""
        if error.cause in ORDINARY:
            log.info("pods of namespace %s are listed again: %s", self._pods.namespace, error.message)
        elif error.message != self.problem:
            log.warning(
                "pods of namespace %s can't be followed, the known ones are kept: %s",
                self._pods.namespace,
                error.message,
            )
            self.problem = error.message
