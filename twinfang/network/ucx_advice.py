"""Finds what to set if UCX picked the wrong transport. Uses only the facts of both hosts and the
picked transport, and does no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twinfang.network.ucx_transport import Device, HostFacts, Transport

SLOW_SHARE = 0.5
"""Below this share of a link's rate, something other than the link is the limit."""

_ALIASES = {
    "sm": {"cma", "posix", "sysv", "xpmem", "knem"},
    "shm": {"cma", "posix", "sysv", "xpmem", "knem"},
    "ib": {"rc", "dc", "ud"},
    "cuda": {"cuda_copy", "cuda_ipc", "gdr_copy"},
}
_RDMA = ("rc", "dc", "ud", "srd", "gga")


@dataclass(frozen=True)
class Advice:
    """One thing that is wrong or could be better, and its remedy."""

    is_problem: bool
    """False for a hint: something that no setting can change, or that may be intended."""
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{'problem' if self.is_problem else 'hint'}: {self.text}\n  {self.remedy}"


def allows(tls: str | None, transport: str) -> bool:
    """Whether a value of UCX_TLS lets UCX use ``transport``."""
    if tls is None or not tls.strip():
        return True
    is_excluding = tls.startswith("^")
    names = {name.strip().lstrip("\\") for name in tls.removeprefix("^").split(",")}
    named = "all" in names or any(_names(name, transport) for name in names)
    return named != is_excluding


def _names(name: str, transport: str) -> bool:
    families = _ALIASES.get(name, {name})
    return any(transport == family or transport.startswith(family + "_") for family in families)


def allows_rdma(tls: str | None) -> bool:
    return any(allows(tls, transport) for transport in _RDMA)


def needed_transport_advice(host: HostFacts) -> Advice | None:
    """Returns advice if NIXL can't start with UCX_TLS: each connection needs TCP or RDMA for its messages."""
    tls = host.variable("UCX_TLS")
    if allows(tls, "tcp") or allows_rdma(tls):
        return None
    return Advice(
        True,
        f"UCX_TLS={tls} on {host.hostname} allows neither tcp nor an RDMA transport; NIXL needs one "
        "of them for its messages, shared memory carries only data",
        f"set UCX_TLS={tls},tcp" if not str(tls).startswith("^") else "take tcp out of UCX_TLS, or unset it",
    )


def advise(transport: Transport, here: HostFacts, there: HostFacts, *, gb_per_s: float) -> list[Advice]:
    """Returns all advice, the most important first."""
    found = [*_missing_devices(here), *_missing_devices(there)]
    if transport.kind == "TCP" and not here.shares_kernel(there):
        found += _between_hosts(here, there)
    elif transport.kind == "TCP" and (here.gpu is None or there.gpu is None):
        found += _of_one_host(here, there)
    if here.variable("UCX_TLS") != there.variable("UCX_TLS"):
        values = [host.variable("UCX_TLS") or "not set" for host in (here, there)]
        found.append(
            Advice(
                False,
                f"UCX_TLS is {values[0]} here and {values[1]} there; a connection uses what both allow",
                "set the same UCX_TLS on both sides",
            )
        )
    if not here.shares_kernel(there):
        found += _slow_link(transport, here, gb_per_s)
        found += _unused_rails(transport, here)
    return found


def _missing_devices(host: HostFacts) -> Iterable[Advice]:
    """Finds devices in UCX_NET_DEVICES that the host does not have; UCX ignores such devices."""
    value = host.variable("UCX_NET_DEVICES")
    if value is None or value in ("all", "") or value.startswith("^"):
        return
    there = {device.name: device for device in (*host.rdma, *host.network, Device("lo", True, None))}
    for name in (part.strip() for part in value.split(",")):
        device = there.get(name)
        if device is not None and device.is_up:
            continue
        state = "is down" if device is not None else "does not exist"
        up = ", ".join(device.name for device in there.values() if device.is_up)
        yield Advice(
            True,
            f"UCX_NET_DEVICES={value} on {host.hostname} names {name}, which {state}",
            f"unset it, or name one of {up}",
        )


def _of_one_host(here: HostFacts, there: HostFacts) -> Iterable[Advice]:
    """Advises on two processes under one kernel, where CMA reads memory several times as fast as TCP."""
    hindered = [host for host in (here, there) if not allows(host.variable("UCX_TLS"), "cma")]
    text = "TCP between two processes of one host"
    if hindered:
        yield Advice(
            True, f"{text}: UCX_TLS={hindered[0].variable('UCX_TLS')} leaves out cma", "unset UCX_TLS"
        )
        return
    if here.pid_namespace != there.pid_namespace:
        yield Advice(
            False,
            f"{text}: the processes are in different containers, and CMA needs to see the other process",
            "share the PID namespace (Kubernetes: shareProcessNamespace: true in one pod; docker: "
            "--pid=container:NAME) and give both the capability SYS_PTRACE",
        )
        return
    cause = "CMA needs the right to trace the other process"
    yield Advice(
        True,
        f"{text}: {cause}"
        + (f"; kernel.yama.ptrace_scope is {here.ptrace_scope}" if here.ptrace_scope else ""),
        "run both as one user and give both the capability SYS_PTRACE"
        + (", or: sysctl kernel.yama.ptrace_scope=0" if here.ptrace_scope else ""),
    )


def _between_hosts(here: HostFacts, there: HostFacts) -> Iterable[Advice]:
    ports = {host: [port for port in host.rdma if port.is_up] for host in (here, there)}
    if all(ports.values()):
        yield _unused_rdma(here, there, ports)
    elif any(ports.values()):
        without = next(host for host, up in ports.items() if not up)
        yield Advice(
            False,
            f"TCP, because {without.hostname} shows no active RDMA device; the other side has one",
            f"if {without.hostname} has one: start its link, and in a container pass /dev/infiniband through",
        )
    else:
        yield Advice(
            False,
            "TCP: neither host shows an RDMA device",
            "nothing to set; a network card with RDMA is faster",
        )


def _unused_rdma(here: HostFacts, there: HostFacts, ports: dict[HostFacts, list[Device]]) -> Advice:
    """Advises on TCP between two sides that both have RDMA."""
    text = "TCP between hosts that both have RDMA devices ({})".format(
        "; ".join(f"{host.hostname}: {', '.join(port.name for port in up)}" for host, up in ports.items())
    )
    for host in (here, there):
        tls, devices = host.variable("UCX_TLS"), host.variable("UCX_NET_DEVICES")
        if not allows_rdma(tls):
            return Advice(
                True,
                f"{text}: UCX_TLS={tls} on {host.hostname} leaves them out",
                "unset UCX_TLS, or set UCX_TLS=rc,sm,cuda,tcp on both sides",
            )
        names = {port.name for port in ports[host]}
        if devices is not None and devices != "all" and not _lets_through(devices, names):
            return Advice(
                True,
                f"{text}: UCX_NET_DEVICES={devices} on {host.hostname} leaves them out",
                f"set UCX_NET_DEVICES={','.join(sorted(names))} there, or unset it",
            )
    nets = {host: ",".join(port.name for port in up) for host, up in ports.items()}
    return Advice(
        True,
        text,
        f"set UCX_NET_DEVICES={nets[here]} on {here.hostname}, UCX_NET_DEVICES={nets[there]} on "
        f"{there.hostname}, UCX_TLS=rc,sm,cuda (without tcp) on both, and run this again: UCX then says why "
        "it can't use RDMA. In a container /dev/infiniband has to be there, and locked memory unlimited "
        "(ulimit -l)",
    )


def _lets_through(devices: str, names: set[str]) -> bool:
    listed = {part.strip() for part in devices.removeprefix("^").split(",")}
    return bool(names - listed) if devices.startswith("^") else bool(names & listed)


def _slow_link(transport: Transport, here: HostFacts, gb_per_s: float) -> Iterable[Advice]:
    """Finds a link that is slower than another link of this host, or that transfers far less than its
    rate."""
    devices = here.rdma if transport.kind == "RDMA" else here.network
    rates = {device.name: device.gbits for device in devices if device.is_up and device.gbits}
    used = [rates[name] for _, name in transport.lanes if name in rates]
    if not used:
        return
    best = max(rates, key=lambda name: rates[name] or 0.0)
    if (rates[best] or 0.0) > max(rate or 0.0 for rate in used):
        yield Advice(
            True,
            f"{transport.names} was picked, {max(rate or 0.0 for rate in used):g} Gbit/s; {best} has "
            f"{rates[best]:g}",
            f"set UCX_NET_DEVICES={best} on {here.hostname}",
        )
    total = sum(rate or 0.0 for rate in used) / 8
    if gb_per_s < SLOW_SHARE * total:
        yield Advice(
            False,
            f"{gb_per_s:.2f} GB/s over {total:.2f} GB/s of link",
            "look at other traffic, MTU, and which socket the device and the process are on",
        )


def _unused_rails(transport: Transport, here: HostFacts) -> Iterable[Advice]:
    """Finds ports that could carry a share of each read. NIXL tells UCX to use two for a read."""
    if transport.kind != "RDMA":
        return
    used = {name for _, name in transport.lanes}
    best = max((port.gbits or 0.0 for port in here.rdma if port.is_up), default=0.0)
    ports = [port.name for port in here.rdma if port.is_up and (port.gbits or 0.0) == best]
    if used < set(ports):
        yield Advice(
            False,
            f"{len(used)} of {len(ports)} active RDMA ports of {here.hostname} carry a read",
            f"to use several, set UCX_MAX_RMA_RAILS={len(ports)} and UCX_NET_DEVICES={','.join(ports)} on "
            "both sides (UCX_MAX_RNDV_RAILS has no effect: NIXL reads without a rendezvous). Take the ports "
            "near the GPU: nvidia-smi topo -m",
        )
