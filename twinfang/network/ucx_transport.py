"""The transport that UCX picked for reading a peer's memory, from UCX's log, and the devices of both hosts.

With ``UCX_PROTO_INFO=y`` UCX logs a table for each kind of operation on a connection. The table named "remote
memory read" shows, by size, which transport carries a READ:

    | sink intra-node cfg#1                                            |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | 0..inf | zero-copy | cma/memory |

A read from GPU to GPU says ``into cuda/GPU0 from cuda/dev[0]``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twinfang.network.gpu_facts import GpuFacts
from wire.codec import message

Kind = Literal["shared memory", "GPU", "RDMA", "TCP", "unknown"]
Memory = Literal["DRAM", "VRAM"]

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("cma", "xpmem", "knem", "posix", "sysv", "self"), "shared memory"),
    **dict.fromkeys(("cuda_ipc", "cuda_copy", "gdr_copy", "rocm_ipc", "rocm_copy"), "GPU"),
    **dict.fromkeys(("rc", "dc", "ud", "srd", "gga", "ib"), "RDMA"),
    "tcp": "TCP",
}
_TRANSPORT = re.compile(r"\b([a-z][a-z0-9_]*)/([\w.:-]+)")
_ROW = re.compile(r"\|\s*\S+\.\.inf\s*\|\s*(.*?)\s*\|\s*(.*?)\s*\|")
_ERROR = re.compile(r"UCX  (?:ERROR|FATAL)\s+(.*)")
_UNSEEN_VARIABLES = {"UCX_PROTO_INFO", "UCX_LOG_LEVEL", "UCX_LOG_FILE"}


@message
class Device:
    """One network device of a host."""

    name: str
    """As UCX_NET_DEVICES names it: ``mlx5_0:1`` for an RDMA port, ``eth0`` for a network interface."""
    is_up: bool
    gbits: float | None
    """Gbit/s; None if the driver does not report it."""


@message
class HostFacts:
    """What one side of a connection reports about its host."""

    hostname: str
    boot_id: str
    """Equal for two processes under one operating system kernel, even in containers."""
    pid_namespace: str
    ptrace_scope: int
    """Yama's setting: 0 lets a user's processes read each other's memory, as CMA does."""
    rdma: tuple[Device, ...]
    network: tuple[Device, ...]
    """Without the loopback interface."""
    variables: tuple[tuple[str, str], ...]
    """The UCX_* variables of the environment."""
    gpu: GpuFacts | None = None
    """None: the side uses host memory."""

    def variable(self, name: str) -> str | None:
        return dict(self.variables).get(name)

    def shares_kernel(self, other: HostFacts) -> bool:
        return self.boot_id == other.boot_id


@dataclass(frozen=True)
class Transport:
    """The transport of a READ of many bytes."""

    kind: Kind
    lanes: tuple[tuple[str, str], ...]
    """The paths on which UCX moves the bytes, each as ``(transport, device)`` with UCX's names:
    ``("rc_mlx5", "mlx5_0:1")``."""
    method: str
    """The method as UCX names it: ``zero-copy``, or ``software emulation`` if the peer's process takes
    part."""

    @property
    def names(self) -> str:
        return " and ".join(f"{transport}/{device}" for transport, device in self.lanes)

    @property
    def needs_the_peer(self) -> bool:
        return "emulation" in self.method

    def __str__(self) -> str:
        how = {
            "shared memory": "shared memory: the kernel copies from process to process on this host",
            "GPU": "between GPUs of this host",
            "RDMA": "RDMA: the network card reads the peer's memory",
            "TCP": "TCP",
            "unknown": "an unknown transport",
        }[self.kind]
        part = "; the peer's process takes part in each read" if self.needs_the_peer else ""
        return f"{how} ({self.names}, {self.method}{part})"


def host_facts(
    environment: Mapping[str, str], gpu: GpuFacts | None = None, *, root: Path = Path("/")
) -> HostFacts:
    """Returns the facts of this process's host. ``root`` holds its ``proc`` and ``sys``."""
    namespace = root / "proc/self/ns/pid"
    variables = sorted(
        (k, v) for k, v in environment.items() if k.startswith("UCX_") and k not in _UNSEEN_VARIABLES
    )
    return HostFacts(
        hostname=_text(root / "proc/sys/kernel/hostname"),
        boot_id=_text(root / "proc/sys/kernel/random/boot_id"),
        pid_namespace=os.readlink(namespace) if namespace.is_symlink() else "",
        ptrace_scope=int(_text(root / "proc/sys/kernel/yama/ptrace_scope") or 0),
        rdma=tuple(_rdma_ports(root / "sys/class/infiniband")),
        network=tuple(_interfaces(root / "sys/class/net")),
        variables=tuple(variables),
        gpu=gpu,
    )


def _rdma_ports(folder: Path) -> list[Device]:
    return [
        Device(
            f"{port.parent.parent.name}:{port.name}",
            "ACTIVE" in _text(port / "state"),
            _first_number(_text(port / "rate")),
        )
        for port in sorted(folder.glob("*/ports/*"))
    ]


def _interfaces(folder: Path) -> list[Device]:
    found = []
    for link in sorted(folder.glob("*")):
        if link.name != "lo" and link.is_dir():
            mbits = _first_number(_text(link / "speed"))
            gbits = mbits / 1e3 if mbits is not None and mbits > 0 else None
            found.append(Device(link.name, _text(link / "operstate") in ("up", "unknown"), gbits))
    return found


def _text(path: Path) -> str:
    """Returns a file's text, or nothing if it can't be read, for example the speed of an interface that is
    down."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _first_number(text: str) -> float | None:
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found.group()) if found else None


def picked_transport(log: str, memory: Memory) -> Transport | None:
    """Returns the transport of large reads from the peer into ``memory``, from UCX's log; None if the log
    does not show it.

    With a GPU, UCX logs two tables: blocks are read into GPU memory, epochs into host memory.
    """
    picked = None
    lines = log.splitlines()
    for number, line in enumerate(lines):
        of_peer = number > 0 and " self cfg#" not in lines[number - 1]
        into_memory = ("into host" in line) == (memory == "DRAM")
        if "remote memory read" not in line or not of_peer or not into_memory:
            continue
        for row in lines[number : number + 12]:
            match = _ROW.search(row)
            if match:
                lanes = tuple(_TRANSPORT.findall(match.group(2)))
                picked = Transport(_kind(lanes), lanes, match.group(1))
                break
    return picked


def errors(log: str) -> list[str]:
    """Returns the errors in UCX's log, each once."""
    return list(dict.fromkeys(_ERROR.findall(log)))


def _kind(lanes: tuple[tuple[str, str], ...]) -> Kind:
    """Returns the slowest kind among several lanes, because the slowest lane limits the reads."""
    kinds = {_KINDS.get(name, _KINDS.get(name.split("_")[0], "unknown")) for name, _ in lanes}
    for kind in ("TCP", "RDMA", "GPU", "shared memory"):
        if kind in kinds:
            return kind
    return "unknown"
