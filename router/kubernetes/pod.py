"""What a pod offers to a router, read from the object that the Kubernetes API has of it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from router.config import ROLE_LABEL
from router.fleet.links.server_link import PoolRole
from router.kubernetes.cluster_error import ClusterError
from wire.http.address import host_port

MODEL_LABEL = "twinfang.io/model"
"""Name of the model, as :func:`label_value` writes it. A pod without it serves whatever it serves."""
PORT_LABEL = "twinfang.io/port"
"""The server's gRPC port; ``8200-8203`` where a pod has several servers, on each port of the range."""

ENDED_PHASES = ("Failed", "Succeeded")
"""No container of such a pod runs, or ever will; its IP may be another pod's already."""
MAX_SERVERS = 64
"""Of one pod: a range that is mistyped would be thousands."""


@dataclass(frozen=True)
class PodServer:
    """A server in a pod, which may have others beside it."""

    uid: str
    """Of this pod alone: one that is made anew under the same name or with the same IP has another."""
    name: str
    role: PoolRole
    address: str
    """``IP:port`` of its gRPC."""
    is_ready: bool
    is_terminating: bool
    """It is being deleted, which nothing takes back."""
    created: str = ""
    """In RFC 3339, so that text sorts as time does."""

    @property
    def key(self) -> tuple[str, str]:
        """Tells it from all other servers of all pods there ever are."""
        return self.uid, self.address

    @property
    def place(self) -> tuple[PoolRole, str]:
        """What no two servers of a router can share."""
        return self.role, self.address


@dataclass(frozen=True)
class NoServer:
    """A pod that a router has nothing to do with, or not yet."""

    uid: str
    name: str
    kind: Literal["starting", "ended", "other_model", "unusable"]
    reason: str


PodOffer = tuple[PodServer, ...] | NoServer


def offer_of(pod: Mapping[str, Any], served_labels: frozenset[str]) -> PodOffer:
    """``served_labels``: models of the router, as values of the label :data:`MODEL_LABEL`.

    Servers of one pod are ready, and end, together: that is all that the API knows of them. Raises
    :class:`ClusterError` for what is no pod.
    """
    uid, name = pod_id(pod)
    metadata, status = _mapping(pod.get("metadata")), _mapping(pod.get("status"))
    labels = {key: text for key, text in _mapping(metadata.get("labels")).items() if isinstance(text, str)}
    if status.get("phase") in ENDED_PHASES:
        return NoServer(uid, name, "ended", f"its phase is {status['phase']}")
    role, label, model = (labels.get(label) for label in (ROLE_LABEL, PORT_LABEL, MODEL_LABEL))
    if role not in ("prefill", "decode"):
        return NoServer(uid, name, "unusable", f"its label {ROLE_LABEL} is {role!r}, not prefill or decode")
    if model is not None and model not in served_labels:
        serves = ", ".join(map(repr, sorted(served_labels)))
        reason = f"its label {MODEL_LABEL} is {model!r}, and this router serves {serves}"
        return NoServer(uid, name, "other_model", reason)
    ports = _ports(label)
    if not ports:
        reason = (
            f"its label {PORT_LABEL} is {label!r}, no port from 1 to 65535 and no range of at most "
            f"{MAX_SERVERS}, as in 8200-8203"
        )
        return NoServer(uid, name, "unusable", reason)
    ip = status.get("podIP")
    if not ip:
        return NoServer(uid, name, "starting", "it has no IP yet")
    try:
        host = str(ipaddress.ip_address(str(ip)))
    except ValueError:
        return NoServer(uid, name, "unusable", f"its IP {ip!r} is no IP address")
    return tuple(
        PodServer(
            uid,
            name,
            "prefill" if role == "prefill" else "decode",
            host_port(host, port),
            is_ready=_is_ready(status),
            is_terminating=metadata.get("deletionTimestamp") is not None,
            created=str(metadata.get("creationTimestamp") or ""),
        )
        for port in ports
    )


def pod_id(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Uid and name. Raises :class:`ClusterError` for what is no pod."""
    metadata = _mapping(pod.get("metadata"))
    uid, name = metadata.get("uid"), metadata.get("name")
    if not (isinstance(uid, str) and uid and isinstance(name, str) and name):
        raise ClusterError("garbage", "the API server told of a pod without a uid or a name")
    return uid, name


def claimants(offers: Iterable[PodServer]) -> dict[tuple[str, str], PodServer]:
    """Those whose address is theirs, by their keys.

    The API may still have a pod whose containers have ended when its IP is another's already.
    """
    by_place: dict[tuple[PoolRole, str], PodServer] = {}
    for offer in offers:
        rival = by_place.get(offer.place)
        if rival is None or _claim(offer) > _claim(rival):
            by_place[offer.place] = offer
    return {offer.key: offer for offer in by_place.values()}


def _claim(offer: PodServer) -> tuple[bool, bool, str, str]:
    return not offer.is_terminating, offer.is_ready, offer.created, offer.uid


def _is_ready(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions")
    return isinstance(conditions, list) and any(
        _mapping(one).get("type") == "Ready" and _mapping(one).get("status") == "True" for one in conditions
    )


def _ports(label: str | None) -> range:
    """Of a port, or of the first and the last one; empty for anything else."""
    first, dash, last = (label or "").partition("-")
    if not (_is_port(first) and _is_port(last if dash else first)):
        return range(0)
    ports = range(int(first), int(last if dash else first) + 1)
    return ports if len(ports) <= MAX_SERVERS else range(0)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def label_value(name: str) -> str:
    """A model's name as a label can have it: 63 characters, and hyphens for what labels do not allow."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:63].strip("-_.")
