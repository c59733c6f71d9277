"""One server's part in reading cached prefixes out of one another's host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from engine.engine import Engine
from engine.files.lending import MAX_LOANS
from engine.files.start_files import StartForm
from engine.host import EngineHost
from kv_transfer.digester import QUICK_BYTES
from kv_transfer.engine_server import EngineServerConfig
from kv_transfer.leases.source import EndedLease, TransferSource
from kv_transfer.nixl.agent import region_of
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.peers import Peers
from kv_transfer.reads.sink import TransferSink
from kv_transfer.starts.hand_over import HandOver, Inheritance
from kv_transfer.starts.neighbour_store import NeighbourStore
from kv_transfer.starts.start_lender import StartLender
from kv_transfer.starts.start_reader import StartReader, make_buffers
from wire.messages.neighbours import BorrowReply, BorrowStart, OfferReply, OfferStart
from wire.rpc import BORROW_START, OFFER_START, unary_handler

_DIGESTED_BYTES = {"off": 0.0, "quick": float(QUICK_BYTES), "all": float("inf")}
"""Most bytes of a start that is digested, for each ``verify_handoffs``."""


class RegisteredStarts:
    """Host memory that is registered with NIXL, for others and for own reads. Made before any peer gets this
    server's metadata."""

    def __init__(
        self,
        store: NeighbourStore,
        form: StartForm,
        engine: Engine,
        thread: TransferThread,
        config: EngineServerConfig,
    ) -> None:
        self.store = store
        self.form = form
        self.engine = engine
        self.digested_bytes = _DIGESTED_BYTES[config.verify_handoffs]
        thread.agent.register(engine.host_pages.tensor)
        self.buffers = make_buffers(thread, form, compares=self.digested_bytes > 0)
        self.max_loans = MAX_LOANS

    @classmethod
    def of(
        cls,
        store: NeighbourStore | None,
        engine: object,
        thread: TransferThread,
        config: EngineServerConfig,
    ) -> RegisteredStarts | None:
        """Returns None for a server that has no host memory, or several ranks."""
        if store is None or store.form is None or not isinstance(engine, Engine):
            return None
        return cls(store, store.form, engine, thread, config)


class SharedStarts:
    """Lends, reads, takes over and hands over starts. Made on the event loop."""

    def __init__(
        self,
        registered: RegisteredStarts,
        host: EngineHost,
        thread: TransferThread,
        source: TransferSource,
        sink: TransferSink,
        peers: Peers,
        *,
        address: str,
        incarnation: str,
    ) -> None:
        engine, form = registered.engine, registered.form
        self._lender = StartLender(
            *(host, engine, source, form, region_of(engine.host_pages.tensor)),
            incarnation=incarnation,
            digested_bytes=registered.digested_bytes,
        )
        self._reader = StartReader(registered.store, thread, sink, peers, form, registered.buffers)
        registered.store.start(self._reader, host.answer, lambda: host.post(lambda: None))
        self._inheritance = Inheritance(host, engine)
        self._hand_over = HandOver(host, engine, peers, address=address, incarnation=incarnation)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Returns the handlers of the calls by which servers share starts, by method name."""

        async def borrow(message: BorrowStart, _context: Any) -> BorrowReply:
            return await self._lender.borrow(message)

        async def offer(message: OfferStart, _context: Any) -> OfferReply:
            if self._hand_over.is_under_way:  # this server leaves too
                return OfferReply(False, may_offer_more=False)
            return await self._inheritance.offered(message)

        return {
            BORROW_START.name: unary_handler(BORROW_START, borrow),
            OFFER_START.name: unary_handler(OFFER_START, offer),
        }

    def loan_ended(self, lease: EndedLease) -> None:
        """Called on the transfer thread."""
        self._lender.ended(lease)

    def hand_over(self, heirs: Sequence[str]) -> None:
        """Begins to hand this server's most valuable starts to the servers at these addresses."""
        self._hand_over.begin(heirs)

    @property
    def is_handing_over(self) -> bool:
        return self._hand_over.is_under_way

    async def keep(self) -> None:
        """Hands over nothing more: this server stays."""
        await self._hand_over.end()

    async def close(self) -> None:
        await self._hand_over.end()
        await self._reader.close()
