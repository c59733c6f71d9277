"""The transport that NCCL picked between two ranks, from NCCL's log.

With ``NCCL_DEBUG=INFO`` NCCL logs the devices that it found and one line for each channel:

    NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.5<0>
    Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from twinfang.network.libraries import Library
from twinfang.network.ucx_transport import HostFacts
from wire.codec import message

Kind = Literal["sockets", "RDMA", "a plugin", "GPU", "shared memory", "unknown"]

_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : \S+ -> \S+ (?:\[\w+\] )?via (\S+)")
_DEVICES = re.compile(r"NET/IB : Using (.*?)(?: \[RO\])?; OOB")
_DEVICE = re.compile(r"\[\d+\](\S+)")
_REASONS = re.compile(
    r"NCCL (?:INFO|WARN) "
    r"(Failed to open lib\S+|NET/IB : No device found|NCCL_\w+ set (?:by environment )?to \S+)"
)
_WARNING = re.compile(r"NCCL WARN (.*)")


@message
class RankFacts:
    """What one rank reports about its host."""

    host: HostFacts
    libraries: tuple[Library, ...]
    variables: tuple[tuple[str, str], ...]
    """The NCCL_* variables of the environment."""

    def variable(self, name: str) -> str | None:
        return dict(self.variables).get(name)

    def misses(self, name: str) -> bool:
        return any(library.name == name and not library.loads for library in self.libraries)


@dataclass(frozen=True)
class NcclTransport:
    """How the ranks' channels move bytes."""

    kind: Kind
    paths: tuple[str, ...]
    """With NCCL's names, each once: ``NET/IB/0/GDRDMA``."""
    devices: tuple[str, ...]
    """The RDMA ports that NCCL found: ``mlx5_0:1/RoCE``."""
    reasons: tuple[str, ...]
    """Lines of the log that say why NCCL left something out."""

    @property
    def passes_host_memory(self) -> bool:
        """Whether bytes of a GPU go through the host's memory on their way to the network card."""
        return self.kind == "RDMA" and any("GDRDMA" not in path for path in self.paths)

    def __str__(self) -> str:
        devices = f"; devices: {', '.join(self.devices)}" if self.devices else ""
        return f"{self.kind} ({', '.join(self.paths) or 'NCCL does not tell'}{devices})"


def picked_by_nccl(log: str) -> NcclTransport:
    """Returns the transport of the channels in NCCL's log."""
    paths = tuple(dict.fromkeys(_CHANNEL.findall(log)))
    found = _DEVICES.search(log)
    return NcclTransport(
        kind=_slowest([_kind(path) for path in paths]),
        paths=paths,
        devices=tuple(_DEVICE.findall(found[1])) if found else (),
        reasons=tuple(dict.fromkeys(_REASONS.findall(log))),
    )


def warnings(log: str) -> list[str]:
    """Returns the warnings in NCCL's log, each once."""
    return list(dict.fromkeys(_WARNING.findall(log)))


def _kind(path: str) -> Kind:
    transport, _, rest = path.partition("/")
    if transport == "NET":
        network = rest.partition("/")[0]
        return "sockets" if network == "Socket" else "RDMA" if network.startswith("IB") else "a plugin"
    known: dict[str, Kind] = {"P2P": "GPU", "SHM": "shared memory"}
    return known.get(transport, "unknown")


def _slowest(kinds: list[Kind]) -> Kind:
    order: tuple[Kind, ...] = ("sockets", "shared memory", "a plugin", "RDMA", "GPU")
    return next((kind for kind in order if kind in kinds), "unknown")
