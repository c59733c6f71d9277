"""What a pod offers to a router, read from the pod's object in the Kubernetes API."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from router.config import ROLE_LABEL
from router.fleet.links.server_link import PoolRole
from router.kubernetes.cluster_error import ClusterError
from router.policies.location import NOWHERE, Location
from wire.http.address import host_port

MODEL_LABEL = "twinfang.io/model"
"""Name of the model, as :func:`label_value` writes it. Without this label, the pod's server itself reports
its model."""
PORT_LABEL = "twinfang.io/port"
"""The server's gRPC port. For a pod with several servers, a range with one port for each server:
``8200-8203``."""

RACK_LABEL = "twinfang.io/rack"
"""Name of the rack, or of whatever else is within a zone and has a fast network, in which the pod's node
is."""
ZONE_LABEL = "topology.kubernetes.io/zone"
"""Kubernetes' own label of a node's zone. Newer versions give it to pods, too."""

ENDED_PHASES = ("Failed", "Succeeded")
"""In these phases no container of the pod runs, or ever will. Another pod may already have its IP."""
MAX_SERVERS = 64
"""Maximum number of servers of one pod, as a mistyped range could have thousands."""


@dataclass(frozen=True)
class PodServer:
    """A server in a pod. The pod may have other servers, too."""

    uid: str
    """The uid of this pod only: a pod that is created again under the same name or with the same IP has
    another uid."""
    name: str
    role: PoolRole
    address: str
    """``IP:port`` of the server's gRPC port."""
    is_ready: bool
    is_terminating: bool
    """Whether the pod is being deleted, which nothing can undo."""
    created: str = ""
    """Time of creation in RFC 3339 format, so that sorting the texts sorts the times."""
    location: Location = NOWHERE

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the server among all servers of all pods, past and future."""
        return self.uid, self.address

    @property
    def place(self) -> tuple[PoolRole, str]:
        """Role and address. No two servers of a router may have the same."""
        return self.role, self.address


@dataclass(frozen=True)
class NoServer:
    """A pod that a router does not use, or does not use yet."""

    uid: str
    name: str
    kind: Literal["starting", "ended", "other_model", "unusable"]
    reason: str


PodOffer = tuple[PodServer, ...] | NoServer


def offer_of(pod: Mapping[str, Any], served_labels: frozenset[str]) -> PodOffer:
    """Return what a pod offers. ``served_labels`` are the router's models as values of the label
    :data:`MODEL_LABEL`.

    All servers of a pod become ready, and terminate, at the same time, since the API reports this only for
    whole pods. Raises :class:`ClusterError` for an object that is not a pod.
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
    node = _mapping(pod.get("spec")).get("nodeName")
    location = Location(str(node or ""), labels.get(RACK_LABEL, ""), labels.get(ZONE_LABEL, ""))
    return tuple(
        PodServer(
            uid,
            name,
            "prefill" if role == "prefill" else "decode",
            host_port(host, port),
            is_ready=_is_ready(status),
            is_terminating=metadata.get("deletionTimestamp") is not None,
            created=str(metadata.get("creationTimestamp") or ""),
            location=location,
        )
        for port in ports
    )


def pod_id(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return uid and name. Raises :class:`ClusterError` for an object that is not a pod."""
    metadata = _mapping(pod.get("metadata"))
    uid, name = metadata.get("uid"), metadata.get("name")
    if not (isinstance(uid, str) and uid and isinstance(name, str) and name):
        raise ClusterError("garbage", "the API server sent a pod without a uid or a name")
    return uid, name


def claimants(offers: Iterable[PodServer]) -> dict[tuple[str, str], PodServer]:
    """Return, by key, the servers that own their addresses.

    Of several servers with the same role and address, only one owns the address: the API may still list a pod
    whose containers have ended while another pod already has its IP.
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
    """Return the range of one port, or of the first and the last port. Empty for any other text."""
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
    """Return a model's name as a label's value: at most 63 characters, with hyphens for characters that
    labels do not allow."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:63].strip("-_.")
