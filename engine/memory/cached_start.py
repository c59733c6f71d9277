"""What the prefix cache and host memory keep: blocks of KV in a tree, and states at the ends of some of them.

A *start* is a block with a state: a position from which a request can resume. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from engine.memory.index_pool import NULL_INDEX


class Place(IntEnum):
    """Why a state was kept where it is. Its chance of being used again depends on that."""

    END = 0
    """The last block boundary of a prompt or of an answer."""
    NEAR_1 = 1
    """One block before the end. The next ones: 2 to 3 blocks before the end, 4 to 7 and so on."""
    NEAR_2 = 2
    NEAR_4 = 3
    NEAR_8 = 4
    NEAR_16 = 5
    NEAR_32 = 6
    INNER = 7
    """Any other place inside a prompt or an answer, such as a multiple of the state block."""
    BRANCH = 8
    """The end of a prefix that an earlier request had too."""

    @classmethod
    def before_end(cls, num_blocks: int) -> Place:
        """Returns the place that lies ``num_blocks`` before the end."""
        return cls(min(num_blocks.bit_length(), cls.INNER))


@dataclass(eq=False, slots=True)
class CachedState:
    """The state after a node's last token."""

    slot: int
    node: CachedBlock
    num_users: int = 0
    last_used: int = 0
    place: Place = Place.INNER
    num_hits: int = 0
    """Number of requests that have started here."""
    last_request: int = 0
    """The number of the request that last started here, or else of the request that kept the state."""
    queue: int = -1
    """Index of the queue in which an eviction policy has the state; -1: in none."""
    family: bytes = b""
    """The family of prompts that the start belongs to (:mod:`engine.memory.reuse_rates`)."""
    session: str = ""
    """The session whose requests alone kept the state and started here; empty: none, or others as well."""


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block of KV and its place in the tree."""

    key: bytes
    parent: CachedBlock | None
    num_blocks: int
    """Number of blocks from the prompt's start to the end of this block."""
    block_id: int
    salt: str = ""
    """The cache salt of the prompts that the block belongs to (:mod:`wire.messages.cache_salt`)."""
    num_users: int = 0
    last_used: int = 0
    state: CachedState | None = None
    num_children: int = 0
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
    beyond: list[CachedBlock] = field(default_factory=list)
    """The cached blocks that follow, from whose ends no request can start."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of all full blocks that were looked up, cached or not."""

    @property
    def num_matched_blocks(self) -> int:
        """Number of blocks whose KV is cached, with or without a usable state."""
        return len(self.nodes) + len(self.beyond)


@dataclass(eq=False, slots=True)
class HostBlock:
    """A block in host memory, and the start at its end if there is one."""

    key: bytes
    parent: HostBlock | None
    num_blocks: int
    """Number of blocks from the prompt's start to the end of this block."""
    page: int
    """Null if the model has no KV."""
    salt: str = ""
    """Like :attr:`CachedBlock.salt`."""
    is_start: bool = False
    state_pages: tuple[int, ...] = ()
    place: Place = Place.INNER
    num_children: int = 0
    moved_in: int = 0
    """Number of the last plan that moves the start."""
    num_pins: int = 0
    """How often the start is being written to files or is lent, so that it can't be given up."""
    session: str = ""
    """Like :attr:`CachedState.session`."""

    @property
    def is_pinned(self) -> bool:
        return self.num_pins > 0


@dataclass(frozen=True, eq=False)
class Reservation:
    """Pages for a start that is being read from files, or from another server."""

    known: HostBlock | None
    """The last block on the way to the start that host memory has. It stays."""
    num_before: int
    """Number of blocks from the prompt's start to the first key."""
    keys: tuple[bytes, ...]
    """Keys of the blocks that host memory lacks."""
    block_pages: tuple[int, ...]
    state_pages: tuple[int, ...]
    salt: str
    """Like :attr:`CachedBlock.salt`."""


@dataclass(frozen=True)
class HostCopy:
    """Blocks and a state to copy between the pools and host memory, in one direction."""

    block_ids: tuple[int, ...]
    block_pages: tuple[int, ...]
    """The page of each block."""
    slot: int = NULL_INDEX
    state_pages: tuple[int, ...] = ()
    """Pages of the slot's bytes, in order; empty: no state is copied."""
    reader: str = ""
    """Id of the request that a promoted start is for."""


@dataclass(frozen=True)
class HostCopies:
    """The copies of one step. All demotions come before all promotions."""

    demoted: tuple[HostCopy, ...] = ()
    promoted: tuple[HostCopy, ...] = ()


NO_COPIES = HostCopies()
