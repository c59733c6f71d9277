"""A prefill engine in a process of its own that lends what it has computed: the source of measured handoffs.

It does what a prefill server does, with a pipe in place of gRPC: prompts come in, tickets go out, and memory
is freed when its lease ends.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import queue
import secrets
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from kv_transfer.handshake import introduce
from kv_transfer.leases.source import EndedLease, SourceListener, TransferSource
from kv_transfer.nixl.transfer_thread import TransferThread
from wire.messages.handoff import HandshakeReply, HandshakeRequest, Ticket

ADDRESS = "127.0.0.1:1"
LEASE_TTL_S = 600.0
IDLE_S = 0.0005
END_S = 20.0


class PrefillProcess:
    """The reading process's end of the pipe."""

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config))
        self._process.start()
        theirs.close()  # so that a read here ends when the process does

    def handshake(self, request: HandshakeRequest) -> HandshakeReply:
        """Waits until the engine is ready, and returns the answer."""
        self._pipe.send(request)
        reply = self._receive()
        assert isinstance(reply, HandshakeReply)
        return reply

    def prefill(self, request_id: str, tokens: list[int]) -> None:
        self._pipe.send((request_id, tokens))

    def tickets(self) -> Iterator[Ticket]:
        """Yields the tickets that have come."""
        while self._pipe.poll():
            ticket = self._receive()
            assert isinstance(ticket, Ticket)
            yield ticket

    def _receive(self) -> Any:
        """Returns the next message. Raises :class:`RuntimeError` if the process has failed."""
        try:
            message = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the prefill process has ended") from None
        if isinstance(message, str):
            raise RuntimeError(f"the prefill process failed:\n{message}")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(END_S)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, config: EngineConfig) -> None:
    logging.basicConfig(level=logging.WARNING)
    try:
        with contextlib.closing(_Server(pipe, config)) as server:
            server.run()
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())


class _Server(SourceListener):
    """The process's end: one engine and its leases."""

    def __init__(self, pipe: Connection, config: EngineConfig) -> None:
        self._pipe = pipe
        self._engine = engine = Engine(config)
        self._ended: queue.SimpleQueue[EndedLease | BaseException] = queue.SimpleQueue()
        who = introduce(engine.caches, f"prefill-{secrets.token_hex(4)}", engine.fingerprint)
        max_leases = engine.capacity.max_held + 1
        self._thread = TransferThread(engine.caches, who.incarnation, self._ended.put)
        self._source = TransferSource(
            self._thread, who, self, address=ADDRESS, lease_ttl_s=LEASE_TTL_S, max_leases=max_leases
        )
        self._thread.start(self._source)

    def run(self) -> None:
        """Computes prompts until the other process asks to stop."""
        idle = True
        while True:
            while self._pipe.poll(IDLE_S if idle else 0):
                message = self._pipe.recv()
                if message is None:
                    return
                if isinstance(message, HandshakeRequest):
                    self._pipe.send(self._source.handshake(message))
                else:
                    self._engine.add(Request(*message, params=None))
            self._free()
            result = self._engine.step()
            for request in result.prefilled:
                self._pipe.send(self._ticket(request))
            idle = result.did_nothing

    def _free(self) -> None:
        while not self._ended.empty():
            ended = self._ended.get()
            if isinstance(ended, BaseException):
                raise ended
            self._engine.release(ended.request_id)

    def _ticket(self, request: Request) -> Ticket:
        num_blocks = self._engine.capacity.blocks_for(request.num_computed)
        return self._source.grant(
            request.request_id,
            num_tokens=request.num_computed,
            block_ids=request.memory.block_ids[:num_blocks],
            state_slot=request.memory.state_slot,
            digests=self._engine.digests(request.request_id),
        )

    def close(self) -> None:
        self._thread.close()

    # --- on the transfer thread ------------------------------------------------------------------

    def lease_ended(self, lease: EndedLease) -> None:
        self._ended.put(lease)
