"""Finds what to set if NCCL picked a slow transport. Pure, like :mod:`ucx_advice`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from twinfang.network.libraries import IBVERBS, PACKAGES
from twinfang.network.nccl_transport import NcclTransport, RankFacts
from twinfang.network.ucx_advice import Advice

_OFF = ("", "0")


def advise_nccl(transport: NcclTransport, here: RankFacts, there: RankFacts) -> Iterable[Advice]:
    """Yields all advice for two ranks, the most important first."""
    shares_host = here.host.shares_kernel(there.host)
    if transport.kind == "sockets":
        yield from _on_one_host() if shares_host else _sockets(transport, here, there)
    if transport.passes_host_memory:
        yield Advice(
            False,
            "the network card reads host memory, not the GPU's: there is no GPUDirect RDMA",
            "load nvidia-peermem on the nodes, or use a kernel and a driver with DMA-BUF; if the card is far "
            "from the GPU, NCCL_NET_GDR_LEVEL=SYS allows it",
        )


def _on_one_host() -> Iterator[Advice]:
    yield Advice(
        False,
        "sockets between two ranks of one host",
        "run both in one container, or share /dev/shm and the IPC and PID namespaces; unset NCCL_P2P_DISABLE "
        "and NCCL_SHM_DISABLE",
    )


def _sockets(transport: NcclTransport, here: RankFacts, there: RankFacts) -> Iterator[Advice]:
    ranks = (here, there)
    hindrances = [one for rank in ranks for one in _hindrances(rank)]
    for cause, remedy in hindrances:
        yield Advice(True, f"NCCL uses sockets between hosts: {cause}", remedy)
    without = [rank.host.hostname for rank in ranks if not any(port.is_up for port in rank.host.rdma)]
    if without:
        yield Advice(
            False,
            f"NCCL uses sockets between hosts: no active RDMA device on {' and '.join(without)}",
            "if there is one: start its link, and in a container pass /dev/infiniband through",
        )
    elif not hindrances:
        said = f" ({'; '.join(transport.reasons)})" if transport.reasons else ""
        yield Advice(
            True,
            f"NCCL uses sockets between hosts that both have RDMA devices{said}",
            "pass /dev/infiniband into the containers, with unlimited locked memory (ulimit -l). EFA needs a "
            "plugin that the images don't have: aws-ofi-nccl as libnccl-net.so, with libfabric",
        )


def _hindrances(rank: RankFacts) -> Iterator[tuple[str, str]]:
    """Yields what keeps NCCL from RDMA on one host: cause and remedy."""
    name = rank.host.hostname
    if rank.misses(IBVERBS):
        yield (
            f"{IBVERBS} is missing on {name}",
            f"install {PACKAGES[IBVERBS]} and ibverbs-providers; the CUDA image has both",
        )
    if (rank.variable("NCCL_IB_DISABLE") or "0") not in _OFF:
        yield f"NCCL_IB_DISABLE is set on {name}", "unset it"
    if (rank.variable("NCCL_NET") or "").lower() == "socket":
        yield f"NCCL_NET=Socket on {name}", "unset it"
    hca = rank.variable("NCCL_IB_HCA")
    ports = [port.name for port in rank.host.rdma if port.is_up]
    if hca and ports and not any(_selects(hca, port) for port in ports):
        yield (
            f"NCCL_IB_HCA={hca} on {name} names none of {', '.join(ports)}",
            "unset it, or name one of these",
        )


def _selects(hca: str, port: str) -> bool:
    """Whether a value of NCCL_IB_HCA selects a port. ``=`` compares whole names, ``^`` excludes, otherwise a
    beginning is enough."""
    excludes, names = hca.startswith("^"), hca.lstrip("^")
    is_exact = names.startswith("=")
    device = port.partition(":")[0]
    listed = [one.strip() for one in names.lstrip("=").split(",")]
    named = any(one in (port, device) or (not is_exact and port.startswith(one)) for one in listed)
    return named != excludes
