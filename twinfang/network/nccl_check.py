"""``twinfang check-network --nccl``: sums tensors of two ranks as servers do, and measures the time.

The side that listens is rank 0, the other side is rank 1. They meet at rank 0's address, as the ranks of a
server do. NCCL logs to a file meanwhile; the log shows which transport NCCL picked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from engine.group.store import GroupStore, first_line
from kernels.gpu.current_device import use_device
from twinfang.network.gpu_facts import gpu_facts
from twinfang.network.libraries import Library, libraries
from twinfang.network.nccl_advice import advise_nccl
from twinfang.network.nccl_transport import NcclTransport, RankFacts, picked_by_nccl, warnings
from twinfang.network.ucx_advice import Advice
from twinfang.network.ucx_transport import HostFacts, host_facts
from wire.codec import decode, encode
from wire.errors import ConfigError, TransferError
from wire.http.address import host_port

MEETING_S = 300.0
"""How long a side waits for the other one."""
TIMEOUT_S = 60.0
"""How long a sum may take, the first one too, which connects the ranks."""
LARGE_BYTES = 256 << 20
SMALL_BYTES = 16 << 10
LARGE_ROUNDS = 10
SMALL_ROUNDS = 50
_UNSEEN_VARIABLES = {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}


@dataclass(frozen=True)
class Report:
    """The result of one check, as one of the two ranks saw it."""

    transport: NcclTransport
    gb_per_s: float
    """10⁹ bytes per second that each rank sends in a sum of ``large_bytes``, median."""
    large_bytes: int
    latency_us: float
    """Median of a sum of ``small_bytes``."""
    small_bytes: int
    here: RankFacts
    there: RankFacts
    advice: tuple[Advice, ...]

    @property
    def num_problems(self) -> int:
        return sum(advice.is_problem for advice in self.advice)


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Returns the function that ``twinfang check-network --nccl`` runs. Raises :class:`ConfigError` without a
    GPU."""
    if values.listen == (values.peer is not None):
        raise ConfigError("give --listen on one side and that side's HOST:PORT on the other")
    found = libraries()
    _check_gpu(values.device, found)
    rank = 0 if values.listen else 1
    address = host_port(values.host, values.port) if values.listen else values.peer
    store = GroupStore(address, "peer" if rank else "host")
    return partial(_run, store, rank, torch.device("cuda:0"), found, as_json=bool(values.json))


def _check_gpu(device: str, found: tuple[Library, ...]) -> None:
    missing = None
    if device == "cpu":
        missing = "--device cpu has none"
    elif not torch.cuda.is_available():
        missing = "torch finds none here"
    elif not dist.is_nccl_available():
        missing = "this torch was built without NCCL"
    if missing is not None:
        state = ", ".join(map(str, found))
        raise ConfigError(f"--nccl sums memory of a GPU on each side, and {missing}; libraries: {state}")


def _run(
    store: GroupStore, rank: int, device: torch.device, found: tuple[Library, ...], *, as_json: bool
) -> None:
    """Prints the report. Raises :class:`TransferError` if there is a problem that a setting can solve."""
    facts = rank_facts(os.environ, device, found)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "nccl.log"
        # NCCL reads these when it is first used. With the last one, a sum that takes too long is an error of
        # the caller; without it, a thread of torch would abort the process.
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV,P2P,SHM"}
        os.environ |= {"NCCL_DEBUG_FILE": str(log), "TORCH_NCCL_BLOCKING_WAIT": "1"}
        if rank == 0:
            print(f"waiting; on the other side: twinfang check-network --nccl {store.address}", flush=True)
        met = store.open(is_first=rank == 0, timeout_s=MEETING_S)
        try:
            report = check(met, rank, device, facts, log)
        except (dist.DistError, RuntimeError) as error:
            said = "; ".join(warnings(_read(log))) or first_line(error)
            raise TransferError(f"the ranks can't sum by NCCL: {said}") from error
    print(json.dumps(_figures(report), indent=2) if as_json else describe(report), flush=True)
    if report.num_problems:
        raise TransferError("the network can be faster; the report above says what to set")


def rank_facts(environment: Mapping[str, str], device: torch.device, found: tuple[Library, ...]) -> RankFacts:
    """Returns the facts of this process's host and GPU."""
    variables = sorted(
        (k, v) for k, v in environment.items() if k.startswith("NCCL_") and k not in _UNSEEN_VARIABLES
    )
    return RankFacts(host_facts(environment, gpu_facts(device)), found, tuple(variables))


def check(store: Store, rank: int, device: torch.device, here: RankFacts, log: Path) -> Report:
    """Measures sums with the other rank. Both ranks call this; on CPUs the sums are gloo's."""
    store.set(f"facts/{rank}", encode(here).hex())
    there = decode(bytes.fromhex(store.get(f"facts/{1 - rank}").decode()), RankFacts)
    _join(store, rank, device)
    try:
        small = [_sum(rank, SMALL_BYTES, device) for _ in range(SMALL_ROUNDS)]
        large = [_sum(rank, LARGE_BYTES, device) for _ in range(LARGE_ROUNDS)]
    finally:
        with suppress(RuntimeError):  # the error of the sum says more
            dist.destroy_process_group()
    store.set(f"ended/{rank}", "")
    if rank == 0:
        store.get("ended/1")  # the store ends with this process
    transport = picked_by_nccl(_read(log))
    return Report(
        transport=transport,
        gb_per_s=LARGE_BYTES / statistics.median(large) / 1e9,
        large_bytes=LARGE_BYTES,
        latency_us=statistics.median(small) * 1e6,
        small_bytes=SMALL_BYTES,
        here=here,
        there=there,
        advice=tuple(advise_nccl(transport, here, there)),
    )


def _join(store: Store, rank: int, device: torch.device) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    if device.type == "cuda":
        use_device(device)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=2, timeout=timeout, device_id=device
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)


def _sum(rank: int, num_bytes: int, device: torch.device) -> float:
    """Sums a tensor with the other rank's; returns the seconds. Of two ranks, each sends every byte once."""
    tensor = torch.full((num_bytes // 4,), float(1 + rank), device=device)
    dist.barrier()
    _synchronize(device)
    began_s = time.perf_counter()
    dist.all_reduce(tensor)
    _synchronize(device)
    seconds = time.perf_counter() - began_s
    if not bool((tensor == 3.0).all()):
        raise TransferError("a sum of the two ranks is wrong")
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def describe(report: Report) -> str:
    """Returns the report as text for people."""
    lines = [
        f"here       {_describe_rank(report.here)}",
        f"there      {_describe_rank(report.there)}",
        f"transport  {report.transport}",
        f"bandwidth  {report.gb_per_s:.2f} GB/s, sums of {report.large_bytes / 1e6:.0f} MB",
        f"latency    {report.latency_us:,.0f} µs a sum of {report.small_bytes / 1e3:.0f} KB",
    ]
    lines += [str(advice) for advice in report.advice]
    return "\n".join(lines)


def _describe_rank(rank: RankFacts) -> str:
    variables = " ".join(f"{name}={value}" for name, value in rank.variables) or "no NCCL_* set"
    missing = (
        ", ".join(str(library) for library in rank.libraries if not library.loads) or "all libraries load"
    )
    return f"{_describe_host(rank.host)}; {missing}; {variables}"


def _describe_host(host: HostFacts) -> str:
    rdma = ", ".join(port.name if port.is_up else f"{port.name} (down)" for port in host.rdma) or "none"
    gpu = f"; GPU: {host.gpu.name}" if host.gpu is not None else ""
    return f"{host.hostname}{gpu}; RDMA: {rdma}"


def _figures(report: Report) -> dict[str, object]:
    return {**asdict(report), "num_problems": report.num_problems}
