"""Computes the changes that make the router's servers equal to the servers that pods offer. Pure: no clock,
no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from router.kubernetes.pod import PodServer

Kind = Literal["remove", "add", "resume", "drain", "pause"]
"""
| change | its pod |
|---|---|
| ``remove`` | is gone, or has another address now |
| ``add`` | is ready, and was not known |
| ``resume`` | is ready again |
| ``drain`` | is being deleted: it gets no new requests; its requests move to other servers, or end on it |
| ``pause`` | is no longer ready: it gets no new requests until it is ready again; its requests continue |
"""
ORDER: tuple[Kind, ...] = get_args(Kind)
"""The order in which changes are made. In this order, an address is free before another pod gets it, and new
servers exist before a drained server gives its requests away."""


@dataclass(frozen=True)
class Change:
    kind: Kind
    pod: PodServer


Key = tuple[str, str]
""":attr:`PodServer.key`."""


def reconcile(wanted: Mapping[Key, PodServer], known: Mapping[Key, PodServer]) -> list[Change]:
    """Return the changes from the applied state (``known``) to the present state (``wanted``), in
    :data:`ORDER`. Both map keys to servers."""
    changes = [Change("remove", pod) for key, pod in known.items() if not _stays(pod, wanted.get(key))]
    for key, pod in wanted.items():
        before = known.get(key)
        if before is None or not _stays(before, pod):
            if pod.is_ready and not pod.is_terminating:
                changes.append(Change("add", pod))
            continue
        if before.is_ready != pod.is_ready:
            changes.append(Change("resume" if pod.is_ready else "pause", pod))
        if pod.is_terminating and not before.is_terminating:
            changes.append(Change("drain", pod))
    return sorted(changes, key=lambda change: ORDER.index(change.kind))


def after(known: Mapping[Key, PodServer], changes: Iterable[Change]) -> dict[Key, PodServer]:
    """Return what is known once the changes are made."""
    result = dict(known)
    for change in changes:
        pod = change.pod
        if change.kind == "remove":
            del result[pod.key]
            continue
        before = result.get(pod.key)
        was_terminating = before is not None and before.is_terminating
        result[pod.key] = replace(pod, is_terminating=pod.is_terminating or was_terminating)
    return result


def _stays(before: PodServer, now: PodServer | None) -> bool:
    return now is not None and now.place == before.place
