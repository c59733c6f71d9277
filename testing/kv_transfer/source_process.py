"""A prefill server's memory in a separate process, controlled over a pipe.

The process holds one :class:`TransferSource` at a time, on pools that the test may fill and read. A test
kills or freezes it like any other process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from kv_transfer.digester import Digester
from kv_transfer.handshake import introduce
from kv_transfer.leases.seals import DigestSeals
from kv_transfer.leases.source import EndedLease, SourceListener, TransferSource
from kv_transfer.nixl.transfer_thread import TransferThread
from testing.kv_transfer.pools import PoolShape, fill, unit_bytes_of
from wire.codec import decode, encode
from wire.errors import TwinfangError
from wire.messages.handoff import EndLease, HandshakeReply, HandshakeRequest, RenewLeases, Ticket

DEADLINE_S = 30.0
ADDRESS = "127.0.0.1:1"

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["testing.kv_transfer.source_process"])


class SourceProcess:
    """The test's end of the pipe."""

    def __init__(self) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def open(
        self,
        shape: PoolShape,
        *,
        seed: int = 0,
        incarnation: str | None = None,
        fingerprint: str = "fp",
        lease_ttl_s: float = 600.0,
        max_leases: int = 64,
        environment: dict[str, str] | None = None,
    ) -> str:
        """Replaces the source by a new one; returns the new incarnation."""
        incarnation = incarnation or f"source-{self.pid}-{time.monotonic_ns()}"
        self._ask(
            "open",
            shape=shape,
            seed=seed,
            environment=environment or {},
            settings={
                "incarnation": incarnation,
                "fingerprint": fingerprint,
                "lease_ttl_s": lease_ttl_s,
                "max_leases": max_leases,
            },
        )
        return incarnation

    def handshake(self, request: HandshakeRequest) -> HandshakeReply:
        return decode(self._ask("handshake", data=encode(request)), HandshakeReply)

    def grant(self, request_id: str, block_ids: list[int], state_slot: int) -> Ticket:
        data = self._ask("grant", request_id=request_id, block_ids=block_ids, state_slot=state_slot)
        return decode(data, Ticket)

    def seal(self, ticket: Ticket) -> Ticket:
        """Returns the ticket with digests of the memory that it names."""
        return decode(self._ask("seal", data=encode(ticket)), Ticket)

    def damage(self, kind: str, unit: int, place: int) -> None:
        """Flips a bit of byte ``place`` of a ``block`` or a ``slot``."""
        self._ask("damage", kind=kind, unit=unit, place=place)

    def end(self, ticket: Ticket) -> None:
        self.take(EndLease(ticket.request_id, ticket.lease_id, ticket.epoch))

    def take(self, message: EndLease | RenewLeases) -> None:
        """Sends a message about leases, as a reading server does."""
        self._ask("end" if isinstance(message, EndLease) else "renew", data=encode(message))

    def next_ended(self, timeout_s: float = DEADLINE_S) -> EndedLease:
        """Waits for the next lease that ends, and returns it."""
        ended = self._ask("next_ended", timeout_s=timeout_s)
        assert isinstance(ended, EndedLease), f"no lease ended within {timeout_s} s"
        return ended

    def fill(self, seed: int) -> None:
        self._ask("fill", seed=seed)

    def pools(self) -> list[bytes]:
        """Returns all bytes of both pools."""
        return list(self._ask("pools"))

    def num_leases(self) -> int:
        return int(self._ask("num_leases"))

    def num_threads(self) -> int:
        return int(self._ask("num_threads"))

    def cpu_seconds(self, wall_s: float) -> float:
        """Returns the processor time of the process during ``wall_s`` seconds without any command."""
        return float(self._ask("cpu_seconds", wall_s=wall_s))

    def fatal(self, timeout_s: float = DEADLINE_S) -> str:
        """Waits until ``on_fatal`` is called; returns its argument."""
        return str(self._ask("fatal", timeout_s=timeout_s))

    def break_lease_callback(self) -> None:
        self._ask("break_lease_callback")

    def close_source(self) -> None:
        self._ask("close_source")

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + DEADLINE_S
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, "the process did not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)

    def quit(self) -> int | None:
        """Ends the process in order, like a server; returns its exit code, or None if it still runs."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self.thaw()
                self._pipe.send(("quit", {}))
            self._process.join(DEADLINE_S)
        code = self._process.exitcode
        if code is None:
            self.kill()
        self._pipe.close()
        return code

    def _ask(self, command: str, **arguments: Any) -> Any:
        self._pipe.send((command, arguments))
        assert self._pipe.poll(DEADLINE_S * 2), f"{command!r} got no answer"
        kind, value = self._pipe.recv()
        if kind == "error":
            raise value
        return value


class _Server(SourceListener):
    """The process's end of the pipe, with one method for each command."""

    def __init__(self) -> None:
        self.source: TransferSource | None = None
        self._thread: TransferThread | None = None
        self.ended: queue.Queue[EndedLease] = queue.Queue()
        self.faults: queue.Queue[BaseException] = queue.Queue()
        self.callback_is_broken = False

    def open(
        self, shape: PoolShape, seed: int, environment: dict[str, str], settings: dict[str, Any]
    ) -> None:
        self.close_source()
        os.environ.pop("UCX_TLS", None)
        os.environ.update(environment)
        self.ended, self.faults = queue.Queue(), queue.Queue()
        self.callback_is_broken = False
        self.caches = shape.caches()
        fill(self.caches, seed)
        who = introduce(self.caches, settings.pop("incarnation"), settings.pop("fingerprint"))
        self._thread = TransferThread(self.caches, who.incarnation, self.faults.put)
        self.source = TransferSource(self._thread, who, self, address=ADDRESS, **settings)
        self._thread.start(self.source)

    def handshake(self, data: bytes) -> bytes:
        assert self.source is not None
        return encode(self.source.handshake(decode(data, HandshakeRequest)))

    def grant(self, request_id: str, block_ids: list[int], state_slot: int) -> bytes:
        assert self.source is not None
        return encode(
            self.source.grant(
                request_id,
                num_tokens=max(1, len(block_ids)) * self.caches.block_size,
                block_ids=block_ids,
                state_slot=state_slot,
            )
        )

    def seal(self, data: bytes) -> bytes:
        sealed: queue.Queue[Ticket] = queue.Queue()
        with contextlib.closing(Digester(self.caches, self.faults.put)) as digester:
            seals = DigestSeals(digester, lambda callback, *arguments: callback(*arguments), only_quick=False)
            seals.seal(decode(data, Ticket), sealed.put)
            return encode(sealed.get(timeout=DEADLINE_S))

    def damage(self, kind: str, unit: int, place: int) -> None:
        pool = self.caches.kv if kind == "block" else self.caches.state
        unit_bytes_of(pool)[unit, place] ^= 1

    def end(self, data: bytes) -> None:
        assert self.source is not None
        self.source.end(decode(data, EndLease))

    def renew(self, data: bytes) -> None:
        assert self.source is not None
        self.source.renew(decode(data, RenewLeases))

    def next_ended(self, timeout_s: float) -> EndedLease | None:
        with contextlib.suppress(queue.Empty):
            return self.ended.get(timeout=timeout_s)
        return None

    def fill(self, seed: int) -> None:
        fill(self.caches, seed)

    def pools(self) -> list[bytes]:
        return [
            unit_bytes_of(pool).contiguous().numpy().tobytes() for pool in (self.caches.kv, self.caches.state)
        ]

    def num_leases(self) -> int:
        assert self.source is not None
        return self.source.num_leases

    def num_threads(self) -> int:
        return threading.active_count()

    def cpu_seconds(self, wall_s: float) -> float:
        before = time.process_time()
        time.sleep(wall_s)
        return time.process_time() - before

    def fatal(self, timeout_s: float) -> str:
        return repr(self.faults.get(timeout=timeout_s))

    def break_lease_callback(self) -> None:
        self.callback_is_broken = True

    def close_source(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = self.source = None

    close = close_source

    # --- what the source tells -------------------------------------------------------------------

    def lease_ended(self, lease: EndedLease) -> None:
        if self.callback_is_broken:
            raise ZeroDivisionError("a fault of ours")
        self.ended.put(lease)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    with contextlib.closing(_Server()) as server:
        for command, arguments in _commands(pipe):
            try:
                pipe.send(("value", getattr(server, command)(**arguments)))
            except TwinfangError as error:
                pipe.send(("error", error))


def _commands(pipe: Connection) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields commands until the test sends "quit" or its process ends."""
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        if command == "quit":
            return
        yield command, arguments
