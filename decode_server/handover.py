"""Letting a decode server's requests go on at others: when an operator drains it, and when it stops."""

from __future__ import annotations

from collections.abc import Iterable

from engine.host import EngineHost
from engine.request import Request
from kv_transfer.exchange import StateExchange


class Handover:
    """Knows which requests were let go with a lease on their state that has not ended yet."""

    def __init__(self, host: EngineHost, exchange: StateExchange) -> None:
        self._host = host
        self._exchange = exchange
        self._moved: set[str] = set()  # the engine's thread alone

    async def let_go(self) -> None:
        """Every request that the engine has ends as ``moved``; what is told of it says where it can go on."""
        await self._host.ask(self._move_all)

    def _move_all(self) -> None:
        self._host.engine.move_all()
        # From here, so that it comes before a prompt is followed whose request arrives now.
        self._host.answer(self._exchange.stop_following)

    def kept(self, requests: Iterable[Request]) -> None:
        """Of a step's result; on the engine's thread."""
        self._moved.update(one.request_id for one in requests if one.finish_reason == "moved")

    async def is_being_read(self) -> bool:
        """Whether anything is held for a server that is to go on with it."""
        return await self._host.ask(self._is_being_read)

    def _is_being_read(self) -> bool:
        self._moved = {request_id for request_id in self._moved if self._exchange.holds(request_id)}
        return bool(self._moved)
