"""``twinfang check-network``: reads another process's memory as servers do, and measures the time.

One side lends memory: :func:`run_listener`, a :class:`TransferSource` with the handshake of a server. The
other side reads it: :func:`run_check`, a :class:`TransferSink`. During the check, UCX logs to a file; the
log shows which transport UCX picked.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import queue
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from engine.memory.caches import Caches, CacheSpec
from kv_transfer.handshake import introduce
from kv_transfer.leases.source import SourceListener, TransferSource, transfer_handlers
from kv_transfer.nixl.agent import NIXL_ERRORS
from kv_transfer.nixl.pool_memory import refuse_expandable_segments
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferListener, TransferResult
from twinfang.network.gpu_advice import advise_gpus
from twinfang.network.gpu_facts import gpu_facts
from twinfang.network.ucx_advice import Advice, advise, needed_transport_advice
from twinfang.network.ucx_transport import (
    HostFacts,
    Memory,
    Transport,
    errors,
    host_facts,
    picked_transport,
)
from wire.codec import message
from wire.errors import ConfigError, TransferError
from wire.http.address import host_port
from wire.messages.handoff import HandshakeReply, HandshakeRequest, Ticket
from wire.rpc import HANDSHAKE, Method, call, open_channel, unary_handler
from wire.server import GrpcServer

NUM_BLOCKS = 1024
BLOCK_SIZE = 16
SPEC = CacheSpec(
    attn_layers=4,
    kv_heads=2,
    head_dim=128,
    kv_dtype=torch.bfloat16,
    mamba_layers=1,
    conv_channels=16,
    conv_width=4,
    mamba_heads=1,
    mamba_head_dim=8,
    state_size=16,
    conv_dtype=torch.bfloat16,
    ssm_dtype=torch.float32,
)
"""Blocks of 64 KiB, 64 MiB in total, and a very small state."""

PATTERN = 0x5A
"""The value of every byte of the lent memory. It shows the reader that bytes have arrived."""
MAX_LEASES = 16
LEASE_TTL_S = 120.0
TIMEOUT_S = 60.0
SMALL_ROUNDS = 50
LARGE_ROUNDS = 12
LARGE_FOR_S = 5.0
"""No round is begun after this time, so a slow network gets fewer rounds."""


@message
class Probe:
    """Asks the listening side for memory to read."""

    num_blocks: int


@message
class ProbeReply:
    facts: HostFacts
    ticket: Ticket


PROBE = Method("twinfang.NetworkCheck", "Probe", Probe, ProbeReply)


@dataclass(frozen=True)
class Report:
    """The result of one check."""

    memory: Memory
    """The reader's memory."""
    transport: Transport
    gb_per_s: float
    """10⁹ bytes per second, median, for reads of ``large_bytes`` in one contiguous run."""
    large_bytes: int
    latency_us: float
    """Median of a whole handoff of ``small_bytes``: the read, and the read that checks the lease."""
    small_bytes: int
    here: HostFacts
    there: HostFacts
    advice: tuple[Advice, ...]

    @property
    def num_problems(self) -> int:
        return sum(advice.is_problem for advice in self.advice)


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Returns the function that ``twinfang check-network`` runs. This function sets UCX's variables before
    NIXL makes its first agent."""
    if values.listen == (values.peer is not None):
        raise ConfigError("give --listen on one side and that side's HOST:PORT on the other")
    name = values.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda:0" if name == "cuda" else name)
    refuse_expandable_segments(device, os.environ)
    facts = host_facts(os.environ, gpu_facts(device))
    if values.listen:
        return partial(_with_ucx_log, partial(run_listener, values.host, values.port, device, facts), facts)
    check = partial(run_check, values.peer, device, facts, as_json=bool(values.json))
    return partial(_with_ucx_log, check, facts)


def _with_ucx_log(run: Callable[[Path], None], facts: HostFacts) -> None:
    """Calls ``run`` with UCX's log in a file. Raises :class:`TransferError` with UCX's messages if NIXL can't
    start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ucx.log"
        os.environ |= {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(path)}
        try:
            run(path)
        except NIXL_ERRORS as error:
            advice = needed_transport_advice(facts)
            said = "; ".join(errors(_read(path))) or str(error)
            remedy = f"\n{advice}" if advice is not None else "; look at the UCX_* variables that are set"
            raise TransferError(f"NIXL can't start: {said}{remedy}") from error


def _read(path: Path) -> str:
    """Returns UCX's log so far, after flushing UCX's buffer."""
    ctypes.CDLL(None).fflush(None)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _caches(device: torch.device) -> Caches:
    return Caches(SPEC, num_blocks=NUM_BLOCKS + 1, num_slots=2, block_size=BLOCK_SIZE, device=device)


def _introduce(caches: Caches) -> HandshakeRequest:
    return introduce(caches, secrets.token_hex(8), "check-network")


# --- the side that lends --------------------------------------------------------------------------


def run_listener(host: str, port: int, device: torch.device, facts: HostFacts, _log: Path) -> None:
    """Answers checks until the process is asked to stop."""
    asyncio.run(_listen(host, port, device, facts))


async def _listen(host: str, port: int, device: torch.device, facts: HostFacts) -> None:
    server = GrpcServer(host, port)
    caches = _caches(device)
    caches.kv.view(torch.uint8).fill_(PATTERN)
    introduction = _introduce(caches)
    thread = TransferThread(caches, introduction.incarnation, server.fail)
    source = TransferSource(
        thread,
        introduction,
        SourceListener(),
        address=host_port(host, server.port),
        lease_ttl_s=LEASE_TTL_S,
        max_leases=MAX_LEASES,
    )
    thread.start(source)

    async def probe(request: Probe, _context: object) -> ProbeReply:
        if not 1 <= request.num_blocks <= NUM_BLOCKS:
            raise TransferError(f"{request.num_blocks} blocks were asked for, there are {NUM_BLOCKS}")
        if source.num_leases == MAX_LEASES:
            raise TransferError(f"{MAX_LEASES} checks are under way; try again in {LEASE_TTL_S:g} s")
        block_ids = range(1, 1 + request.num_blocks)
        ticket = source.grant("check", num_tokens=1, block_ids=block_ids, state_slot=1)
        return ProbeReply(facts, ticket)

    server.add_service(PROBE.service, {PROBE.name: unary_handler(PROBE, probe)})
    handlers = transfer_handlers(source)
    server.add_service(HANDSHAKE.service, handlers)
    try:
        await server.start()
        print(f"listening; on the other side: twinfang check-network {host}:{server.port}", flush=True)
        await server.wait_until_stopped()
    finally:
        await asyncio.to_thread(thread.close)


# --- the side that reads --------------------------------------------------------------------------


def run_check(peer: str, device: torch.device, facts: HostFacts, log: Path, *, as_json: bool) -> None:
    """Prints the report. Raises :class:`TransferError` if there is a problem that a setting can solve."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = asyncio.run(_check(peer, device, facts, log))
    print(json.dumps(_figures(report), indent=2) if as_json else describe(report), flush=True)
    if report.num_problems:
        raise TransferError("the network can be faster; the report above says what to set")


async def _check(peer: str, device: torch.device, facts: HostFacts, log: Path) -> Report:
    caches = _caches(device)
    caches.kv.view(torch.uint8).fill_(0)  # the system maps memory only when it is first used
    reader, introduction = _Reader(), _introduce(caches)
    thread = TransferThread(caches, introduction.incarnation, reader.failed)
    sink = TransferSink(thread, introduction, reader)
    thread.start(sink)
    channel = open_channel(peer)
    try:
        reply: HandshakeReply = await call(channel, HANDSHAKE, sink.introduction, timeout_s=TIMEOUT_S)
        await asyncio.to_thread(sink.add_peer, peer, reply)

        async def handoff(num_blocks: int) -> tuple[TransferResult, HostFacts]:
            answer: ProbeReply = await call(channel, PROBE, Probe(num_blocks), timeout_s=TIMEOUT_S)
            return await asyncio.to_thread(_hand_over, sink, reader, answer.ticket), answer.facts

        small = [(await handoff(1))[0] for _ in range(SMALL_ROUNDS)]
        large: list[TransferResult] = []
        there = facts
        started = time.monotonic()
        while len(large) < 2 or (len(large) < LARGE_ROUNDS and time.monotonic() - started < LARGE_FOR_S):
            result, there = await handoff(NUM_BLOCKS)
            large.append(result)
    finally:
        await channel.close()
        await asyncio.to_thread(thread.close)
    if not bool((caches.kv[1:].view(torch.uint8) == PATTERN).all()):
        raise TransferError(f"the bytes read from {peer} differ from those that it lends")
    return _report(caches, log, facts, there, small, large)


class _Reader(TransferListener):
    """Collects results of reads. After a fault of the transfer thread no result comes; :func:`_hand_over`
    then waits in vain until its timeout."""

    def failed(self, fault: BaseException) -> None:
        """The transfer thread has logged the fault."""

    def __init__(self) -> None:
        self.results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()

    def transferred(self, result: TransferResult) -> None:
        self.results.put(result)


def _hand_over(sink: TransferSink, reader: _Reader, ticket: Ticket) -> TransferResult:
    block_ids = list(ticket.block_ids)
    sink.read(ticket, block_ids=block_ids, state_slot=1, deadline_s=TIMEOUT_S)
    try:
        result = reader.results.get(timeout=2 * TIMEOUT_S)
    except queue.Empty:
        raise TransferError(f"no answer to a read within {2 * TIMEOUT_S:g} s") from None
    if result.error is not None:
        raise result.error
    return result


def _report(
    caches: Caches,
    log: Path,
    here: HostFacts,
    there: HostFacts,
    small: list[TransferResult],
    large: list[TransferResult],
) -> Report:
    memory: Memory = "VRAM" if caches.kv.is_cuda else "DRAM"
    transport = picked_transport(_read(log), memory) or Transport("unknown", (), "UCX does not tell")
    gb_per_s = large[0].num_bytes / statistics.median(r.seconds for r in large) / 1e9
    return Report(
        memory=memory,
        transport=transport,
        gb_per_s=gb_per_s,
        large_bytes=large[0].num_bytes,
        latency_us=statistics.median(r.seconds for r in small) * 1e6,
        small_bytes=small[0].num_bytes,
        here=here,
        there=there,
        advice=(
            *advise_gpus(transport, here, there),
            *advise(transport, here, there, gb_per_s=gb_per_s),
        ),
    )


def describe(report: Report) -> str:
    """Returns the report as text for people."""
    lines = [
        f"here       {_describe_host(report.here)}",
        f"there      {_describe_host(report.there)}",
        f"transport  {report.transport}",
        f"bandwidth  {report.gb_per_s:.2f} GB/s, {report.large_bytes / 1e6:.0f} MB into {report.memory}",
        f"latency    {report.latency_us:,.0f} µs a handoff of {report.small_bytes / 1e3:.0f} KB",
    ]
    lines += [str(advice) for advice in report.advice]
    return "\n".join(lines)


def _describe_host(host: HostFacts) -> str:
    rdma = ", ".join(_describe_device(d.name, d.is_up, d.gbits) for d in host.rdma) or "none"
    network = ", ".join(_describe_device(d.name, d.is_up, d.gbits) for d in host.network) or "none"
    variables = " ".join(f"{name}={value}" for name, value in host.variables) or "no UCX_* set"
    gpu = f"; GPU: {host.gpu}" if host.gpu is not None else ""
    return f"{host.hostname}{gpu}; RDMA: {rdma}; network: {network}; {variables}"


def _describe_device(name: str, is_up: bool, gbits: float | None) -> str:
    return name + (f" {gbits:g} Gbit/s" if gbits else "") + ("" if is_up else " (down)")


def _figures(report: Report) -> dict[str, object]:
    return {**asdict(report), "num_problems": report.num_problems}
