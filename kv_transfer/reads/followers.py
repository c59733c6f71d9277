"""Reads prompts that other servers are still computing: one part for each progress message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kv_transfer.reads.failure_counts import cause_of
from kv_transfer.reads.lease_renewer import lease_of
from kv_transfer.reads.part_plan import PartPlan
from kv_transfer.reads.peers import Peers
from kv_transfer.reads.sink import SinkTransfer
from wire.errors import CancelledRequestError, TransferError, TwinfangError
from wire.messages.handoff import AnyTicket, Done, PartialTicket, Progress, Ticket

log = logging.getLogger(__name__)


class Followers:
    """One task for each lease that is followed. Used only on the event loop.

    ``on_ticket`` is called when a request's prompt is computed, before the last part is read.
    """

    def __init__(self, peers: Peers, on_ticket: Callable[[str, Ticket], None]) -> None:
        self._peers = peers
        self._on_ticket = on_ticket
        self._tasks: dict[tuple[str, int, int], tuple[asyncio.Task[None], SinkTransfer]] = {}

    def start(self, early: PartialTicket, plan: PartPlan, transfer: SinkTransfer) -> None:
        """Starts to follow a prompt. In any case, the transfer will be finished or failed."""
        key = lease_of(early)
        task = asyncio.create_task(self._follow(early, plan, transfer))
        self._tasks[key] = (task, transfer)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def stop(self, ticket: AnyTicket) -> None:
        """Stops following a prompt that is not wanted any more. Does nothing if it is not followed."""
        task, transfer = self._tasks.get(lease_of(ticket), (None, None))
        if task is not None and transfer is not None:
            task.cancel()
            transfer.fail(CancelledRequestError("the request is not wanted any more"))

    def stop_all(self) -> None:
        for task, transfer in list(self._tasks.values()):
            task.cancel()
            transfer.fail(CancelledRequestError("the server lets its requests go"))

    async def close(self) -> None:
        self.stop_all()
        await asyncio.gather(*(task for task, _ in self._tasks.values()), return_exceptions=True)

    async def _follow(self, early: PartialTicket, plan: PartPlan, transfer: SinkTransfer) -> None:
        try:
            async with aclosing(self._peers.follow(early)) as news:
                await self._read_along(news, plan, transfer)
        except TwinfangError as error:
            log.info("request %s: its prompt can't be followed: %s", early.request_id, error)
            message = f"the prefill server at {early.address} gave the prompt up: {error}"
            transfer.fail(TransferError(message, cause=cause_of(error)))
        except Exception as error:
            log.exception("request %s: following its prompt failed", early.request_id)
            transfer.fail(TransferError(f"following the prompt failed: {type(error).__name__}"))

    async def _read_along(
        self, news: AsyncGenerator[Progress | Ticket, None], plan: PartPlan, transfer: SinkTransfer
    ) -> None:
        async for message in news:
            if isinstance(message, Ticket):
                last = plan.last_part(message)
                self._on_ticket(transfer.request_id, message)
                transfer.finish(last, Done(message.lease_id, message.epoch))
                return
            part = plan.part(message)
            if part is not None:
                transfer.read_part(part)
        raise TransferError("the server's progress messages ended before the prompt was computed")
