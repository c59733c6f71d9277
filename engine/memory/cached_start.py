"""What the prefix cache keeps: blocks of KV in a tree, and states at the ends of some of them.

A *start* is a block with a state: a position from which a request can resume. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class StartKind(IntEnum):
    """Why a state was kept where it is. Its chance of being used again depends on that."""

    INNER = 0
    """A place inside a prompt or an answer, such as a multiple of the state block."""
    END = 1
    """The last block boundary of a prompt or of an answer."""
    BRANCH = 2
    """The end of a prefix that an earlier request had too."""


@dataclass(eq=False, slots=True)
class CachedState:
    """The state after a node's last token."""

    slot: int
    node: CachedBlock
    num_users: int = 0
    last_used: int = 0
    kind: StartKind = StartKind.INNER
    num_hits: int = 0
    """Number of requests that have started here."""
    last_request: int = 0
    """The number of the request that last started here, or else of the request that kept the state."""
    queue: int = -1
    """Index of the queue in which an eviction policy has the state; -1: in none."""


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
    is_cached: bool = True
    """Whether the block is still in the tree."""

    @property
    def is_idle_leaf(self) -> bool:
        """Whether the block can be evicted: no request holds it, and no block follows it."""
        return self.num_users == 0 and self.num_children == 0 and self.is_cached


@dataclass(frozen=True)
class Match:
    """The cached part of a prompt."""

    nodes: list[CachedBlock] = field(default_factory=list)
    """Usable blocks from the prompt's start. If there is a state, they end at the state."""
    state: CachedState | None = None
    num_matched_blocks: int = 0
    """Number of blocks whose KV is cached, with or without a usable state. It is larger than the number of
    ``nodes`` if the last of these blocks have no state."""
