"""KV blocks and Mamba states of earlier requests that can serve later ones. It uses no tensors.

The cache is a tree. Each node is a full KV block. Its key is a hash chained over all tokens up to the block's
end, the cache salt and the model. A node may have the Mamba state at its end. A recurrent layer can't start
from KV alone, so a prefix can be used only up to a node with a state. For a request whose state another
server hands over, only KV is matched. Models with only KV or only states use
:mod:`engine.schedule.one_part_caches`.

Requests hold the nodes that they use. A request that holds a child also holds its parent, so nodes that no
request holds can always be evicted leaf by leaf. States can be evicted without their nodes. Which leaf or
state goes next is the policy's choice (:mod:`engine.memory.eviction`). Leaves without a state go first under
every policy, because no request can start from them.

A start that is evicted goes to host memory, if there is any (:mod:`engine.memory.host_tier`).

A session's requests continue one another. Once one of them starts from a longer start, the session's shorter
ones are outdated: they are evicted before all others, and do not go to host memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from engine.memory.cached_start import CachedBlock, CachedState, Match, Place
from engine.memory.eviction import EvictionPolicy, LruEviction
from engine.memory.host_tier import HostTier
from engine.memory.index_pool import NULL_INDEX, Indices
from engine.memory.prefix_journal import Tier
from wire.messages.prefixes import following_keys, root_key


class PrefixCache:
    """Owns the cached blocks and states. Hands out indices of both pools and evicts if necessary."""

    def __init__(
        self,
        blocks: Indices,
        slots: Indices,
        *,
        block_size: int,
        fingerprint: str,
        policy: EvictionPolicy | None = None,
        tier: HostTier | None = None,
    ) -> None:
        self.block_size = block_size
        self.tier = tier or HostTier()
        """Keeps what this cache evicts; without pages it keeps nothing."""
        self._blocks = blocks
        self._slots = slots
        self._fingerprint = fingerprint
        self.journal = self.tier.journal
        """Changes of the starts: the nodes with a state, and what host memory has."""
        self._nodes: dict[bytes, CachedBlock] = {}
        self._states: set[CachedState] = set()
        self._outdated: OrderedDict[CachedState, None] = OrderedDict()
        """Idle states that are outdated, in the order in which they became so."""
        self._num_idle_blocks = 0
        self._num_idle_states = 0
        self._clock = count(1)
        self._policy: EvictionPolicy = policy or LruEviction()

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
        while (num_missing := num - self._blocks.num_free) > 0:
            self._evict_for_blocks(num_missing)
        return self._blocks.allocate(num, behind)

    def allocate_slot(self) -> int:
        while self._slots.num_free < 1:
            self._evict_for_slot()
        return self._slots.allocate(1)[0]

    def clear(self) -> None:
        """Evict everything that no request holds, from host memory too."""
        while self._num_idle_blocks:
            self._evict_for_blocks(self._num_idle_blocks)
        self.tier.clear()

    def purge(self, covers: Callable[[str], bool]) -> int:
        """Give up all that no request holds and whose cache salt ``covers`` holds for. Nothing of it goes to
        host memory. Return the number of starts that went."""
        num_starts = self.journal.num_keys(Tier.DEVICE)
        nodes = [node for node in self._nodes.values() if covers(node.salt)]
        for node in nodes:
            if node.state is not None and node.state.num_users == 0:
                self._outdated[node.state] = None  # what is outdated is not demoted
                self._drop_state(node.state)
                self._offer_block(node)
        for node in sorted(nodes, key=lambda one: -one.num_blocks):
            if node.is_idle_leaf and node.state is None:
                self._remove([node])
                if node.parent is not None:
                    self._offer_block(node.parent)
        return num_starts - self.journal.num_keys(Tier.DEVICE)

    # --- looking up ------------------------------------------------------------------------------

    def lengthen_keys(self, keys: list[bytes], tokens: Sequence[int], num_tokens: int, salt: str) -> None:
        """Append to ``keys``, the keys of the first blocks of ``tokens``, those of all further full blocks
        among the first ``num_tokens`` tokens."""
        start = len(keys) * self.block_size
        if num_tokens >= start + self.block_size:
            key = keys[-1] if keys else root_key(self._fingerprint, salt)
            keys += following_keys(key, tokens[start:num_tokens], self.block_size)

    def match(self, keys: list[bytes], *, needs_state: bool) -> Match:
        """Find the longest cached prefix of the blocks with these keys. The prefix is not held yet."""
        nodes: list[CachedBlock] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            nodes.append(node)
        if not needs_state:
            return Match(nodes, keys=keys)
        usable = self._num_usable(nodes)
        state = nodes[usable - 1].state if usable else None
        return Match(nodes[:usable], state, nodes[usable:], keys)

    def _num_usable(self, nodes: Sequence[CachedBlock]) -> int:
        """Return the number of usable nodes. A request can only start at the end of a node with a state."""
        return next((i for i in range(len(nodes), 0, -1) if nodes[i - 1].state is not None), 0)

    def blocks_of(self, nodes: Sequence[CachedBlock]) -> list[int]:
        """Return the nodes' blocks, for the block table of a request that holds the nodes."""
        return [node.block_id for node in nodes]

    def used(self, match: Match) -> None:
        """Notes that a request was admitted with this match: policies learn from it."""
        self._policy.used(match)
        if match.nodes:
            self.tier.touch(match.nodes[-1].key)

    def resumed(self, match: Match, session: str) -> None:
        """Notes that a request of a session starts at the end of ``match``, which it holds.

        The session's states before that place are outdated. States that other requests use too are not.
        """
        if match.state is None:
            return
        if match.state.session != session:
            match.state.session = ""
        for node in match.nodes[:-1] if session else ():
            state = node.state
            if state is not None and state.session == session and state.num_users == 0:
                self._outdated[state] = None
        self.tier.resumed(match.keys[: len(match.nodes)], session)

    def state(self, key: bytes) -> CachedState | None:
        """Return the state at the end of a block; None if there is none."""
        node = self._nodes.get(key)
        return None if node is None else node.state

    def start(self, key: bytes) -> CachedBlock | None:
        """Return the block with a key if a request can start at its end; None otherwise."""
        node = self._nodes.get(key)
        return node if node is not None and node.state is not None else None

    def by_value(self) -> list[CachedBlock]:
        """Return the blocks at whose ends requests can start, most valuable first, without outdated ones."""
        states = [state for state in self._states if state not in self._outdated]
        return [state.node for state in sorted(states, key=self._policy.value, reverse=True)]

    def salt_of(self, key: bytes) -> str | None:
        """Return the cache salt of the prompts that a start belongs to; None if the start is gone."""
        found = self._nodes.get(key) or self.tier.usable(key)
        return None if found is None else found.salt

    def outdate(self, key: bytes, session: str) -> bool:
        """Let a session's start at the end of a block be evicted before all others, from host memory too.
        Return whether there is one that no other request uses."""
        in_host, state = self.tier.outdate(key, session), self.state(key)
        if state is None or state.session != session or state.num_users:
            return in_host
        self._outdated[state] = None
        return True

    def share(self, key: bytes, session: str) -> None:
        """Let a session's start at the end of a block be kept like one that others use too."""
        self.tier.share(key, session)
        state = self.state(key)
        if state is not None and state.session == session:
            state.session = ""
            self._outdated.pop(state, None)

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
            self._outdated.pop(state, None)
        state.num_users += 1
        state.last_used = next(self._clock)

    def release_state(self, state: CachedState) -> None:
        state.num_users -= 1
        if state.num_users == 0:
            self._num_idle_states += 1
            self._policy.offer_state(state)

    # --- growing ---------------------------------------------------------------------------------

    def extend(
        self,
        nodes: list[CachedBlock],
        keys: Sequence[bytes],
        num_blocks: int,
        block_ids: Sequence[int],
        salt: str = "",
    ) -> None:
        """Add nodes for a request's newly computed blocks after ``nodes``, which the request holds.

        ``num_blocks`` blocks have been computed from the start; ``keys`` has at least their keys. All new
        nodes are held and appended to ``nodes``. A new node takes the request's block, which belongs to the
        cache from now on. If an equal block is cached already, its node is held instead, and the request
        continues to use its own block. ``salt`` says whose prompts they are.
        """
        known: list[CachedBlock] = []
        for key in keys[len(nodes) : num_blocks]:
            node = self._nodes.get(key)
            if node is None:
                break
            known.append(node)
        self.hold(known)
        nodes += known
        parent, now, num_known = nodes[-1] if nodes else None, next(self._clock), len(nodes)
        for index in range(num_known, num_blocks):  # no block follows one that is not cached
            key, block_id = keys[index], self._block_at(block_ids, index)
            node = CachedBlock(key, parent, index + 1, block_id, salt, 1, now)
            if parent is not None:
                parent.num_children += 1
            self._nodes[key] = parent = node
            nodes.append(node)
        self._entered(nodes[num_known:])

    def _entered(self, nodes: Sequence[CachedBlock]) -> None:
        """Note that blocks are cached now. Here only states are starts."""

    def _block_at(self, block_ids: Sequence[int], index: int) -> int:
        return block_ids[index]

    def put_state(
        self, node: CachedBlock, slot: int, place: Place = Place.INNER, session: str = ""
    ) -> CachedState | None:
        """Give the cache a slot with the state at ``node``'s end, and hold the state once.

        Returns None if the node already has a state: then the cache does not take the slot.
        """
        if node.state is not None:
            return None
        state = CachedState(
            slot, node, num_users=1, last_used=next(self._clock), place=place, session=session
        )
        node.state = state
        self._states.add(state)
        self.journal.add(node.key)
        self._policy.kept(state)
        return state

    # --- evicting --------------------------------------------------------------------------------

    def _offer_block(self, node: CachedBlock) -> None:
        self._policy.offer_block(node)

    def _evict_for_blocks(self, most_blocks: int) -> None:
        self._evict(self._policy.next_block(), most_blocks)

    def _evict_for_slot(self) -> None:
        outdated = next(iter(self._outdated), None)
        self._evict(self._policy.next_state() if outdated is None else outdated)

    def _evict(self, victim: CachedBlock | CachedState, most_blocks: int = 1) -> None:
        if isinstance(victim, CachedState):
            self._drop_state(victim)
            self._offer_block(victim.node)
            return
        if victim.state is not None:
            self._drop_state(victim.state)
        tail = self._tail(victim, most_blocks)
        self._demote_blocks(tail)
        self._remove(tail)
        before = tail[-1].parent
        if before is not None:
            self._offer_block(before)

    def _demote_blocks(self, tail: Sequence[CachedBlock]) -> None:
        """Let host memory have blocks that are evicted. Here only states are starts."""

    def _tail(self, leaf: CachedBlock, most_blocks: int) -> list[CachedBlock]:
        """Return a leaf and those blocks before it that the policy would choose next anyway: they have no
        state, and were not used later."""
        tail, node = [leaf], leaf.parent
        while node is not None and len(tail) < most_blocks:
            if (
                node.num_users
                or node.num_children > 1
                or node.state is not None
                or node.last_used > leaf.last_used
            ):
                break
            tail.append(node)
            node = node.parent
        return tail

    def _remove(self, tail: Sequence[CachedBlock]) -> None:
        """Remove unused blocks from the tree and free them: a leaf, and blocks that lead to it."""
        for node in tail:
            del self._nodes[node.key]
            node.is_cached = False
        self._num_idle_blocks -= len(tail)
        self._blocks.free(self.blocks_of(tail[::-1]))
        before = tail[-1].parent
        if before is not None:
            before.num_children -= 1

    def _drop_state(self, state: CachedState) -> None:
        assert state.num_users == 0, "a state in use is never evicted"
        if state in self._outdated:
            del self._outdated[state]
        else:
            self.tier.demote(state.node, state.slot, state.place)
        state.node.state = None
        self.journal.remove(state.node.key)
        self._states.remove(state)
        self._num_idle_states -= 1
        self._slots.free([state.slot])
        self._policy.dropped(state)
