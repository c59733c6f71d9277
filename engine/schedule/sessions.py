"""The starts of sessions: which are the newest, which are retained in host memory, which come back early.

A session's requests continue one another, so its next request starts from one of its newest starts. A
retained start stays in host memory until it is let go. The device still gives it up as any other: a request,
or a prefetch, brings it back.

There is no clock here: the server lets go when the time is over, and its ranks hear of that in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.memory.cached_start import HostBlock
from engine.memory.index_pool import NULL_INDEX
from engine.memory.prefix_cache import PrefixCache
from wire.messages.sessions import SessionNews, TendSession

MAX_SESSIONS = 16_384
"""Sessions that are remembered: those that had the last requests."""
MAX_STARTS = 2
"""Starts of each session that are remembered: where its last request began, and where it ended."""
RETAINED_SHARE = 0.5
"""Part of host memory that all retained starts together may take."""
OWNER_SHARE = 0.25
"""Part of host memory that the retained starts of one owner may take."""

NOTHING = SessionNews(0, 0)


@dataclass
class Retained:
    """What is retained of one session."""

    owner: str
    starts: list[HostBlock] = field(default_factory=list)
    num_pages: int = 0
    """As if no other start shared their blocks."""


class Sessions:
    """Remembers the starts of sessions, and retains and prefetches them. ``cache`` owns the starts."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._tier = cache.tier
        self._newest: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()
        """Keys of each session's newest starts, oldest first."""
        self._retained: dict[str, Retained] = {}

    def note(self, session: str, key: bytes) -> None:
        """Notes that a request of a session started at the end of a block, or left a state there."""
        if not session:
            return
        starts = self._newest.setdefault(session, OrderedDict())
        self._newest.move_to_end(session)
        starts[key] = None
        starts.move_to_end(key)
        if len(starts) > MAX_STARTS:
            starts.popitem(last=False)
        if len(self._newest) > MAX_SESSIONS:
            self._newest.popitem(last=False)

    def tend(self, call: TendSession) -> SessionNews:
        """Carries out what a router asks for."""
        if call.action == "retain":
            return self._retain(call.session, call.owner)
        if call.action == "prefetch":
            return self._prefetch(call.session)
        if call.action == "fork":
            return self._fork(call.session, call.into)
        kept = self._let_go(call.session)
        if call.action == "release":
            return self._release(call.session)
        return kept

    @property
    def num_retained_pages(self) -> int:
        return sum(one.num_pages for one in self._retained.values())

    def _keys(self, session: str) -> Iterable[bytes]:
        """Returns the keys of the session's newest starts, newest first."""
        return list(reversed(self._newest.get(session, ())))

    def _retain(self, session: str, owner: str) -> SessionNews:
        """Retains as many of the session's newest starts as the quotas allow, in place of what was retained
        of it before."""
        self._let_go(session)
        kept, over_quota = Retained(owner), False
        room = self._room(owner)
        for key in self._keys(session):
            num_blocks = self._length(key)
            num_pages = self._tier.memory.pages_of(num_blocks)
            if not num_blocks:
                continue
            if kept.num_pages + num_pages > room:
                over_quota = True
                continue
            start = self._in_host(key)
            if start is not None:
                self._tier.retain(start)
                kept.starts.append(start)
                kept.num_pages += num_pages
        if kept.starts:
            self._retained[session] = kept
        self._count()
        return self._news(kept.starts, over_quota)

    def _room(self, owner: str) -> int:
        """Returns how many pages an owner may still retain."""
        capacity = self._tier.memory.num_pages
        of_owner = sum(one.num_pages for one in self._retained.values() if one.owner == owner)
        in_all = int(RETAINED_SHARE * capacity) - self.num_retained_pages
        return min(in_all, int(OWNER_SHARE * capacity) - of_owner)

    def _length(self, key: bytes) -> int:
        """Returns the number of blocks of a start; 0 if it is gone."""
        start = self._tier.start(key)
        if start is not None:
            return start.num_blocks
        state = self._cache.state(key)
        return 0 if state is None else state.node.num_blocks

    def _in_host(self, key: bytes) -> HostBlock | None:
        """Returns a start in host memory, which it is copied to if only the device has it."""
        start, state = self._tier.start(key), self._cache.state(key)
        if start is None and state is not None:
            self._tier.demote(state.node, state.slot, state.place)
            start = self._tier.start(key)
        return start

    def purge(self, covers: Callable[[str], bool]) -> None:
        """Retains no start any more whose cache salt ``covers`` holds for."""
        for session, kept in list(self._retained.items()):
            if any(covers(start.salt) for start in kept.starts):
                self._let_go(session)

    def _let_go(self, session: str) -> SessionNews:
        kept = self._retained.pop(session, None)
        if kept is None:
            return NOTHING
        others = {start for one in self._retained.values() for start in one.starts}
        for start in kept.starts:
            if start not in others:
                self._tier.let_go(start)
        self._count()
        return self._news(kept.starts)

    def _release(self, session: str) -> SessionNews:
        """Lets the session's own starts be given up before all others."""
        num_starts = num_blocks = 0
        for key in self._keys(session):
            length = self._length(key)
            if length and self._cache.outdate(key, session):
                num_starts, num_blocks = num_starts + 1, max(num_blocks, length)
        self._newest.pop(session, None)
        return SessionNews(num_starts, num_blocks * self._cache.block_size)

    def _prefetch(self, session: str) -> SessionNews:
        """Brings the session's longest start back to the device, if the device lacks it."""
        lengths = {key: self._length(key) for key in self._keys(session)}
        key = max(lengths, key=lambda one: lengths[one], default=None)
        if key is None or not lengths[key]:
            return NOTHING
        start = self._tier.start(key)
        if self._cache.state(key) is None and not (start is not None and self._fetch(start)):
            return NOTHING
        return SessionNews(1, lengths[key] * self._cache.block_size)

    def _fork(self, session: str, into: str) -> SessionNews:
        """Lets a session begin from another one's newest starts. From now on these belong to no session
        alone, so neither session gives them up when it goes beyond them. What is known of an earlier session
        of that name is forgotten."""
        self._newest.pop(into, None)
        num_starts = num_blocks = 0
        for key in reversed(list(self._keys(session))):
            length = self._length(key)
            if length:
                self._cache.share(key, session)
                self.note(into, key)
                num_starts, num_blocks = num_starts + 1, max(num_blocks, length)
        return SessionNews(num_starts, num_blocks * self._cache.block_size)

    def _fetch(self, start: HostBlock) -> bool:
        """Copies what the device lacks of a start to the device. Returns whether it has room for that.

        Nothing holds the start then: it is cached as if a request had just ended.
        """
        cache, keys = self._cache, _keys_to(start)
        if not self._tier.memory.has_kv:
            return False
        nodes = cache.match(keys, needs_state=False).nodes
        cache.hold(nodes)
        num_held, num_new = len(nodes), len(keys) - len(nodes)
        if cache.num_available_blocks < num_new or not cache.num_available_slots:
            cache.release(reversed(nodes))
            return False
        self._tier.hold(start)
        held = cache.blocks_of(nodes)
        new = cache.allocate_blocks(num_new, held[-1] if held else NULL_INDEX)
        slot = cache.allocate_slot()
        cache.extend(nodes, keys, len(keys), held + new, start.salt)
        state = cache.put_state(nodes[-1], slot, start.place, start.session)
        assert state is not None, "the device lacked the state"
        self._tier.promote(start, (held + new)[num_held:], slot, 0)
        cache.release_state(state)
        cache.release(reversed(nodes))
        return True

    def _news(self, starts: Iterable[HostBlock], over_quota: bool = False) -> SessionNews:
        lengths = [start.num_blocks for start in starts]
        return SessionNews(len(lengths), max(lengths, default=0) * self._cache.block_size, over_quota)

    def _count(self) -> None:
        self._tier.figures.retained_bytes = self.num_retained_pages * self._tier.memory.page_bytes


def _keys_to(start: HostBlock) -> list[bytes]:
    """Returns the keys of all blocks from the prompt's beginning to a start."""
    keys: list[bytes] = []
    block: HostBlock | None = start
    while block is not None:
        keys.append(block.key)
        block = block.parent
    return keys[::-1]
