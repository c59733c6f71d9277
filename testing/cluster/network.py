"""The network of a cluster, in a network namespace that has no way out.

    control plane, clients ── bridge ──┬── node-a ── its pods
      10.99.0.1                        └── node-b ── its pods

Tests and the control plane run in the namespace of the bridge, each node in a namespace of its own, and each
pod in one that the node's runtime makes.
"""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass

BRIDGE = "cluster"
CONTROL_PLANE = "10.99.0.1"
PODS = "10.88.0.0/16"
SERVICES = "10.0.0.0/24"
"""As testing/kubernetes/control_plane.py says."""
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Host:
    """A node's place in the network. Names have at most 12 characters, because interfaces have at most 15."""

    name: str
    number: int
    """From 1 on; addresses are made of it."""

    @property
    def address(self) -> str:
        return f"10.99.0.{10 + self.number}"

    @property
    def pods(self) -> str:
        """The addresses of its pods."""
        return f"10.88.{self.number}.0/24"


def is_alone() -> bool:
    """Returns whether this process is in a fresh network namespace."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def run_ip(*arguments: str, pid: int | None = None) -> None:
    """Runs ``ip`` in this namespace or in that of a process."""
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net", "--"] if pid else []
    command = [*inside, "ip", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stderr}"


def make_bridge() -> None:
    run_ip("link", "set", "lo", "up")
    run_ip("link", "add", BRIDGE, "type", "bridge")
    run_ip("address", "add", f"{CONTROL_PLANE}/24", "dev", BRIDGE)
    run_ip("link", "set", BRIDGE, "up")


def connect(host: Host, pid: int, others: list[Host]) -> None:
    """Connects a node to the bridge, and its pods to those of all other nodes. ``pid``: a process in the
    node's namespace."""
    outside = f"to-{host.name}"
    run_ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run_ip("link", "set", outside, "master", BRIDGE, "up")
    run_ip("link", "set", "lo", "up", pid=pid)
    run_ip("address", "add", f"{host.address}/24", "dev", "eth0", pid=pid)
    run_ip("link", "set", "eth0", "up", pid=pid)
    run_ip("route", "add", "default", "via", CONTROL_PLANE, pid=pid)
    for other in others:
        run_ip("route", "add", other.pods, "via", other.address, pid=pid)
    run_ip("route", "add", host.pods, "via", host.address)


def reach_services_through(host: Host) -> None:
    """Lets tests reach Services: the node's kube-proxy chooses the pod, as for a client of the cluster."""
    run_ip("route", "add", SERVICES, "via", host.address)
