"""The prefill side of the measured handoffs: a separate process that runs the functions sent to it."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from kv_transfer.handshake import introduce
from kv_transfer.leases.source import SourceListener, TransferSource
from kv_transfer.nixl.agent import TransferAgent, region_of
from kv_transfer.nixl.transfer_thread import TransferThread
from twinfang.bench.case import Case
from wire.messages.handoff import HandshakeReply, HandshakeRequest, Region, Ticket

RAW_POLL_S = 20e-6

Ask = Callable[..., Any]


@contextmanager
def prefill_side() -> Iterator[Ask]:
    """Starts the other process. The yielded function calls a function there with that process's
    :class:`Source`."""
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()  # otherwise this process would wait forever if the other process dies

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        pipe.send((function, arguments))
        return pipe.recv()

    try:
        yield ask
        ask(Source.close)
    finally:
        pipe.close()
        process.join()


def _serve(pipe: Connection) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    source = Source()
    while True:
        function, arguments = pipe.recv()
        if function is Source.poll_raw:
            pipe.send(None)
            source.poll_raw(pipe)
            continue
        pipe.send(function(source, *arguments))
        if function is Source.close:
            return


class Source(SourceListener):
    """The functions that the measuring process calls; one case at a time."""

    def __init__(self) -> None:
        self.lender: TransferSource | None = None
        self._thread: TransferThread | None = None
        self._raw: TransferAgent | None = None

    def open(self, case: Case) -> None:
        self.close()
        self.caches = case.caches()
        name = f"source-{time.monotonic_ns()}"
        self._thread = TransferThread(self.caches, name, self.failed)
        self.lender = TransferSource(
            self._thread,
            introduce(self.caches, name, "fp"),
            self,
            address="127.0.0.1:1",
            lease_ttl_s=3600.0,
            max_leases=8,
        )
        self._thread.start(self.lender)

    def failed(self, fault: BaseException) -> None:
        """Raises the fault, which ends the transfer thread."""
        raise fault

    def handshake(self, request: HandshakeRequest) -> HandshakeReply:
        assert self.lender is not None
        return self.lender.handshake(request)

    def grant(self, block_ids: list[int]) -> Ticket:
        assert self.lender is not None
        return self.lender.grant("bench", num_tokens=1, block_ids=block_ids, state_slot=1)

    def open_raw(self, num_bytes: int) -> tuple[bytes, Region]:
        self._memory = torch.ones(num_bytes, dtype=torch.uint8)
        self._raw = TransferAgent(f"raw-{time.monotonic_ns()}", [self._memory])
        return self._raw.metadata, region_of(self._memory)

    def poll_raw(self, pipe: Connection) -> None:
        """Polls NIXL until the next command comes."""
        assert self._raw is not None
        for turn in itertools.count():
            self._raw.poll()
            time.sleep(RAW_POLL_S)
            if turn % 16 == 0 and pipe.poll():
                return

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        if self._raw is not None:
            self._raw.close()
        self.lender, self._thread, self._raw = None, None, None
