"""Keeps the router's servers equal to the servers that pods offer."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from router.fleet.links.worker_watch import Worker
from router.fleet.pool_membership import Membership
from router.kubernetes.metrics import DiscoveryMetrics, PodState
from router.kubernetes.pod import NoServer, PodOffer, PodServer, claimants, offer_of, pod_id
from router.kubernetes.reconciliation import Change, Key, after, reconcile
from router.kubernetes.watch_lines import WatchEvent
from wire.errors import ConflictError

log = logging.getLogger(__name__)

NOT_READY = "its pod {} is not ready"


class PodWorkers:
    """Adds servers, and removes, pauses and drains only servers that it has added itself.

    A server that an operator removes stays away as long as its pod exists. An address that a flag or an
    operator has added is not touched.
    """

    def __init__(
        self, membership: Membership, served_labels: frozenset[str], metrics: DiscoveryMetrics
    ) -> None:
        self._membership = membership
        self._served_labels = served_labels
        self._metrics = metrics
        self._offers: dict[str, PodOffer] = {}
        """What each pod offers, by uid."""
        self._known: Mapping[Key, PodServer] = {}
        """The state that was applied last."""
        self._workers: dict[Key, Worker] = {}
        self._telling: set[asyncio.Task[bool]] = set()

    def listed(self, pods: Sequence[Mapping[str, Any]]) -> None:
        before = self._offers
        self._offers = {pod_id(pod)[0]: offer_of(pod, self._served_labels) for pod in pods}
        for uid, offer in self._offers.items():
            _say_if_unusable(offer, before.get(uid))
        self._reconcile()

    def changed(self, event: WatchEvent) -> None:
        uid, _ = pod_id(event.object)
        if event.type == "DELETED":
            self._offers.pop(uid, None)
        else:
            offer = offer_of(event.object, self._served_labels)
            _say_if_unusable(offer, self._offers.get(uid))
            self._offers[uid] = offer
        self._reconcile()

    async def close(self) -> None:
        for telling in self._telling:
            telling.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    def _reconcile(self) -> None:
        self._metrics.pods = Counter(filter(None, map(_state, self._offers.values())))
        offers = (offer for offer in self._offers.values() if not isinstance(offer, NoServer))
        wanted = claimants(server for offer in offers for server in offer)
        changes = reconcile(wanted, self._known)
        self._known = after(self._known, changes)
        for change in changes:
            self._apply(change)

    def _apply(self, change: Change) -> None:
        pod = change.pod
        if change.kind == "add":
            self._add(pod)
            return
        worker = self._workers.pop(pod.key, None) if change.kind == "remove" else self._workers.get(pod.key)
        if worker is None or not self._membership.has(worker):
            return
        if change.kind == "remove":
            self._membership.remove(worker, why=f"pod {pod.name} is gone")
        elif change.kind == "pause":
            self._membership.pause(worker, why=NOT_READY.format(pod.name))
        elif change.kind == "resume":
            self._membership.resume(worker, why=f"pod {pod.name} is ready again")
        else:
            telling = self._membership.retire(worker, why=f"pod {pod.name} is being deleted")
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    def _add(self, pod: PodServer) -> None:
        try:
            self._workers[pod.key] = self._membership.add(
                pod.role,
                pod.address,
                added_by="discovery",
                why=f"pod {pod.name} is ready",
                location=pod.location,
            )
        except ConflictError as error:
            log.warning("%s of pod %s is left alone: %s", pod.address, pod.name, error.message)


def _say_if_unusable(offer: PodOffer, before: PodOffer | None) -> None:
    if isinstance(offer, NoServer) and offer != before:
        if offer.kind == "unusable":
            log.warning("pod %s is not used: %s", offer.name, offer.reason)
        elif offer.kind == "other_model":
            log.info("pod %s is not used: %s", offer.name, offer.reason)


def _state(offer: PodOffer) -> PodState | None:
    """Return the pod's state. None if the pod no longer counts."""
    if not isinstance(offer, NoServer):
        if offer[0].is_terminating:
            return "terminating"
        return "ready" if offer[0].is_ready else "not_ready"
    if offer.kind == "starting":
        return "not_ready"
    return None if offer.kind == "ended" else offer.kind
