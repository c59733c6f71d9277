"""Where a router looks for pods."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from wire.errors import ConfigError

ROLE_LABEL = "twinfang.io/role"
"""``prefill`` or ``decode``; a server that does both is a decode server."""
MODEL_LABEL = "twinfang.io/model"
"""Name of the model, as :func:`label_value` writes it. A pod without it serves whatever it serves."""
PORT_LABEL = "twinfang.io/port"
"""The server's gRPC port; ``8200-8203`` where a pod has several servers, on each port of the range."""

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label: RFC 1123, section 2.1."""


@dataclass(frozen=True)
class PodDiscovery:
    """Which pods are servers. Raises :class:`ConfigError` for values that can't work."""

    namespace: str
    selector: str = ROLE_LABEL
    """Label selector in Kubernetes' own notation."""
    kubeconfig: Path | None = None
    """None: the service account of the pod that this process runs in."""

    def __post_init__(self) -> None:
        if not NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"kubernetes_namespace {self.namespace!r} is no name of a namespace: at most 63 lower-case "
                "letters, digits and hyphens, as in --kubernetes-namespace twinfang"
            )
        if not self.selector:
            raise ConfigError("kubernetes_selector is empty: give labels, as in --kubernetes-selector a=b")


def label_value(name: str) -> str:
    """A model's name as a label can have it: 63 characters, and hyphens for what labels do not allow."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:63].strip("-_.")
