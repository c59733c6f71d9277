"""The sanitizer's checks of states: which state each slot should hold, and whether its bytes are
still those that were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.memory.caches import Caches
from engine.memory.index_pool import IndexPool
from engine.request import Request
from engine.row_kinds import PlannedRow, decode_slots
from engine.sanitizer.checksum import Checksums
from engine.sanitizer.owner_check import check_slot_owners
from engine.sanitizer.poison import Poison
from engine.sanitizer.provenance import TRUSTED, PrefixDigest, SlotTag, SlotTags
from wire.errors import SanitizerError


@dataclass(frozen=True)
class StateAway:
    """Tag and checksums of a preempted request's state."""

    tag: SlotTag
    sums: torch.Tensor


class StateWatch(Protocol):
    """Checks of states, as :class:`engine.sanitizer.sanitizer.Sanitizer` calls them.

    Faults of one request are returned, structural faults are raised.
    """

    def spoil_freed(self) -> None:
        """Fills the slots that were freed since the last call with NaN."""

    def leave(self, slot: int, owner: str) -> StateAway | None:
        """Returns tag and checksums of a state that request ``owner`` is about to take out of the pool."""

    def come_back(self, slot: int, away: StateAway | None) -> None:
        """Takes tag and checksums of a state that was moved back. Its bytes are compared before it is
        read."""

    def trust(self, slot: int) -> None:
        """Takes a state from files as it is."""

    def expect_nothing(self, request: Request) -> None:
        """Raises if anything has been written to the slot that a transfer is to fill."""

    def landed(self, request: Request, num_tokens: int) -> None:
        """Tags the request's slot: h(num_tokens) was received."""

    def check_owners(self, rows: Sequence[PlannedRow]) -> None:
        """Raises if rows share slots that one of them writes."""

    def check(self, request: Request, num_tokens: int) -> SanitizerError | None:
        """Returns an error if the tag of the request's slot does not say h(num_tokens) of the request."""

    def check_bytes(self, requests: Sequence[Request]) -> dict[Request, SanitizerError]:
        """Returns an error for each request whose state's bytes are not those that were written."""

    def computed(self, ends: Sequence[tuple[PlannedRow, int]], num_positions: int) -> None:
        """Tags the slots of rows that were computed. ``ends`` has for each row the number of
        its request's tokens that are computed after the step."""


class NoStateWatch:
    """Watch for a model without recurrent layers, which has no states."""

    def spoil_freed(self) -> None:
        pass

    def leave(self, slot: int, owner: str) -> StateAway | None:
        return None

    def come_back(self, slot: int, away: StateAway | None) -> None:
        pass

    def trust(self, slot: int) -> None:
        pass

    def expect_nothing(self, request: Request) -> None:
        pass

    def landed(self, request: Request, num_tokens: int) -> None:
        pass

    def check_owners(self, rows: Sequence[PlannedRow]) -> None:
        pass

    def check(self, request: Request, num_tokens: int) -> SanitizerError | None:
        return None

    def check_bytes(self, requests: Sequence[Request]) -> dict[Request, SanitizerError]:
        return {}

    def computed(self, ends: Sequence[tuple[PlannedRow, int]], num_positions: int) -> None:
        pass


class SlotWatch:
    """Keeps one tag and one row of checksums per slot. ``prefix_of`` returns a request's running digest."""

    def __init__(
        self,
        caches: Caches,
        slots: IndexPool,
        checksums: Checksums,
        poison: Poison,
        prefix_of: Callable[[Request], PrefixDigest],
    ) -> None:
        self._tags = SlotTags(slots)
        self._checksums = checksums
        self._poison = poison
        self._prefix_of = prefix_of
        self._device = caches.state.device
        self._sums = torch.zeros(
            (caches.num_slots, checksums.num_chunks), dtype=torch.int64, device=self._device
        )

    # --- memory that changes hands ---------------------------------------------------------------

    def spoil_freed(self) -> None:
        freed = self._tags.epochs.take_freed()
        if freed:
            self._poison.slots(self._index(freed))

    def leave(self, slot: int, owner: str) -> StateAway | None:
        tag = self._tags.last(slot)
        assert tag is not None, "what is preempted or forked has been computed"
        return StateAway(replace(tag, writer=owner), self._sums[slot].clone())

    def come_back(self, slot: int, away: StateAway | None) -> None:
        assert away is not None
        self._tags.move(away.tag, slot)
        self._sums[slot] = away.sums

    def trust(self, slot: int) -> None:
        self._tags.trust(slot)
        self._sum([slot])

    def expect_nothing(self, request: Request) -> None:
        slot = request.memory.state_slot
        if self._tags.epochs.is_free[slot] or self._tags.current(slot) is not None:
            raise _error(
                request,
                f"slot {slot}",
                "an allocated slot with nothing written before the transfer",
                self._tags.describe(slot),
            )

    def landed(self, request: Request, num_tokens: int) -> None:
        slot, digest = request.memory.state_slot, self._prefix_of(request).at(request.tokens, num_tokens)
        self._tags.write(slot, request, digest, num_tokens)
        self._sum([slot])

    # --- a step ----------------------------------------------------------------------------------

    def check_owners(self, rows: Sequence[PlannedRow]) -> None:
        check_slot_owners(rows, self._tags)

    def check(self, request: Request, num_tokens: int) -> SanitizerError | None:
        slot = request.memory.state_slot
        tag = self._tags.current(slot)
        digest = self._prefix_of(request).at(request.tokens, num_tokens)
        if tag is not None and (
            tag.num_tokens == TRUSTED or (tag.digest, tag.num_tokens) == (digest, num_tokens)
        ):
            return None
        expected = f"h({num_tokens}), prefix {digest:016x}"
        error = _error(request, f"slot {slot}", expected, self._tags.describe(slot))
        if tag is None or tag.writer != request.request_id or request.memory.read_state is not None:
            raise error
        return error

    def check_bytes(self, requests: Sequence[Request]) -> dict[Request, SanitizerError]:
        """See :class:`StateWatch`. If all bytes are right, this waits for the device only once."""
        slots = self._index([request.memory.state_slot for request in requests])
        changed = self._checksums.states(slots) != self._sums[slots]
        faults: dict[Request, SanitizerError] = {}
        if not changed.any():
            return faults
        for i, chunk in changed.nonzero().tolist():
            request = requests[i]
            if request not in faults:
                slot, segment = request.memory.state_slot, self._checksums.segment_of(chunk)
                expected = f"{self._tags.describe(slot)} as it was written"
                error = _error(request, f"slot {slot}, {segment}", expected, "other bytes")
                if request.memory.read_state is not None:
                    raise error
                faults[request] = error
        return faults

    def computed(self, ends: Sequence[tuple[PlannedRow, int]], num_positions: int) -> None:
        self._sum([slot for row, end in ends for slot in self._tag(row, end, num_positions)])

    def _tag(self, row: PlannedRow, end: int, num_positions: int) -> list[int]:
        """Tags the slots that a row wrote, and returns the slots with valid states, up to h(end).

        Slots with states after rejected drafts are tagged as not readable.
        """
        request = row.request
        if row.is_decode:
            states = list(enumerate(decode_slots(row, num_positions), row.num_before + 1))
        else:
            states = [(b.length, b.slot) for b in row.boundaries if b.length < end] + [(end, row.write_slot)]
        prefix, written = self._prefix_of(request), []
        for length, slot in states:
            if length <= end:
                self._tags.write(slot, request, prefix.at(request.tokens, length), length)
                written.append(slot)
            else:
                self._tags.spoil(slot, request)
        return written

    def _sum(self, slots: list[int]) -> None:
        index = self._index(slots)
        self._sums[index] = self._checksums.states(index)

    def _index(self, slots: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(slots), dtype=torch.int64, device=self._device)


def _error(request: Request, where: str, expected: str, found: str) -> SanitizerError:
    return SanitizerError(f"request {request.request_id!r}: {where}: expected {expected}; found {found}")
