"""Decides on the host who is admitted and what each step computes. No tensors, no clocks, no I/O.

Requests are admitted first come, first served. Admission takes a row, a state slot and all blocks that
the request can ever need, so that an admitted request always runs to its end. Each step then gives one
token to every decoding request and what is left of the token budget to prompts, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.capacity import CapacityPlan, blocks_for
from engine.index_pool import IndexPool
from engine.request import Request
from engine.rows import PlannedRow
from wire.errors import ContextLengthError, InvalidRequestError


@dataclass(frozen=True)
class StepPlan:
    """What one step does; either part may be empty."""

    decode_rows: list[PlannedRow]
    prefill_rows: list[PlannedRow]
    admitted: list[Request] = field(default_factory=list)
    """Requests that own a row, blocks and a slot since this step."""

    @property
    def rows(self) -> list[PlannedRow]:
        """Decode rows stand before prefill rows."""
        return self.decode_rows + self.prefill_rows

    @property
    def to_transfer(self) -> list[Request]:
        """Admitted requests whose blocks and slot wait to be filled from a prefill server."""
        return [request for request in self.admitted if request.ticket is not None]

    @property
    def is_empty(self) -> bool:
        return not self.decode_rows and not self.prefill_rows


class Scheduler:
    """Owns the queues and, through the pools, every block and slot of every request.

    A request is in exactly one place: ``waiting`` → [``transferring`` →] ``running`` → gone, or
    ``held`` (prefilled; its blocks and slot are leased) or ``quarantined`` (gone, but late bytes of its
    transfer may still land) → gone.
    """

    def __init__(self, plan: CapacityPlan, *, max_num_seqs: int, max_batch_tokens: int) -> None:
        self._capacity = plan
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self.blocks = IndexPool(plan.num_blocks, "block")
        self.slots = IndexPool(plan.num_slots, "slot")
        self._rows = list(range(max_num_seqs - 1, -1, -1))
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.transferring: dict[str, Request] = {}
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.held: dict[str, Request] = {}
        self.quarantined: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Queues a request. Raises :class:`InvalidRequestError` for one that can never be served."""
        if self._find(request.request_id) is not None:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; choose another")
        limit = self._capacity.max_model_len
        answer = 1 if request.params is None else request.params.max_tokens
        if request.num_prompt + answer > limit:
            raise ContextLengthError(
                f"the prompt's {request.num_prompt} tokens and an answer of up to {answer} exceed the "
                f"context of {limit} tokens; shorten the prompt or lower max_tokens"
            )
        self.waiting[request.request_id] = request

    def schedule(self) -> StepPlan:
        """Admits what fits and plans the next step."""
        admitted = self._admit()
        budget = self._max_batch_tokens
        decode_rows: list[PlannedRow] = []
        prefill_rows: list[PlannedRow] = []
        chunked: list[Request] = []
        for request in self.running.values():
            if request.target - request.num_computed == 1 and request.num_computed > 0:
                decode_rows.append(PlannedRow(request, request.num_computed, 1))
                budget -= 1
            else:
                chunked.append(request)
        for request in chunked:
            num_new = min(request.target - request.num_computed, budget)
            if num_new == 0:
                break
            row = PlannedRow(request, request.num_computed, num_new)
            (decode_rows if row.is_decode else prefill_rows).append(row)
            budget -= num_new
        return StepPlan(decode_rows, prefill_rows, admitted)

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        while self.waiting and self._rows and self.slots.num_free:
            request = next(iter(self.waiting.values()))
            num_blocks = blocks_for(request.max_total_tokens, self._capacity.block_size)
            if num_blocks > self.blocks.num_free:
                break
            del self.waiting[request.request_id]
            request.row = self._rows.pop()
            request.block_ids = self.blocks.allocate(num_blocks)
            request.slot = self.slots.allocate(1)[0]
            if request.ticket is None:
                self.running[request.request_id] = request
            else:
                self.transferring[request.request_id] = request
            admitted.append(request)
        return admitted

    def transferred(self, request: Request, num_tokens: int) -> None:
        """The handed over blocks and h(num_tokens) have landed: the request runs from the next step on."""
        del self.transferring[request.request_id]
        request.num_computed = num_tokens
        self.running[request.request_id] = request

    def hold(self, request: Request) -> None:
        """The prompt is prefilled: its row is free again, its blocks and slot stay until released."""
        del self.running[request.request_id]
        self._free_row(request)
        self.held[request.request_id] = request

    def release(self, request_id: str) -> None:
        """Frees what a held request's lease kept, or a quarantined one's destination."""
        request = self.held.pop(request_id, None) or self.quarantined.pop(request_id, None)
        if request is not None:
            self._free_memory(request)

    def finish(self, request: Request) -> None:
        """The request leaves, whatever queue it is in; everything it owns is free again."""
        for queue in (self.waiting, self.transferring, self.running):
            if queue.pop(request.request_id, None) is not None:
                break
        self._free_row(request)
        self._free_memory(request)

    def quarantine(self, request: Request) -> None:
        """The request leaves; its blocks and slot stay until :meth:`release`, since bytes may still land."""
        del self.transferring[request.request_id]
        self._free_row(request)
        self.quarantined[request.request_id] = request

    def find_active(self, request_id: str) -> Request | None:
        """A request that has neither finished nor been prefilled."""
        for queue in (self.running, self.waiting, self.transferring):
            if request_id in queue:
                return queue[request_id]
        return None

    def _find(self, request_id: str) -> Request | None:
        return self.find_active(request_id) or self.held.get(request_id) or self.quarantined.get(request_id)

    def _free_row(self, request: Request) -> None:
        if request.row >= 0:
            self._rows.append(request.row)
            request.row = -1

    def _free_memory(self, request: Request) -> None:
        self.blocks.free(request.block_ids)
        request.block_ids = []
        if request.slot:
            self.slots.free([request.slot])
            request.slot = 0
