"""Hosts connected by links that a test can disturb: network namespaces of this machine.

    prefill-a ──┐                     ┌── decode
                ├── the middle, which ┤
    prefill-b ──┘     forwards        └── front

Every packet between two hosts passes the middle, which can drop, refuse or delay it. Hosts have no other way
out: nothing leaves this machine. A test reaches a host's ports by loopback ports, which no fault affects
(:class:`testing.faults.relay.Relay`).

Such networks need root (CAP_SYS_ADMIN and CAP_NET_ADMIN), iproute2 and a Linux with nftables. Otherwise
:class:`NetworkUnavailableError` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from testing.faults.firewall import DROP, NETLINK_NETFILTER, RESET, Firewall, FirewallError, between, one_in
from testing.faults.relay import Relay
from testing.fleets.fleet import Place

PREFIX = "twinfang-"
MIDDLE = "middle"
DEVICE = "eth0"
FOLDER = Path("/run/netns")
CLONE_NEWNET = 0x40000000
COMMAND_DEADLINE_S = 20.0
CONNECT_DEADLINE_S = 5.0

Made = TypeVar("Made")


class NetworkUnavailableError(Exception):
    """This machine, or this user, can't have network namespaces."""


@dataclass(frozen=True, kw_only=True)
class Host(Place):
    """One namespace with one address."""

    name: str
    namespace: str
    relay: Relay

    def open_port(self, port: int) -> None:
        """Opens a port of this host to tests, at the same port of this machine's loopback address."""
        self.relay.open(port, lambda: inside(self.namespace, lambda: self._connect(port)))

    def _connect(self, port: int) -> socket.socket:
        return socket.create_connection((self.address, port), CONNECT_DEADLINE_S)


@dataclass
class Network:
    """Hosts by name, and the faults between them."""

    hosts: dict[str, Host]
    firewall: Firewall
    _rules: list[bytes] = field(default_factory=list)
    _throttled: set[str] = field(default_factory=set)

    def cut(self, one: str, other: str) -> None:
        """Cuts two hosts off from each other in both directions, without any notice to them."""
        self._add(one, other, DROP)

    def refuse(self, one: str, other: str) -> None:
        """Answers everything that one of two hosts sends to the other by a reset."""
        self._add(one, other, RESET)

    def lose(self, one: str, other: str, *, one_packet_in: int) -> None:
        """Loses random packets between two hosts, in both directions."""
        self._add(one, other, one_in(one_packet_in) + DROP)

    def throttle(self, host: str, bits_per_s: int) -> None:
        """Limits what a host sends to this rate."""
        limit = ("rate", f"{bits_per_s}bit", "burst", "16kb", "latency", "500ms")
        namespace = self.hosts[host].namespace
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", DEVICE, "root", "tbf", *limit)
        self._throttled.add(namespace)

    def heal(self) -> None:
        """Repairs every link."""
        self._rules.clear()
        self.firewall.replace([])
        while self._throttled:
            _run("tc", "-n", self._throttled.pop(), "qdisc", "del", "dev", DEVICE, "root")

    def _add(self, one: str, other: str, fate: bytes) -> None:
        first, second = self.hosts[one].address, self.hosts[other].address
        self._rules += [between(first, second) + fate, between(second, first) + fate]
        self.firewall.replace(self._rules)


def inside(namespace: str, make: Callable[[], Made]) -> Made:
    """Calls ``make`` in a namespace and returns its result. A thread enters the namespace and ends there."""
    made: list[Made] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with (FOLDER / namespace).open("rb") as handle:
                if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"can't enter namespace {namespace}")
            made.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


@contextlib.contextmanager
def running_network(names: Sequence[str]) -> Iterator[Network]:
    """Makes hosts of these names, with all links in order. Raises :class:`NetworkUnavailableError`.

    Namespaces are removed at the end of the block. Those of earlier killed runs are removed at its start.
    """
    if os.geteuid() != 0:
        raise NetworkUnavailableError("network namespaces take root")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise NetworkUnavailableError(f"iproute2 is not installed: no {', '.join(missing)}")
    _remove_stale()
    prefix = f"{PREFIX}{os.getpid()}-"
    middle = prefix + MIDDLE
    with contextlib.ExitStack() as exits:
        relay = exits.enter_context(contextlib.closing(Relay()))
        hosts = {}
        for number, name in enumerate(names, 1):
            namespace = prefix + name
            command = ("ip", "netns", "exec", namespace)  # the process keeps its id
            hosts[name] = Host(f"10.89.{number}.2", command, name=name, namespace=namespace, relay=relay)
        for namespace in (middle, *(host.namespace for host in hosts.values())):
            try:
                _run("ip", "netns", "add", namespace)
            except subprocess.CalledProcessError as error:
                raise NetworkUnavailableError(f"no network namespace: {error.stderr.strip()}") from error
            exits.callback(_run, "ip", "netns", "del", namespace)
        inside(middle, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        for host in hosts.values():
            _link(host, middle)
        try:
            netlink = inside(
                middle, lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
            )
            firewall = Firewall(netlink)
        except (OSError, FirewallError) as error:
            raise NetworkUnavailableError(f"the kernel has no nftables: {error}") from error
        exits.callback(firewall.close)
        yield Network(hosts, firewall)


def _link(host: Host, middle: str) -> None:
    """Connects a host to the middle. ``gso_max_segs 1`` limits packets to real sizes; else they have 64
    KB."""
    gateway = host.address.removesuffix(".2") + ".1"
    ends = (middle, host.name), (host.namespace, DEVICE)
    _run(*f"ip -n {middle} link add {host.name} type veth peer name {DEVICE} netns {host.namespace}".split())
    for (namespace, device), address in zip(ends, (gateway, host.address), strict=True):
        _run(*f"ip -n {namespace} addr add {address}/24 dev {device}".split())
        _run(*f"ip -n {namespace} link set {device} up gso_max_segs 1".split())
    _run(*f"ip -n {host.namespace} link set lo up".split())
    _run(*f"ip -n {host.namespace} route add default via {gateway}".split())


def _remove_stale() -> None:
    """Removes namespaces of ended runs, and the processes that still run in them."""
    for path in FOLDER.glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not owner.isdigit() or Path("/proc", owner).exists():
            continue
        for pid in _run("ip", "netns", "pids", path.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", path.name)


def _run(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S
    ).stdout
