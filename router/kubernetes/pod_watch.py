"""Puts a router's discovery together."""

from __future__ import annotations

import asyncio

from router.background import OnFatal, cancel_and_wait, start_background
from router.config import PodDiscovery, RouterConfig
from router.fleet.pool_membership import Membership
from router.kubernetes.metrics import DiscoveryMetrics
from router.kubernetes.pod import label_value
from router.kubernetes.pod_workers import PodWorkers
from router.kubernetes.reflector import Reflector


class PodWatch:
    """Follows the pods that the configuration names, from :meth:`start` to :meth:`close`."""

    def __init__(self, pods: PodDiscovery, config: RouterConfig, membership: Membership) -> None:
        names = [source.name for source in config.models]
        served = frozenset(map(label_value, [*names, *(alias.name for alias in config.aliases)]))
        self.metrics = DiscoveryMetrics()
        self._workers = PodWorkers(membership, served, self.metrics)
        self._reflector = Reflector(pods, self._workers, self.metrics)
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        """Why the router may not know all present pods. Empty if it knows them."""
        return self._reflector.problem

    def start(self, on_fatal: OnFatal) -> None:
        self._task = start_background(self._reflector.run(), "watch of pods", on_fatal)

    async def close(self) -> None:
        """End the watch. Servers stay as they are."""
        if self._task is not None:
            await cancel_and_wait(self._task)
        await self._workers.close()
