"""A simulated device for the scheduler's tests. It has no tensors: each slot and KV cell records which prefix
it holds.

Steps behave as on a real device: decode rows depend on the row tables that the previous step left on this
device, not on what the host knows. Drafts are right at random; everything after a rejected draft is junk.
Every use is checked, so an index that is stale, freed early or given out twice is found by its wrong content.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from testing.lives.file_side import reservations, writing
from wire.messages.prefixes import following_keys, root_key

JUNK = "junk"
SALTS = ("", "x")
"""The cache salts that requests have."""


@lru_cache(maxsize=100_000)
def key_of(salt, prefix, block_size):
    """Return the key of the last block of a prefix."""
    before = root_key("", salt)
    if len(prefix) > block_size:
        before = key_of(salt, prefix[:-block_size], block_size)
    return following_keys(before, prefix[-block_size:], block_size)[0]


def answer_length(request):
    """Return the number of tokens until the answer ends, by length or by a stop token."""
    return 0 if request.params is None else min(request.params.max_tokens, request.stops_after or 99)


def truth(request):
    """Return all tokens of the finished request. Equal prompts have equal answers."""
    return request.tokens[: request.num_prompt] + [200 + i for i in range(answer_length(request))]


@dataclass
class DeviceRow:
    """The state of a decoding request between steps."""

    request: object
    length: int
    state_slot: int
    num_drafts: int = 0
    active: bool = True


@dataclass
class RowOutcome:
    """The result of one row of a step; accepted is 0 if the row had ended before."""

    accepted: int = 0
    is_finite: bool = True
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    state_slot: int = 0
    num_steps: int = 1
    newest: int = 0
    """Tokens accepted by the last step of a burst that accepted any; 0: all of them."""


def together(outcomes):
    """Return the outcome of one row in all steps of a burst."""
    if len(outcomes) == 1:
        return outcomes[0]
    gained = [one for one in outcomes if one.accepted]
    if not gained:
        return RowOutcome(num_steps=len(outcomes))
    last = gained[-1]
    return RowOutcome(
        sum(one.accepted for one in gained),
        all(one.is_finite for one in gained),
        [token for one in gained for token in one.tokens],
        *(last.length, last.state_slot),
        *(len(outcomes), last.accepted),
    )


@dataclass
class Flight:
    """A launched step, and what it may read and write until it is read back."""

    plan: object
    slots: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    outcomes: list[RowOutcome] = field(default_factory=list)


class ModelledDevice:
    """Pools, row tables and steps. ``luck`` decides how many drafts there are and how many of them are right.
    ``files`` lie behind host memory."""

    def __init__(self, owned, *, num_positions, block_size, luck, files=None):
        self.owned = owned
        self.files = files
        self.num_positions = num_positions
        self.block_size = block_size
        self.luck = luck
        self.has_state = owned.slots.capacity > 0
        self.has_kv = owned.blocks.capacity > 0
        self.slots = [None] * owned.slots.size
        self.blocks = [[None] * block_size for _ in range(owned.blocks.size)]
        self.rows = {}
        self.host = {}
        self.pages = {}
        """Contents of pages of host memory."""
        self.tags = {}
        """Contents of pages when the device gave them up, as the sanitizer remembers them."""
        self.flights = []
        self.freed_slots = set()
        self.freed_blocks = set()
        owned.slots.on_free(lambda slot: self._note_freed("slots", slot))
        owned.blocks.on_free(lambda block_id: self._note_freed("blocks", block_id))
        if files is not None:
            owned.cache.tier._pages.on_free(self._check_not_busy)

    def _note_freed(self, kind, index):
        for flight in self.flights:
            assert index not in getattr(flight, kind), f"{kind} {index}: freed while a step may still use it"
        getattr(self, f"freed_{kind}").add(index)

    def _check_not_busy(self, page):
        assert self.files is None or page not in self.files.busy, f"page {page}: files are at work there"

    # --- between steps ---------------------------------------------------------------------------

    def move(self, plan):
        """Apply the plan's changes: rows left and taken, blocks and states swapped; freed memory becomes
        junk."""
        for row in plan.left_rows:
            self.rows.pop(row, None)
        in_flight = {row.request.request_id for flight in self.flights for row in flight.plan.rows}
        for swap in plan.swap_out:
            assert swap.request_id not in in_flight, "what is in flight may still write what is moved"
            kept = [list(self.blocks[block_id]) for block_id in swap.block_ids]
            self.host[swap.request_id] = (kept, self.slots[swap.slot])
        for page in plan.file_jobs.landed_pages:
            self.tags.pop(page, None)
        for copy in plan.host_copies.demoted:
            self._demote(copy)
        for slot in self.freed_slots:
            self.slots[slot] = JUNK
        for block_id in self.freed_blocks:
            self.blocks[block_id] = [JUNK] * self.block_size
        self.freed_slots.clear()
        self.freed_blocks.clear()
        for fork in plan.forks:
            self._fork(fork)
        for copy in plan.host_copies.promoted:
            self._promote(copy)
        for request in plan.admitted:
            if request.row >= 0:
                self.begin(request)
        for swap in plan.swap_in:
            kept, state = self.host.pop(swap.request_id)
            for block_id, content in zip(swap.block_ids, kept, strict=True):
                self.blocks[block_id] = list(content)
            self._set_state(swap.slot, state)
        for job in plan.file_jobs.reads:
            self.files.read(job, self.pages)
        for job in plan.file_jobs.writes:
            self.files.write(job, self.pages)

    def _demote(self, copy):
        contents = [list(self.blocks[block_id]) for block_id in copy.block_ids]
        contents += [(part, self.slots[copy.slot]) for part in range(len(copy.state_pages))]
        for page, content in zip((*copy.block_pages, *copy.state_pages), contents, strict=True):
            self._check_not_busy(page)
            self.pages[page] = self.tags[page] = content

    def _promote(self, copy):
        """Copy back. What is overwritten belonged to nobody, or to the request that the start is for."""
        for page in (*copy.block_pages, *copy.state_pages):
            assert page not in self.tags or self.pages[page] == self.tags[page], "other bytes than it got"
        for block_id, page in zip(copy.block_ids, copy.block_pages, strict=True):
            assert not any(block_id in flight.blocks for flight in self.flights)
            self.blocks[block_id] = list(self.pages[page])
        if copy.state_pages:
            assert not any(copy.slot in flight.slots for flight in self.flights)
            self._set_state(copy.slot, self._state_in(copy.state_pages))

    def _state_in(self, pages):
        parts = [self.pages[page] for page in pages]
        assert [part for part, _ in parts] == list(range(len(pages)))
        assert len({content for _, content in parts}) == 1, "parts of several states"
        return parts[0][1]

    def _fork(self, fork):
        source = fork.source
        contents, state = (
            [list(self.blocks[block_id]) for block_id in source.block_ids],
            self.slots[source.slot],
        )
        for copy in fork.copies:
            last = contents[len(contents) - len(copy.block_ids) :]
            for block_id, content in zip(copy.block_ids, last, strict=True):
                self.blocks[block_id] = list(content)
            self._set_state(copy.slot, state)
        for name in fork.stored:
            self.host[name] = (contents, state)

    def begin(self, request):
        """Begin a request that got its row, or whose state has arrived."""
        before = self.rows.get(request.row)
        assert before is None or before.request is request, "the row was not cleared"
        assert request.num_in_flight == 0
        self.rows[request.row] = DeviceRow(request, request.num_computed, request.memory.state_slot)

    def receive(self, request, length):
        """Let a peer's bytes arrive, in any order relative to steps."""
        tokens = truth(request)
        for position in range(len(request.memory.nodes) * self.block_size, length):
            self._write(request.memory.block_ids, position, (position, tokens[position]))
        self._set_state(request.memory.state_slot, tuple(tokens[:length]))

    def receive_late(self, request):
        """Let bytes of an abandoned transfer arrive. No other request may use their memory yet."""
        for block_id in request.memory.block_ids[len(request.memory.nodes) :]:
            self.blocks[block_id] = ["late"] * self.block_size
        self._set_state(request.memory.state_slot, "late")

    def check(self, request, length, state_slot, block_ids=None):
        """Check that KV and state of the first ``length`` tokens are where the request will read them."""
        tokens = truth(request)
        block_ids = request.memory.block_ids if block_ids is None else block_ids
        for position in range(length if self.has_kv else 0):
            found = self.blocks[block_ids[position // self.block_size]][position % self.block_size]
            assert found == (position, tokens[position]), (request.request_id, position, found)
        if length and self.has_state:
            found = self.slots[state_slot]
            assert found == tuple(tokens[:length]), (request.request_id, length, state_slot, found)

    def check_cache(self):
        """Check that each cached block holds the tokens that follow its parent's tokens, and that each cached
        state is the state after its tokens."""
        prefixes = {None: ()}

        def prefix(node):
            if node not in prefixes:
                before = prefix(node.parent)
                cells = self.blocks[node.block_id]
                positions = [cell[0] for cell in cells]
                assert positions == list(range(len(before), len(before) + self.block_size)), cells
                prefixes[node] = before + tuple(cell[1] for cell in cells)
            return prefixes[node]

        for node in self.owned.cache._nodes.values():
            if self.has_kv:
                prefix(node)
            if node.state is not None:
                found = self.slots[node.state.slot]
                assert len(found) == node.num_blocks * self.block_size
                assert not self.has_kv or found == prefix(node), node.state.slot

    def check_host_owners(self):
        """Check that each page of host memory has one owner, and that each block there leads to a start."""
        tier = self.owned.cache.tier
        blocks = list(tier._blocks.values())
        reserved, being_written = reservations(self.owned), writing(self.owned)
        pages = [block.page for block in blocks if self.has_kv]
        pages += [page for block in blocks for page in block.state_pages]
        pages += [page for one in reserved for page in (*one.block_pages, *one.state_pages)]
        assert len(set(pages)) == len(pages) == tier._pages.capacity - tier._pages.num_free
        assert 0 not in pages
        starts = {*tier._starts, *tier._retained}
        assert len(starts) == len(tier._starts) + len(tier._retained)
        for block in blocks:
            assert tier._blocks[block.key] is block
            assert block.parent is None or tier._blocks.get(block.parent.key) is block.parent
            num_children = sum(one.parent is block for one in blocks)
            assert block.num_children == num_children + sum(one.known is block for one in reserved)
            assert block.num_children or block.is_start
            assert block.is_pinned == (block is being_written)
            assert block.is_start == (block in starts)
            assert bool(block.state_pages) == (block.is_start and self.has_state)
        assert all(tier._blocks[block.key] is block for block in starts)
        assert being_written is None or being_written in starts
        assert not tier._demoted
        assert not tier._promoted

    def check_host(self):
        """Check that each block in host memory holds the tokens that follow its parent's tokens, that each
        state there is the state after its tokens, and that keys are those of these tokens."""
        tier = self.owned.cache.tier
        prefixes = {None: ()}
        for block in sorted(tier._blocks.values(), key=lambda one: one.num_blocks):
            if self.has_kv:
                before = prefixes[block.parent]
                cells = self.pages[block.page]
                positions = [cell[0] for cell in cells]
                assert positions == list(range(len(before), len(before) + self.block_size)), cells
                prefixes[block] = before + tuple(cell[1] for cell in cells)
            if block.state_pages:
                found = self._state_in(block.state_pages)
                assert len(found) == block.num_blocks * self.block_size
                assert not self.has_kv or found == prefixes[block]
                prefixes[block] = found
            if block in prefixes:
                assert block.key in {key_of(salt, prefixes[block], self.block_size) for salt in SALTS}

    # --- a step ----------------------------------------------------------------------------------

    def launch(self, plan):
        """Run the whole step, from what the host knows now and what earlier steps left on this device."""
        flight = Flight(plan)
        uses = [self._uses(row) for row in plan.rows]
        self._check_apart(uses)
        for reads, writes in uses:
            flight.slots |= (reads[0] | writes[0]) - {0}
            flight.blocks |= (reads[1] | writes[1]) - {0}
        for row in plan.rows:
            flight.outcomes.append(self._run_decode(row) if row.is_decode else self._run_prefill(row))
        self.flights.append(flight)
        return flight

    def _uses(self, row):
        """Return the slots and blocks that the row reads, and those that it writes."""
        request, device = row.request, self.rows[row.request.row]
        assert device.request is request, "another request is in the row"
        if not device.active:
            assert self.flights, "a request that has ended is planned again"
            return (set(), set()), (set(), set())
        length, size = device.length, self.block_size
        if row.is_decode:
            last = min(length + 2 * self.num_positions - 2, request.max_total_tokens - 1)
            written = {slot for _, slot in self._decode_writes(row, length)}
        else:
            last = row.end - 1
            written = {row.write_slot, *(boundary.slot for boundary in row.boundaries)}
        has_room = not self.has_kv or len(request.memory.block_ids) > last // size or self._is_first(row)
        assert has_room, "no room for what may be right"
        blocks = set(request.memory.block_ids[length // size :])
        read = {device.state_slot} if length else set()
        if not self.has_state:
            assert read | written <= {0}, "a slot is named where there are none"
            read = written = set()
        return (read, set(request.memory.block_ids[: -(-length // size)])), (written, blocks)

    def _is_first(self, row):
        """Return whether the row has no drafts yet. Such a row needs no room for them."""
        device = self.rows[row.request.row]
        return device.num_drafts == 0 and len(row.request.memory.block_ids) * self.block_size > device.length

    def _decode_writes(self, row, length):
        """Return (tokens before the state, slot) for each position."""
        kept = {boundary.length: boundary.slot for boundary in row.boundaries}
        assert len(row.boundaries) <= 1
        slots = row.request.memory.slots if self.has_state else [0] * self.num_positions
        assert len(slots) == self.num_positions
        return [(length + i + 1, kept.get(length + i + 1, slot)) for i, slot in enumerate(slots)]

    def _check_apart(self, uses):
        """Check that no row writes memory that another row uses, that is cached, that nobody owns, or that is
        a null entry."""
        cache, owned = self.owned.cache, self.owned
        cached_slots = {state.slot for state in cache._states}
        cached_blocks = {node.block_id for node in cache._nodes.values()}
        for i, (_, (slots, blocks)) in enumerate(uses):
            assert not slots & cached_slots, "a cached state is overwritten"
            assert not blocks & cached_blocks, "a cached block is overwritten"
            assert not slots & {0}
            assert not any(owned.slots.free_map[slot] for slot in slots)
            assert not any(owned.blocks.free_map[block_id] for block_id in blocks)
            for j, (reads, writes) in enumerate(uses):
                if i != j:
                    assert not slots & (reads[0] | writes[0]), "a row overwrites another's state"
                    assert not blocks & (reads[1] | writes[1]), "a row overwrites another's KV"

    def _run_decode(self, row):
        request, device = row.request, self.rows[row.request.row]
        if not device.active:
            return RowOutcome()
        length, tokens = device.length, truth(request)
        ahead = sum(row.request is other.request for f in self.flights for other in f.plan.rows)
        assert row.num_before <= length <= row.num_before + ahead * (self.num_positions - 1)
        self.check(request, length, device.state_slot)
        most = 1 if row.next_token >= 0 else 1 + device.num_drafts
        accepted = min(self.luck.randint(1, most), len(tokens) - length - 1)
        is_finite = self._is_finite(row, length + accepted)
        writes = self._decode_writes(row, length)
        for i, (num_tokens, slot) in enumerate(writes):
            is_right = i < accepted and is_finite
            self._set_state(slot, tuple(tokens[:num_tokens]) if is_right else JUNK)
            position = length + i
            if not self.has_kv or position // self.block_size < len(request.memory.block_ids):
                content = (position, tokens[position]) if i < accepted else JUNK
                self._write(request.memory.block_ids, position, content)
            else:
                assert i >= accepted, "an accepted token's KV had no place"
        return self._move_on(row, device, length + accepted, writes[accepted - 1][1], accepted, is_finite)

    def _run_prefill(self, row):
        request, device = row.request, self.rows[row.request.row]
        assert device.active
        assert device.length == row.num_before
        tokens, end = truth(request), row.end
        if row.num_before:
            assert request.next_state_slot == device.state_slot
        self.check(request, row.num_before, request.next_state_slot)
        for position in range(row.num_before, end):
            self._write(request.memory.block_ids, position, (position, tokens[position]))
        for boundary in row.boundaries:
            assert row.num_before < boundary.length <= end
            self._set_state(boundary.slot, tuple(tokens[: boundary.length]))
        self._set_state(row.write_slot, tuple(tokens[:end]))
        return self._move_on(row, device, end, row.write_slot, 1, self._is_finite(row, end))

    def _set_state(self, slot, content):
        if self.has_state:
            self.slots[slot] = content
        else:
            assert slot == 0, "a slot is named where there are none"

    def _write(self, block_ids, position, content):
        if not self.has_kv:
            assert not block_ids, "a block is named where there are none"
            return
        self.blocks[block_ids[position // self.block_size]][position % self.block_size] = content

    def _is_finite(self, row, length):
        """Return whether the logits up to the position after ``length`` tokens are finite: some requests
        break."""
        request = row.request
        broken = request.num_prompt + request.breaks_after - 1
        return not (row.samples and request.breaks_after and length >= broken)

    def _move_on(self, row, device, length, state_slot, accepted, is_finite):
        """Set where the next step finds the row, and the drafts that it will try."""
        tokens = truth(row.request)
        known = length + 1
        gained = tokens[known - accepted : known]
        device.active = known < len(tokens) and is_finite
        device.length, device.state_slot, device.num_drafts = length, state_slot, 0
        if device.active and row.samples and row.request.params.speculate:
            limit = row.request.num_prompt + row.request.params.max_tokens
            device.num_drafts = self.luck.randint(0, max(0, min(self.num_positions - 1, limit - known - 1)))
        return RowOutcome(accepted, is_finite, gained, length, state_slot)
