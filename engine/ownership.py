"""What requests own: rows, blocks, slots and their share of the prefix cache. Only this module moves them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache_modes import CacheMode
from engine.capacity import CapacityPlan, blocks_for
from engine.index_pool import NULL_INDEX, IndexPool
from engine.prefix_cache import Match, PrefixCache
from engine.request import Request
from engine.rows import PlannedRow, StateBoundary


class Ownership:
    """Gives requests memory and takes it back; the pools and the prefix cache belong to it."""

    def __init__(self, plan: CapacityPlan, mode: CacheMode, *, max_num_seqs: int, fingerprint: str) -> None:
        self.blocks = IndexPool(plan.num_blocks, "block")
        self.slots = IndexPool(plan.num_slots, "slot")
        self.cache = PrefixCache(self.blocks, self.slots, block_size=plan.block_size, fingerprint=fingerprint)
        self._mode = mode
        self._block_size = plan.block_size
        self._rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._rows)

    @property
    def free_rows(self) -> Sequence[int]:
        """Rows that nobody owns."""
        return self._rows

    # --- taking ----------------------------------------------------------------------------------

    def admit(self, request: Request, *, spare_blocks: int) -> bool:
        """Gives a waiting request a row, a slot, cached blocks and new ones for its prompt, or nothing.

        ``spare_blocks`` have to remain available for those that run already.
        """
        match = self._match(request)
        self._hold(match)
        num_new = blocks_for(request.target, self._block_size) - len(match.nodes)
        if (
            not self._rows
            or self.cache.num_available_slots < 1
            or self.cache.num_available_blocks < num_new + spare_blocks
        ):
            self._let_go(match)
            return False
        request.row = self._rows.pop()
        request.nodes = match.nodes
        request.block_ids = [node.block_id for node in match.nodes] + self.cache.allocate_blocks(num_new)
        request.slot = self.cache.allocate_slot()
        request.read_state = match.state
        if match.state is not None:
            request.num_computed = request.num_cached = len(match.nodes) * self._block_size
        if request.ticket is None and match.num_matched_blocks > len(match.nodes):
            request.branch = match.num_matched_blocks * self._block_size
        return True

    def readmit(self, request: Request, *, spare_blocks: int) -> bool:
        """Gives a preempted request a row, a slot and the blocks of all its tokens so far, or nothing."""
        num_blocks = blocks_for(request.target, self._block_size)
        if (
            not self._rows
            or self.cache.num_available_slots < 1
            or self.cache.num_available_blocks < num_blocks + spare_blocks
        ):
            return False
        request.row = self._rows.pop()
        request.block_ids = self.cache.allocate_blocks(num_blocks)
        request.slot = self.cache.allocate_slot()
        return True

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request lacks to hold ``num_tokens`` tokens."""
        return max(0, blocks_for(num_tokens, self._block_size) - len(request.block_ids))

    def grow(self, request: Request, num_tokens: int) -> None:
        """Adds the blocks it lacks to hold ``num_tokens`` tokens; the caller has made room."""
        request.block_ids += self.cache.allocate_blocks(self.num_missing_blocks(request, num_tokens))

    def take_boundaries(self, request: Request, start: int, end: int) -> tuple[StateBoundary, ...]:
        """Slots for the states inside a chunk that are to be kept, as far as there is room for them."""
        lengths = self._mode.inner_boundaries(request, start, end)
        fitting = lengths[: self.cache.num_available_slots]
        return tuple(StateBoundary(length, self.cache.allocate_slot()) for length in fitting)

    # --- after a step ----------------------------------------------------------------------------

    def computed(self, row: PlannedRow) -> None:
        """Takes note of a computed row: full blocks and wanted states enter the prefix cache."""
        request = row.request
        request.num_computed += row.num_new
        self._release_read_state(request)
        if not self._mode.caches:
            return
        self.enter(request)
        for boundary in row.boundaries:
            self._put(request, boundary.length, boundary.slot)
        if self._mode.keeps(request, request.num_computed) and self.cache.num_available_slots:
            self._donate(request)

    def enter(self, request: Request) -> None:
        """Enters a request's full blocks into the prefix cache."""
        if self._mode.caches:
            self.cache.extend(
                request.nodes, request.tokens, request.num_computed, request.block_ids, request.cache_salt
            )

    def give_up(self, row: PlannedRow) -> None:
        """Takes back what a planned row was given for its boundaries: it will not be computed."""
        self.slots.free([boundary.slot for boundary in row.boundaries])

    def _put(self, request: Request, length: int, slot: int) -> None:
        """A state written by the scan: the cache's, if it has none there yet."""
        state = self.cache.put_state(request.nodes[length // self._block_size - 1], slot)
        if state is None:
            self.slots.free([slot])
        else:
            self.cache.release_state(state)

    def _donate(self, request: Request) -> None:
        """The newest state becomes the cache's; the next step reads it there and writes to a fresh slot."""
        node = request.nodes[request.num_computed // self._block_size - 1]
        if node.state is None:
            fresh = self.cache.allocate_slot()
            request.read_state = self.cache.put_state(node, request.slot)
            request.slot = fresh

    # --- giving back -----------------------------------------------------------------------------

    def free_row(self, request: Request) -> None:
        if request.row >= 0:
            self._rows.append(request.row)
            request.row = -1

    def keep_one_slot(self, request: Request) -> None:
        """For a request that computes no more: where its state is the cache's, its own slot is free again."""
        if request.read_state is not None:
            self.slots.free([request.slot])
            request.slot = NULL_INDEX

    def free_memory(self, request: Request) -> None:
        """Blocks that are the cache's stay there; all others, and the slot, are free again."""
        self._release_read_state(request)
        nodes = request.nodes
        own = [
            block_id
            for i, block_id in enumerate(request.block_ids)
            if i >= len(nodes) or nodes[i].block_id != block_id
        ]
        self.blocks.free(own)
        self.cache.release(reversed(nodes))
        request.block_ids, request.nodes = [], []
        if request.slot != NULL_INDEX:
            self.slots.free([request.slot])
            request.slot = NULL_INDEX

    def _match(self, request: Request) -> Match:
        """What is cached of the tokens before the last; with a ticket the state comes from elsewhere."""
        if not self._mode.caches or request.prompt_logprobs_wanted is not None:
            return Match()
        return self.cache.match(
            request.tokens,
            request.num_prompt - 1 if request.ticket is None else request.ticket.num_tokens,
            request.cache_salt,
            needs_state=request.ticket is None,
        )

    def _hold(self, match: Match) -> None:
        self.cache.hold(match.nodes)
        if match.state is not None:
            self.cache.hold_state(match.state)

    def _let_go(self, match: Match) -> None:
        if match.state is not None:
            self.cache.release_state(match.state)
        self.cache.release(reversed(match.nodes))

    def _release_read_state(self, request: Request) -> None:
        if request.read_state is not None:
            self.cache.release_state(request.read_state)
            request.read_state = None
