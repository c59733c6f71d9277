"""Finds what to set if UCX picked the wrong transport for GPU memory. Pure, like :mod:`ucx_advice`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from twinfang.network.ucx_advice import Advice, allows
from twinfang.network.ucx_transport import HostFacts, Transport

READS_BY_IPC = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


def advise_gpus(transport: Transport, here: HostFacts, there: HostFacts) -> Iterable[Advice]:
    """Yields all advice for a read from GPU memory into GPU memory, the most important first."""
    if here.gpu is None or there.gpu is None:
        return
    if here.shares_kernel(there) and transport.kind != "GPU":
        yield from _without_cuda_ipc(transport, here, there)
    if transport.kind == "RDMA":
        yield from _unordered_writes(here)


def _without_cuda_ipc(transport: Transport, here: HostFacts, there: HostFacts) -> Iterator[Advice]:
    """Advises on two GPUs of one host that are not read by CUDA IPC."""
    is_problem = transport.kind != "RDMA"  # a network card reads the memory directly too, though more slowly
    text = f"GPU memory of one host is read by {transport.names}, not by cuda_ipc"
    hindrances = list(_hindrances(here, there))
    for cause, remedy in hindrances:
        yield Advice(is_problem, f"{text}: {cause}", remedy)
    if not hindrances:
        yield Advice(
            False,
            text,
            "look for cuda_ipc in the log of a server that was started with UCX_LOG_LEVEL=debug: it says why "
            "UCX can't use it",
        )


def _hindrances(here: HostFacts, there: HostFacts) -> Iterator[tuple[str, str]]:
    """Yields what keeps UCX from CUDA IPC: cause and remedy."""
    for host in (here, there):
        tls = host.variable("UCX_TLS")
        if not allows(tls, "cuda_ipc"):
            yield f"UCX_TLS={tls} on {host.hostname} leaves it out", "add cuda to UCX_TLS, or unset it"
        if (reads := host.variable(READS_BY_IPC)) not in (None, "on", "y", "yes", "1"):
            yield (
                f"{READS_BY_IPC}={reads} on {host.hostname} leaves it out between GPUs without NVLink",
                "unset it: servers then set it to on",
            )
    if here.pid_namespace != there.pid_namespace:
        yield (
            "the processes are in different PID namespaces",
            "share one (docker: --pid=container:NAME; Kubernetes: containers of one pod with "
            "shareProcessNamespace: true)",
        )
    for host, gpu, other in ((here, here.gpu, there.gpu), (there, there.gpu, here.gpu)):
        if gpu is not None and other is not None and other.uuid not in gpu.visible:
            yield (
                f"{host.hostname} does not see the other side's GPU {other.uuid}",
                "give both containers both GPUs, and let CUDA_VISIBLE_DEVICES name a side's own GPU first",
            )


def _unordered_writes(here: HostFacts) -> Iterator[Advice]:
    """Advises on a GPU that may show a kernel the bytes of a finished read too late."""
    gpu = here.gpu
    if gpu is None or gpu.writes_ordering is None:
        yield Advice(
            False,
            "CUDA's driver did not say whether this GPU orders a network card's writes "
            "(GPUDirectRDMAWritesOrdering)",
            "check the driver's version; servers started with --sanitize compare digests of what they read",
        )
    elif gpu.writes_ordering == 0:
        yield Advice(
            True,
            f"{gpu.name} does not order a network card's writes (GPUDirectRDMAWritesOrdering is none): a "
            "kernel may read old bytes after a read has ended",
            f"set UCX_IB_GPU_DIRECT_RDMA=n on {here.hostname}: reads then pass through host memory",
        )
