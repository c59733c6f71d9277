"""Reads the events of a watch from the bytes of its answer: one JSON object on each line. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from router.kubernetes.cluster_error import Cause, ClusterError

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
EVENT_TYPES = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})
MAX_LINE_BYTES = 8 << 20
"""etcd keeps no object above 1.5 MiB, so a longer line is not an event."""
GONE = 410


@dataclass(frozen=True)
class WatchEvent:
    type: EventType
    object: Mapping[str, Any]
    """For a bookmark, only its kind and version."""


class WatchLines:
    """Turns the bytes of an answer into events as they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[WatchEvent]:
        """Return the events whose lines are complete. Raises :class:`ClusterError` for a line that is not an
        event, and for an event that reports an error."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > MAX_LINE_BYTES:
            raise ClusterError("garbage", f"a line of the watch is longer than {MAX_LINE_BYTES} bytes")
        return [_event(line) for line in lines if line.strip()]

    def ended(self) -> None:
        """Note the end of the answer. Raises :class:`ClusterError` if the last line is not complete."""
        if self._rest.strip():
            raise ClusterError("broken", "the watch ended in the midst of a line")


def status_error(what: str, status: int, body: Mapping[str, Any]) -> ClusterError:
    """Return the error for an answer or an event that is a ``Status``. Kubernetes reports failures as such
    objects."""
    said = body.get("message") or body.get("reason") or "it does not say why"
    cause: Cause = "gone" if status == GONE else "refused"
    return ClusterError(cause, f"the API server answers {status} to {what}: {said}{_remedy(status)}")


def _remedy(status: int) -> str:
    if status == 401:
        return "; is the token of the service account, or the kubeconfig, still good?"
    if status == 403:
        return "; allow it with a Role and a RoleBinding for this service account"
    return ""


def _event(line: bytes) -> WatchEvent:
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ClusterError("garbage", f"a line of the watch is no JSON: {error}") from error
    kind, told = (event.get("type"), event.get("object")) if isinstance(event, dict) else (None, None)
    if not isinstance(told, dict):
        raise ClusterError("garbage", "a line of the watch is JSON, but has no `object` as events have")
    if kind == "ERROR":
        code = told.get("code")
        raise status_error("the watch", code if isinstance(code, int) else 500, told)
    if kind not in EVENT_TYPES:
        raise ClusterError("garbage", f"an event of the watch has the unknown type {str(kind)[:40]!r}")
    return WatchEvent(cast(EventType, kind), told)
