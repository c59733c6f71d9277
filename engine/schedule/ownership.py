"""Ownership of rows, blocks, slots and prefix-cache entries by requests.

Only this module gives them to requests and takes them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.files.file_choices import LookUp
from engine.files.file_tier import FileTier
from engine.memory.cached_start import HostBlock, Match, Place
from engine.memory.eviction import EvictionPolicy
from engine.memory.host_tier import HostTier
from engine.memory.index_pool import NULL_INDEX, IndexPool
from engine.request import Memory, Request, StateBoundary
from engine.row_kinds import PlannedRow
from engine.schedule.cache_modes import CacheMode
from engine.schedule.capacity import CapacityPlan
from engine.schedule.one_part_caches import make_prefix_cache
from engine.schedule.sessions import Sessions
from telemetry.engine_metrics import FileCacheFigures, HostCacheFigures, NeighbourCacheFigures
from wire.messages.ranks import FileNews


class Ownership:
    """Owns the pools and the prefix cache; gives requests memory and takes it back."""

    def __init__(
        self,
        plan: CapacityPlan,
        mode: CacheMode,
        *,
        max_num_seqs: int,
        num_positions: int = 1,
        fingerprint: str = "",
        policy: EvictionPolicy | None = None,
        tier: HostTier | None = None,
        files: FileTier | None = None,
    ) -> None:
        self.blocks = IndexPool(plan.num_blocks, "block")
        self.slots = IndexPool(plan.num_slots, "slot")
        self.cache = make_prefix_cache(plan, self.blocks, self.slots, fingerprint, policy, tier)
        self.files = files or FileTier(self.cache.tier)
        """Cached prefixes in files, behind host memory."""
        self._newcomers: dict[str, Request] = {}
        """Requests that have come since the last step; files may have their prompts."""
        self.sessions = Sessions(self.cache)
        self._mode = mode
        self._plan = plan
        self._num_slots = (1 if plan.replays else num_positions) if plan.has_state else 0
        """Slots that each request owns: one per position, or one if decode rows replay."""
        self._rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def tier_figures(self) -> tuple[HostCacheFigures, FileCacheFigures, NeighbourCacheFigures]:
        return self.cache.tier.figures, self.files.figures, self.files.neighbour_figures

    @property
    def free_rows(self) -> Sequence[int]:
        """Rows that nobody owns."""
        return self._rows

    # --- taking ----------------------------------------------------------------------------------

    def came(self, request: Request) -> None:
        """Notes a new request: before the next step its prompt is looked up in files and other servers."""
        if request.ticket is None:
            self._newcomers[request.request_id] = request

    def look_ups(self, *, has_neighbour: bool) -> Iterator[LookUp]:
        """Yields what the device has of the new requests' prompts; with ``has_neighbour``, only of those of
        which another server has something."""
        for name, request in self._newcomers.items():
            neighbour = request.neighbour
            if neighbour is not None:
                num_blocks = neighbour.num_tokens // self._plan.block_size
                lookup = LookUp(name, self._match(request), self._most_blocks(request))
                yield replace(lookup, address=neighbour.address, num_blocks=num_blocks)
            elif not has_neighbour:
                yield LookUp(name, self._match(request), self._most_blocks(request))

    def take_file_news(self, news: FileNews | None) -> None:
        """Takes what rank 0 has decided about files before the plan that is about to be made."""
        self.files.take_news(news)
        for read in () if news is None else news.reads:
            request = self._newcomers[read.request_id]
            keys = self._match(request).keys[: read.num_blocks]
            request.fetch = self.files.fetch(read.number, keys, request.cache_salt, read.address)
            if request.fetch is None:
                self.files.figures_of(read.address).computed += 1
        self._newcomers.clear()

    def _most_blocks(self, request: Request) -> int:
        """Returns the most blocks that a start may have which comes from another tier.

        It leaves a token to compute, also of a prompt that is only prefilled. Otherwise that prompt could be
        read by another server while a rank's copies to the device are still under way.
        """
        return (request.target - 1) // self._plan.block_size

    def admit(self, request: Request, *, spare_blocks: int) -> bool:
        """Gives a waiting request a row, slots, cached blocks and new blocks for its prompt, or gives
        nothing.

        ``spare_blocks`` blocks have to remain available for the requests that run already. Returns whether
        there was room.
        """
        found = self._match(request)
        match = self._promote(request, found, spare_blocks)
        if match is None:
            if not self._take(request, found, spare_blocks):
                return False
            match = found
        if self._mode.caches:
            request.marks = self._mode.mark(request, match, self._plan.block_size)
        if request.ticket is None:
            if match is found:
                self.cache.used(found)
            self.cache.resumed(match, request.session)
            if match.state is not None:
                self.sessions.note(request.session, match.nodes[-1].key)
            self._start_behind(request, match)
        return True

    def _take(self, request: Request, match: Match, spare_blocks: int) -> bool:
        """Gives a request what the device has cached, and all other memory that it needs, or gives
        nothing."""
        self._hold(match)
        cached = self.cache.blocks_of(match.nodes)
        num_new = self._plan.blocks_for(request.target) - len(cached)
        if not self._has_room(num_new + spare_blocks):
            self._let_go(match)
            return False
        self._give(request, num_new, cached)
        request.memory.nodes = match.nodes
        if match.state is not None:
            request.memory.read_state, request.memory.read_slot = match.state, match.state.slot
        return True

    def _promote(self, request: Request, found: Match, spare_blocks: int) -> Match | None:
        """Lets a request go on from a start in host memory, if there is a better one than the device has.

        What the device lacks of it gets new blocks and a slot. They enter the prefix cache at once: the plan
        lists their copies, which are made before any step reads them. Returns what is cached on the device
        then; None: nothing was given.
        """
        start = self._start_in_host(request, found)
        if start is None:
            return None
        cache, on_device = self.cache, [*found.nodes, *found.beyond]
        nodes, beyond = on_device[: start.num_blocks], on_device[start.num_blocks :]
        cache.hold(nodes)
        held, num_held = cache.blocks_of(nodes), len(nodes)
        num_new = self._plan.blocks_for(request.target) - len(held)
        if not self._has_room(num_new + spare_blocks, num_more_slots=int(self._plan.has_state)):
            cache.release(reversed(nodes))
            return None
        cache.tier.hold(start)
        self._give(request, num_new, held)
        slot = cache.allocate_slot() if self._plan.has_state else NULL_INDEX
        cache.used(found)  # before the start is kept again: policies learn that it was missed
        memory = request.memory
        cache.extend(nodes, found.keys, start.num_blocks, memory.block_ids, request.cache_salt)
        memory.nodes = nodes
        state = None
        if self._plan.has_state:
            state = cache.put_state(nodes[-1], slot, start.place, start.session)
            memory.read_state, memory.read_slot = state, slot
        num_saved = (start.num_blocks - len(found.nodes)) * self._plan.block_size
        request.measured.num_promoted = num_saved
        block_ids = memory.block_ids[num_held : start.num_blocks]
        cache.tier.promote(start, block_ids, slot, num_saved, request.request_id)
        return Match(nodes, state, beyond, found.keys)

    def _start_in_host(self, request: Request, found: Match) -> HostBlock | None:
        """Returns the start in host memory from which a request should go on."""
        if request.ticket is not None:
            return None
        return self.cache.tier.find(found, self._most_blocks(request))

    def _start_behind(self, request: Request, match: Match) -> None:
        """Lets the request start after its cached prefix, which need not be computed."""
        request.num_computed = request.measured.num_cached = len(match.nodes) * self._plan.block_size
        request.num_planned = request.num_computed

    def fork(self, request: Request, source: Request, *, spare_blocks: int) -> bool:
        """Gives a request a row, slots and blocks to continue behind the tokens that ``source`` has computed,
        or gives nothing.

        Both share the source's full blocks. Returns whether there was room.
        """
        memory = source.memory
        if self._plan.has_kv and not self._mode.caches:
            # The nodes count the users of shared blocks. No request looks up this salt.
            self._extend(source, f"forks of {source.request_id}")
        shared = self.cache.blocks_of(memory.nodes)
        num_new = self._plan.blocks_for(request.target) - len(shared)
        if not self._has_room(num_new + spare_blocks):
            return False
        self.cache.hold(memory.nodes)
        self._give(request, num_new, shared)
        request.memory.nodes = list(memory.nodes)
        request.block_keys = list(source.block_keys)
        return True

    def readmit(self, request: Request, *, spare_blocks: int) -> bool:
        """Gives a preempted request a row, slots and blocks for all its tokens so far, or gives nothing.

        Returns whether there was room.
        """
        num_blocks = self._plan.blocks_for(request.target)
        if not self._has_room(num_blocks + spare_blocks):
            return False
        self._give(request, num_blocks)
        return True

    def _has_room(self, num_blocks: int, num_more_slots: int = 0) -> bool:
        """Whether a row, slots and ``num_blocks`` blocks are available for one more request.

        ``num_more_slots``: slots besides those for its positions.
        """
        has_slots = self.cache.num_available_slots >= self._num_slots + num_more_slots
        return bool(self._rows) and has_slots and self.cache.num_available_blocks >= num_blocks

    def _give(self, request: Request, num_blocks: int, cached: Sequence[int] = ()) -> None:
        """Gives a row, slots, and ``num_blocks`` new blocks after the ``cached`` ones."""
        last = cached[-1] if cached else NULL_INDEX
        blocks = [*cached, *self.cache.allocate_blocks(num_blocks, last)]
        request.row = self._rows.pop()
        request.memory = Memory(blocks, slots=[self.cache.allocate_slot() for _ in range(self._num_slots)])

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Returns the number of blocks that a request lacks to hold ``num_tokens`` tokens."""
        return max(0, self._plan.blocks_for(num_tokens) - len(request.memory.block_ids))

    def grow(self, request: Request, num_tokens: int) -> None:
        """Adds the blocks that the request lacks to hold ``num_tokens`` tokens. The caller has made room."""
        block_ids = request.memory.block_ids
        last = block_ids[-1] if block_ids else NULL_INDEX
        block_ids += self.cache.allocate_blocks(self.num_missing_blocks(request, num_tokens), last)

    def take_boundaries(self, request: Request, start: int, end: int) -> tuple[StateBoundary, ...]:
        """Takes slots for a chunk's boundary states, including the state at the chunk's end if it is kept.

        If fewer slots are available than needed, the last boundaries are left out.
        """
        lengths = self._mode.inner_boundaries(request, start, end)
        if self._mode.keeps(request, end):
            lengths.append(end)
        fitting = lengths[: self.cache.num_available_slots]
        return tuple(StateBoundary(length, self.cache.allocate_slot()) for length in fitting)

    def decode_boundary(
        self, request: Request, most_computed: int, num_new: int
    ) -> tuple[StateBoundary, ...]:
        """Returns the boundary that a decode row may pass in this step, if there is one and a slot for it.

        ``most_computed`` is the maximum number of tokens computed before the step, ``num_new`` the maximum in
        the step. The slot is written when the row passes the boundary, in this step or in a later one. A
        rejected draft leaves a wrong state in the slot; the next step that passes the boundary overwrites it.
        """
        memory = request.memory
        if memory.boundary is None:
            length = self._mode.next_kept(request, most_computed)
            within_reach = length is not None and length <= most_computed + num_new
            if length is not None and within_reach and self.cache.num_available_slots:
                memory.boundary = StateBoundary(length, self.cache.allocate_slot())
        return () if memory.boundary is None else (memory.boundary,)

    # --- after a step ----------------------------------------------------------------------------

    def computed(self, row: PlannedRow, num_accepted: int, newest: int) -> None:
        """Notes that a row was computed: full blocks and boundary states enter the prefix cache.

        ``num_accepted`` positions of a decode row hold accepted tokens, ``newest`` of them of the last step;
        a prefill row has computed all its tokens.
        """
        request, memory = row.request, row.request.memory
        if memory.read_slot != NULL_INDEX:
            self._release_read_state(memory)
        is_decode = row.is_decode
        request.num_computed += num_accepted if is_decode else row.num_new
        memory.state_index = newest - 1 if is_decode else 0
        if not self._mode.caches:
            return
        if request.num_computed // self._plan.block_size > len(memory.nodes):
            self.enter(request)
        for boundary in row.boundaries:
            # A decode row may have passed the boundary already in the previous step: that step was still in
            # flight when this step was launched.
            is_ahead = not is_decode or boundary is memory.boundary
            if is_ahead and boundary.length <= request.num_computed:
                # Where rows replay, a decode row starts from its own slot and not from the boundary's.
                is_newest = boundary.length == request.num_computed
                self._put(request, boundary, next_read=is_newest and not (is_decode and self._plan.replays))

    def quiet_until(self, request: Request) -> int:
        """Computes :attr:`Request.quiet_until` of a request whose next rows decode its answer."""
        memory, params = request.memory, request.params
        if memory.read_slot != NULL_INDEX or request.follower is not None:
            return -1
        if params is None or params.logprobs is not None:
            return -1
        until = request.max_total_tokens - 1
        if not self._mode.caches:
            return until
        return min(until, (len(memory.nodes) + 1) * self._plan.block_size - 1)

    def enter(self, request: Request) -> None:
        """Enters a request's full blocks into the prefix cache."""
        if self._mode.caches:
            self._extend(request, request.cache_salt)

    def _extend(self, request: Request, salt: str) -> None:
        memory, keys = request.memory, request.block_keys
        self.cache.lengthen_keys(keys, request.tokens, request.num_computed, salt)
        num_blocks = request.num_computed // self._plan.block_size
        self.cache.extend(memory.nodes, keys, num_blocks, memory.block_ids, request.cache_salt)

    def give_up(self, row: PlannedRow) -> None:
        """Takes back the slots of a prefill row's boundaries, because no step will fill them with valid
        states."""
        if not row.is_decode:
            self.slots.free([boundary.slot for boundary in row.boundaries])

    def _put(self, request: Request, boundary: StateBoundary, *, next_read: bool) -> None:
        """Gives the cache a state that a step wrote, unless the cache has a state there already.

        ``next_read``: the next step reads the state, no matter whether cache or request owns the slot.
        """
        memory = request.memory
        if boundary is memory.boundary:
            memory.boundary = None
        num_blocks = boundary.length // self._plan.block_size
        place = self._place(request, boundary.length)
        node, session = memory.nodes[num_blocks - 1], "" if place == Place.BRANCH else request.session
        state = self.cache.put_state(node, boundary.slot, place, session)
        self.sessions.note(request.session, node.key)
        if next_read:
            memory.read_state, memory.read_slot = state, boundary.slot
        elif state is None:
            self.slots.free([boundary.slot])
        else:
            self.cache.release_state(state)

    def _place(self, request: Request, length: int) -> Place:
        marked = request.marks.get(length)
        if marked is not None or length >= request.num_given:
            return Place.INNER if marked is None else marked
        block_size = self._plan.block_size
        return Place.before_end((request.num_given - 1) // block_size - length // block_size)

    # --- giving back -----------------------------------------------------------------------------

    def free_row(self, request: Request) -> None:
        if request.row >= 0:
            self._rows.append(request.row)
            request.row = -1

    def keep_state_alone(self, request: Request) -> None:
        """Frees all slots of a request that computes no more, except the slot with its newest state."""
        memory = request.memory
        newest = memory.state_slot
        kept = [] if newest == NULL_INDEX or memory.read_state is not None else [newest]
        own = [*memory.slots, *([memory.read_slot] if memory.read_slot else [])]
        if memory.boundary is not None:
            own.append(memory.boundary.slot)
            memory.boundary = None
        cached = memory.read_state.slot if memory.read_state is not None else NULL_INDEX
        self.slots.free([slot for slot in own if slot not in (*kept, cached)])
        memory.slots, memory.state_index = kept, 0
        if memory.read_state is None:
            memory.read_slot = NULL_INDEX

    def free_memory(self, request: Request) -> None:
        """Frees the request's own blocks and slots. Blocks of the prefix cache stay in the cache."""
        if request.lender is not None:
            request.lender.revoke(request)
        memory = request.memory
        self._release_read_state(memory)
        self.blocks.free(memory.own_blocks)
        self.cache.release(reversed(memory.nodes))
        self.slots.free(memory.slots)
        if memory.boundary is not None:
            self.slots.free([memory.boundary.slot])
        request.memory = Memory()

    def _match(self, request: Request) -> Match:
        """Returns the cached prefix of the tokens before the last one.

        With a ticket a cached state is not needed: the state comes from another server.
        """
        if not self._mode.caches or request.prompt_logprobs_wanted is not None:
            return Match()
        ticket, keys = request.ticket, request.block_keys
        num_tokens = request.num_given - 1 if ticket is None else ticket.num_tokens
        self.cache.lengthen_keys(keys, request.tokens, num_tokens, request.cache_salt)
        return self.cache.match(keys, needs_state=ticket is None)

    def _hold(self, match: Match) -> None:
        self.cache.hold(match.nodes)
        if match.state is not None:
            self.cache.hold_state(match.state)

    def _let_go(self, match: Match) -> None:
        if match.state is not None:
            self.cache.release_state(match.state)
        self.cache.release(reversed(match.nodes))

    def _release_read_state(self, memory: Memory) -> None:
        if memory.read_state is not None:
            self.cache.release_state(memory.read_state)
        elif memory.read_slot != NULL_INDEX:
            self.slots.free([memory.read_slot])
        memory.read_state, memory.read_slot = None, NULL_INDEX
