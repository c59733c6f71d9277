"""KV blocks and Mamba states of earlier requests that can serve later ones. It uses no tensors.

The cache is a tree. Each node is a full KV block. Its key is a hash chained over all tokens up to the block's
end, the cache salt and the model. A node may have the Mamba state at its end. A recurrent layer can't start
from KV alone, so a prefix can be used only up to a node with a state. For a request whose state another
server hands over, only KV is matched. Models with only KV or only states use
:mod:`engine.schedule.one_part_caches`.

Requests hold the nodes that they use. A request that holds a child also holds its parent, so nodes that no
request holds can always be evicted leaf by leaf. Leaves without a state go first, because no request can
start from them; then leaves with a state. Among leaves of either sort, the least recently used goes first.
States can be evicted without their nodes, the least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.memory.index_pool import NULL_INDEX, IndexPool
from engine.memory.prefix_journal import PrefixJournal
from wire.messages.prefixes import next_key, root_key

STALE_FACTOR = 4
"""A heap of candidates is rebuilt when it has this many times more entries than there are nodes or states."""


@dataclass(eq=False, slots=True)
class CachedState:
    """The state after a node's last token."""

    slot: int
    node: CachedBlock
    num_users: int = 0
    last_used: int = 0


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block of KV and its place in the tree."""

    key: bytes
    parent: CachedBlock | None
    num_blocks: int
    """Number of blocks from the prompt's start to the end of this block."""
    block_id: int
    state: CachedState | None = None
    num_users: int = 0
    num_children: int = 0
    last_used: int = 0


@dataclass(frozen=True)
class Match:
    """The cached part of a prompt."""

    nodes: list[CachedBlock] = field(default_factory=list)
    """Usable blocks from the prompt's start. If there is a state, they end at the state."""
    state: CachedState | None = None
    num_matched_blocks: int = 0
    """Number of blocks whose KV is cached, with or without a usable state. It is larger than the number of
    ``nodes`` if the last of these blocks have no state."""


class PrefixCache:
    """Owns the cached blocks and states. Hands out indices of both pools and evicts if necessary."""

    def __init__(self, blocks: IndexPool, slots: IndexPool, *, block_size: int, fingerprint: str) -> None:
        self.block_size = block_size
        self._blocks = blocks
        self._slots = slots
        self._fingerprint = fingerprint
        self.journal = PrefixJournal()
        """Changes of the nodes from which a request can start: the nodes with a state."""
        self._nodes: dict[bytes, CachedBlock] = {}
        self._states: set[CachedState] = set()
        self._num_idle_blocks = 0
        self._num_idle_states = 0
        self._clock = count(1)
        # Candidates for eviction. Entries can become stale, so each is checked when it is popped.
        self._block_heap: list[tuple[bool, int, int, CachedBlock]] = []
        self._state_heap: list[tuple[int, int, CachedState]] = []

    # --- room ------------------------------------------------------------------------------------

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks that are free or can be evicted."""
        return self._blocks.num_free + self._num_idle_blocks

    @property
    def num_available_slots(self) -> int:
        return self._slots.num_free + self._num_idle_states

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that only the cache holds."""
        return self._num_idle_blocks

    @property
    def num_cached_states(self) -> int:
        return self._num_idle_states

    def allocate_blocks(self, num: int, behind: int = NULL_INDEX) -> list[int]:
        """Return ``num`` block indices, adjacent to block ``behind`` if possible, evicting as needed.

        The caller has checked :attr:`num_available_blocks`.
        """
        while self._blocks.num_free < num:
            self._evict_block()
        return self._blocks.allocate(num, behind)

    def allocate_slot(self) -> int:
        while self._slots.num_free < 1:
            self._evict_state()
        return self._slots.allocate(1)[0]

    def clear(self) -> None:
        """Evict everything that no request holds."""
        while self._num_idle_blocks:
            self._evict_block()

    # --- looking up ------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], num_tokens: int, salt: str, *, needs_state: bool) -> Match:
        """Find the longest cached prefix of ``tokens[:num_tokens]``. The prefix is not held yet."""
        nodes: list[CachedBlock] = []
        key = root_key(self._fingerprint, salt)
        for start in range(0, num_tokens - self.block_size + 1, self.block_size):
            key = next_key(key, tokens[start : start + self.block_size])
            node = self._nodes.get(key)
            if node is None:
                break
            nodes.append(node)
        if not needs_state:
            return Match(nodes, None, len(nodes))
        usable = self._num_usable(nodes)
        return Match(nodes[:usable], nodes[usable - 1].state if usable else None, len(nodes))

    def _num_usable(self, nodes: Sequence[CachedBlock]) -> int:
        """Return the number of usable nodes. A request can only start at the end of a node with a state."""
        return next((i for i in range(len(nodes), 0, -1) if nodes[i - 1].state is not None), 0)

    def blocks_of(self, nodes: Sequence[CachedBlock]) -> list[int]:
        """Return the nodes' blocks, for the block table of a request that holds the nodes."""
        return [node.block_id for node in nodes]

    def hold(self, nodes: Iterable[CachedBlock]) -> None:
        """Protect nodes from eviction until :meth:`release`."""
        now = next(self._clock)
        for node in nodes:
            if node.num_users == 0:
                self._num_idle_blocks -= 1
            node.num_users += 1
            node.last_used = now

    def release(self, nodes: Iterable[CachedBlock]) -> None:
        for node in nodes:
            node.num_users -= 1
            if node.num_users == 0:
                self._num_idle_blocks += 1
                self._offer_block(node)

    def hold_state(self, state: CachedState) -> None:
        if state.num_users == 0:
            self._num_idle_states -= 1
        state.num_users += 1
        state.last_used = next(self._clock)

    def release_state(self, state: CachedState) -> None:
        state.num_users -= 1
        if state.num_users == 0:
            self._num_idle_states += 1
            self._offer_state(state)

    # --- growing ---------------------------------------------------------------------------------

    def extend(
        self,
        nodes: list[CachedBlock],
        tokens: Sequence[int],
        num_computed: int,
        block_ids: Sequence[int],
        salt: str,
    ) -> None:
        """Add nodes for a request's newly full blocks after ``nodes``, which the request holds.

        All these nodes are held and appended to ``nodes``. A new node takes the request's block, which
        belongs to the cache from now on. If an equal block is cached already, its node is held instead, and
        the request continues to use its own block.
        """
        for index in range(len(nodes), num_computed // self.block_size):
            parent = nodes[-1] if nodes else None
            start = index * self.block_size
            before = parent.key if parent else root_key(self._fingerprint, salt)
            key = next_key(before, tokens[start : start + self.block_size])
            node = self._nodes.get(key)
            if node is None:
                node = CachedBlock(key, parent, index + 1, self._block_at(block_ids, index))
                self._enter(node)
            self.hold([node])
            nodes.append(node)

    def _block_at(self, block_ids: Sequence[int], index: int) -> int:
        return block_ids[index]

    def _enter(self, node: CachedBlock) -> None:
        self._nodes[node.key] = node
        self._num_idle_blocks += 1
        if node.parent is not None:
            node.parent.num_children += 1

    def put_state(self, node: CachedBlock, slot: int) -> CachedState | None:
        """Give the cache a slot with the state at ``node``'s end, and hold the state once.

        Returns None if the node already has a state: then the cache does not take the slot.
        """
        if node.state is not None:
            return None
        state = CachedState(slot, node, num_users=1, last_used=next(self._clock))
        node.state = state
        self._states.add(state)
        self.journal.add(node.key)
        return state

    # --- evicting --------------------------------------------------------------------------------

    def _offer_block(self, node: CachedBlock) -> None:
        if node.num_users == 0 and node.num_children == 0:
            heapq.heappush(self._block_heap, (node.state is not None, node.last_used, id(node), node))
        if len(self._block_heap) > STALE_FACTOR * len(self._nodes) + STALE_FACTOR:
            leaves = [n for n in self._nodes.values() if n.num_users == 0 and n.num_children == 0]
            self._block_heap = [(n.state is not None, n.last_used, id(n), n) for n in leaves]
            heapq.heapify(self._block_heap)

    def _offer_state(self, state: CachedState) -> None:
        heapq.heappush(self._state_heap, (state.last_used, id(state), state))
        if len(self._state_heap) > STALE_FACTOR * len(self._states) + STALE_FACTOR:
            self._state_heap = [(s.last_used, id(s), s) for s in self._states if s.num_users == 0]
            heapq.heapify(self._state_heap)

    def _evict_block(self) -> None:
        while True:
            has_state, last_used, _, node = heapq.heappop(self._block_heap)
            fresh = (has_state, last_used) == (node.state is not None, node.last_used)
            if fresh and node.num_users == 0 and node.num_children == 0 and node.key in self._nodes:
                break
        if node.state is not None:
            self._drop_state(node.state)
        self._remove(node)
        if node.parent is not None:
            self._offer_block(node.parent)

    def _remove(self, node: CachedBlock) -> None:
        """Remove an unused leaf from the tree and free its block."""
        del self._nodes[node.key]
        self._num_idle_blocks -= 1
        self._blocks.free(self.blocks_of([node]))
        if node.parent is not None:
            node.parent.num_children -= 1

    def _evict_state(self) -> None:
        while True:
            last_used, _, state = heapq.heappop(self._state_heap)
            if state in self._states and state.num_users == 0 and state.last_used == last_used:
                break
        self._drop_state(state)
        self._offer_block(state.node)

    def _drop_state(self, state: CachedState) -> None:
        assert state.num_users == 0, "a state in use is never evicted"
        state.node.state = None
        self.journal.remove(state.node.key)
        self._states.remove(state)
        self._num_idle_states -= 1
        self._slots.free([state.slot])
