"""Plans the processes of ``up`` and ``serve``: their number, ports and command lines."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from twinfang.flags import file_cache, host_cache, table
from twinfang.flags import ranks as rank_flags
from twinfang.flags import router as router_flags
from twinfang.flags import tls as tls_flags
from twinfang.flags.flag import Flag, as_arguments
from twinfang.own_authority import OwnAuthority
from twinfang.stack.child import HURRIED_S, ChildSpec
from twinfang.stack.cores import may_use_gpu, usable_cores
from twinfang.stack.ports import LOOPBACK, free_ports, require_free
from twinfang.stack.readiness import until_ready, until_serving
from wire.errors import ConfigError
from wire.server import DRAIN_S, STOP_GRACE_S

SERVER_STOP_GRACE_S = 2 * DRAIN_S + STOP_GRACE_S + 2.0
"""An idle server stops in a moment. A busy server may have to wait until other servers have read its states,
its group is done and its last calls have ended."""
MAX_PORT = 65_535
ROUTER_STOP_MARGIN_S = 5.0
"""Added to the time for which the router itself lets running answers continue."""

DECODE_NICENESS = 5
"""Niceness of decode servers that share cores with prefill servers. The sooner a prompt is computed, the
sooner its request joins the decode steps of other requests, and one more row makes these steps hardly slower.
With equal niceness, the steps of a single row, each a pass over all weights, take half of the cores from
waiting prompts. At 10, decode gets only a tenth of the cores while prompts are computed."""

_ENGINE_FLAGS = (*table.MODEL_FLAGS.flags, *table.CAPACITY, *table.DECODING.flags, *table.CHECKS.flags)
_ROLE_FLAGS = {
    "prefill": (
        *(host_cache.HOST_CACHE_SIZE, host_cache.NEIGHBOUR_WAIT, *file_cache.FILE_CACHE),
        *(table.LEASE_TTL, table.VERIFY_HANDOFFS),
    ),
    "decode": (table.TRANSFER_DEADLINE, table.LOCAL_PREFILL, table.VERIFY_HANDOFFS),
    "both": (host_cache.HOST_CACHE_SIZE, *file_cache.FILE_CACHE),
}
UCX_ON_LOOPBACK = {
    # UCX would listen on all interfaces too, and its parser is not made for strangers.
    "UCX_NET_DEVICES": "lo",
    # UCX keeps memory registered with network cards until it is unmapped. To learn of that, it patches libc,
    # which takes 0.2 s at the start of each server. On loopback no memory is registered with a card.
    "UCX_MEM_EVENTS": "n",
}
"""Settings of UCX for a stack without GPUs."""
_ANY_ADDRESS = {"0.0.0.0": LOOPBACK, "::": "::1"}


@dataclass(frozen=True)
class Stack:
    """Servers and the router in front of them, all on this machine."""

    servers: tuple[ChildSpec, ...]
    router: ChildSpec
    num_threads: int
    """CPU threads of each rank of each server."""
    model_name: str
    scheme: str
    """http or https"""
    authority: OwnAuthority | None = None
    """The authority that was made for this stack."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.router.address}"

    @property
    def addresses(self) -> list[str]:
        """All addresses on which a process of the stack listens."""
        children = (*self.servers, self.router)
        pages = [urlsplit(child.metrics_url).netloc for child in self.servers if child.metrics_url]
        return [child.address for child in children] + pages


def plan_stack(values: argparse.Namespace, roles: Mapping[str, int]) -> Stack:
    """Plans the number of servers that ``roles`` gives for each role (prefill, decode, both), on free
    loopback ports."""
    _check_tiers(values, roles)
    places = [
        place for role, count in roles.items() for i in range(count) for place in _places(role, i, values)
    ]
    ports, metrics_ports = _ports(len(places), values.metrics_port)
    # Every server may use all cores: prefill comes first, and a thread that finds no core free
    # costs nothing (kernels/cpu/threads.py). Ranks of one server compute at the same time.
    num_threads = threads_each(values, max(place.num_beside for place in places))
    authority = OwnAuthority.make(values.host) if values.tls else None
    servers = tuple(
        _server(place, port, metrics_port, num_threads, values, authority)
        for place, port, metrics_port in zip(places, ports, metrics_ports, strict=True)
    )
    model_name = values.served_model_name or values.model.name
    scheme = "http" if values.ssl_certfile is None and authority is None else "https"
    router = _router(servers, values, scheme, authority)
    return Stack(servers, router, num_threads, model_name, scheme, authority)


def _check_tiers(values: argparse.Namespace, roles: Mapping[str, int]) -> None:
    """Raises :class:`ConfigError` for tiers that a server would refuse, before any process starts."""
    from engine.files.tier_settings import check_tiers

    files, host_bytes = file_cache.file_cache(values), int(values.host_cache_size * file_cache.GIB)
    for role in roles:
        if role != "decode":
            check_tiers(role, values.cache_mode, host_bytes, files)


@dataclass(frozen=True)
class _Place:
    """One server, or one of its data-parallel ranks."""

    role: str
    name: str
    num_beside: int
    """Number of processes that compute at the same time, including this process."""
    arguments: tuple[str, ...] = ()
    fate: str = ""


def _places(role: str, number: int, values: argparse.Namespace) -> list[_Place]:
    """Returns a server's ranks: only decode-0, or decode-0-0, decode-0-1 and so on."""
    name, size = f"{role}-{number}", values.data_parallel_size
    tp_size = _tensor_parallel(role, values)
    if role == "prefill" or size == 1:
        flags = () if role == "prefill" else tuple(as_arguments((rank_flags.EXPERT_PARALLEL,), values))
        return [_Place(role, name, tp_size, flags)]
    address = f"{LOOPBACK}:{free_ports(1)[0]}"
    fate = name if values.enable_expert_parallel else ""
    return [
        _Place(
            role,
            f"{name}-{rank}",
            size * tp_size,
            rank_arguments(values, rank, address, local_rank=rank),
            fate,
        )
        for rank in range(size)
    ]


def rank_arguments(
    values: argparse.Namespace, rank: int, address: str, *, local_rank: int
) -> tuple[str, ...]:
    """Returns the arguments that tell a process which data-parallel rank it is."""
    arguments = [*as_arguments(rank_flags.RANKS, values), "--data-parallel-rank", str(rank)]
    arguments += ["--data-parallel-address", address, "--local-rank", str(local_rank)]
    return tuple(arguments)


def threads_each(values: argparse.Namespace, num_processes: int) -> int:
    """Returns the threads of each of ``num_processes`` that compute at the same time."""
    return int(values.threads or max(1, usable_cores() // num_processes))


def child_environment(
    environment: Mapping[str, str], values: argparse.Namespace | None = None
) -> dict[str, str]:
    """Returns the environment without flags, except secret ones. Children get all others on their command
    lines."""
    kept = {name: value for name, value in environment.items() if name not in _VARIABLES}
    secrets = {
        flag.variable: getattr(values, flag.dest, None)
        for flag in router_flags.ROUTER_LIMITS
        if flag.is_secret
    }
    return kept | {name: str(value) for name, value in secrets.items() if value is not None}


def stack_environment(
    environment: Mapping[str, str], device: str, values: argparse.Namespace | None = None
) -> dict[str, str]:
    """Returns the environment of a stack's processes, which reach one another on loopback. With GPUs, UCX
    chooses for itself, since some reach one another only through a network card."""
    found = child_environment(environment, values)
    return found if may_use_gpu(device) else UCX_ON_LOOPBACK | found


def _ports(num_servers: int, first_metrics_port: int | None) -> tuple[list[int], list[int]]:
    """Returns a port for each server, and a metrics port, which is 0 if metrics are off."""
    if first_metrics_port is None:
        free = free_ports(2 * num_servers)
        return free[:num_servers], free[num_servers:]
    ports = free_ports(num_servers)
    if first_metrics_port == 0:
        return ports, [0] * num_servers
    metrics_ports = [first_metrics_port + i for i in range(num_servers)]
    if metrics_ports[-1] > MAX_PORT:
        raise ConfigError(
            f"--metrics-port {first_metrics_port} leaves {MAX_PORT - first_metrics_port + 1} ports for "
            f"{num_servers} servers; choose a lower one"
        )
    for port in metrics_ports:
        require_free(LOOPBACK, port, flag="--metrics-port")
    return ports, metrics_ports


def _server(
    place: _Place,
    port: int,
    metrics_port: int,
    num_threads: int,
    values: argparse.Namespace,
    authority: OwnAuthority | None,
) -> ChildSpec:
    role, name = place.role, place.name
    arguments = ["prefill"] if role == "prefill" else ["decode", "--role", role]
    arguments += as_arguments((*_ENGINE_FLAGS, *_ROLE_FLAGS[role]), values)
    arguments += ["--tensor-parallel", str(_tensor_parallel(role, values))]  # overrides the same flag above
    arguments += place.arguments
    arguments += ["--threads", str(num_threads), "--host", LOOPBACK, "--port", str(port)]
    if role == "decode":
        arguments += ["--nice", str(DECODE_NICENESS)]
    arguments += ["--metrics-port", str(metrics_port), *as_arguments(table.TRACES.flags, values)]
    arguments += ["--log-level", values.log_level, "--name", name]
    arguments += [] if authority is None else authority.arguments("server")
    files = None if authority is None else authority.files("operator")
    scheme = "http" if authority is None else "https"
    address = f"{LOOPBACK}:{port}"
    return ChildSpec(
        name,
        tuple(arguments),
        address,
        lambda: until_serving(address, files),
        SERVER_STOP_GRACE_S,
        f"{scheme}://{LOOPBACK}:{metrics_port}/metrics" if metrics_port else None,
        place.fate,
        may_be_forked=True,
    )


def _tensor_parallel(role: str, values: argparse.Namespace) -> int:
    of_prefill = values.prefill_tensor_parallel if role == "prefill" else None
    return int(of_prefill or values.tensor_parallel)


def _router(
    servers: Sequence[ChildSpec], values: argparse.Namespace, scheme: str, authority: OwnAuthority | None
) -> ChildSpec:
    if values.port:
        require_free(values.host, values.port)
    port = values.port or free_ports(1, values.host)[0]
    arguments = ["router", *as_arguments((table.MODEL, table.SERVED_MODEL_NAME), values)]
    arguments += as_arguments((*router_flags.ROUTER_LIMITS, *table.TRACES.flags), values)
    for server in servers:
        arguments += [f"--{server.arguments[0]}", server.address]
    arguments += ["--host", values.host, "--port", str(port)]
    arguments += ["--log-level", values.log_level, "--name", "router"]
    arguments += [] if authority is None else authority.arguments("router")
    reached_by = _ANY_ADDRESS.get(values.host, values.host)
    address = f"[{reached_by}]:{port}" if ":" in reached_by else f"{reached_by}:{port}"
    num_levels = 1 if values.workers == 1 else 2  # several processes have one more parent
    stop_grace_s = values.shutdown_grace + num_levels * ROUTER_STOP_MARGIN_S
    return ChildSpec(
        "router",
        tuple(arguments),
        address,
        lambda: until_ready(f"{scheme}://{address}"),
        stop_grace_s,
        f"{scheme}://{address}/metrics",
        hurried_s=num_levels * HURRIED_S,
    )


_MODULES = (table, host_cache, file_cache, rank_flags, router_flags, tls_flags)
_FLAGS = [flag for flags in _MODULES for flag in vars(flags).values()]
_VARIABLES = frozenset(flag.variable for flag in _FLAGS if isinstance(flag, Flag))
"""Environment variables that set a flag of a stack's process."""
