"""Prefix caches of models that keep only blocks or only states.

| model | a prefix counts as a hit up to | what is evicted |
|---|---|---|
| hybrid (:mod:`engine.memory.prefix_cache`) | a block with a state | both, separately |
| no recurrent layers | every full block | leaves, least recently used first |
| no attention layers | a cached state | states, least recently used first |

Without attention layers the nodes of the cache's tree have no blocks and exist only for their keys. A node
that leads to no state is removed at once, so there are never more nodes than states and running requests
need.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory.cached_start import CachedBlock
from engine.memory.eviction import EvictionPolicy
from engine.memory.host_tier import HostTier
from engine.memory.index_pool import NULL_INDEX, IndexPool
from engine.memory.prefix_cache import PrefixCache
from engine.schedule.capacity import CapacityPlan


class BlockPrefixCache(PrefixCache):
    """Prefix cache of a model without recurrent layers: KV alone serves a prefix."""

    def _num_usable(self, nodes: Sequence[CachedBlock]) -> int:
        return len(nodes)

    def start(self, key: bytes) -> CachedBlock | None:
        return self._nodes.get(key)

    def by_value(self) -> list[CachedBlock]:
        leaves = [node for node in self._nodes.values() if not node.num_children]
        return sorted(leaves, key=lambda node: node.last_used, reverse=True)

    def _entered(self, nodes: Sequence[CachedBlock]) -> None:
        for node in nodes:
            self.journal.add(node.key)

    def _demote_blocks(self, tail: Sequence[CachedBlock]) -> None:
        for node in tail:
            self.tier.demote(node)

    def _remove(self, tail: Sequence[CachedBlock]) -> None:
        for node in tail:
            self.journal.remove(node.key)
        super()._remove(tail)


class StatePrefixCache(PrefixCache):
    """Prefix cache of a model without attention layers: a state alone serves a prefix. It has no blocks."""

    @property
    def num_available_blocks(self) -> int:
        return 0

    @property
    def num_cached_blocks(self) -> int:
        return 0

    def blocks_of(self, nodes: Sequence[CachedBlock]) -> list[int]:
        return []

    def _block_at(self, block_ids: Sequence[int], index: int) -> int:
        return NULL_INDEX

    def _offer_block(self, node: CachedBlock) -> None:
        while node.num_users == 0 and node.num_children == 0 and node.state is None:
            self._remove([node])
            if node.parent is None:
                return
            node = node.parent
        super()._offer_block(node)


def make_prefix_cache(
    plan: CapacityPlan,
    blocks: IndexPool,
    slots: IndexPool,
    fingerprint: str,
    policy: EvictionPolicy | None,
    tier: HostTier | None,
) -> PrefixCache:
    """Makes the prefix cache that fits the plan's model."""
    kind = PrefixCache
    if not plan.has_state:
        kind = BlockPrefixCache
    elif not plan.has_kv:
        kind = StatePrefixCache
    return kind(blocks, slots, block_size=plan.block_size, fingerprint=fingerprint, policy=policy, tier=tier)
