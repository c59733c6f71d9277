"""Which starts of sessions go first, stay in host memory or come back. Lengths are in blocks."""

import pytest

from engine.memory.cached_start import Place
from engine.memory.eviction import LruEviction
from engine.memory.host_tier import HostMemory, HostTier
from engine.memory.index_pool import IndexPool
from engine.memory.prefix_cache import PrefixCache
from engine.memory.prefix_journal import PrefixJournal, ReadCost, Tier
from engine.memory.start_sizes import StartSizes
from engine.memory.value_eviction import ValueEviction
from engine.schedule import sessions as sessions_module
from engine.schedule.sessions import Sessions
from wire.errors import WireError
from wire.messages.sessions import NAME_BYTES, SessionNews, TendSession

ONE, TWO = "1" * 2 * NAME_BYTES, "2" * 2 * NAME_BYTES
STATE_PAGES = 2
SIZES = StartSizes(1, block_bytes=1, slot_bytes=1, token_flops=100.0, pair_flops=1.0)


class World:
    """A prefix cache over host memory. A prompt is a text, a block is a letter."""

    def __init__(self, num_slots=6, num_pages=60, num_blocks=40, policy=None):
        self.tier = HostTier(
            HostMemory(num_pages, 10, STATE_PAGES), journal=PrefixJournal({Tier.HOST: ReadCost(1.0, 0.1)})
        )
        self.blocks, self.slots = IndexPool(1 + num_blocks, "block"), IndexPool(1 + num_slots, "slot")
        self.cache = PrefixCache(
            self.blocks, self.slots, block_size=1, fingerprint="f", policy=policy, tier=self.tier
        )
        self.sessions = Sessions(self.cache)

    def turn(self, text, session=""):
        """Does what a request for a prompt does; returns how much of the prompt the device had."""
        cache, keys = self.cache, [text[: i + 1].encode() for i in range(len(text))]
        match = cache.match(keys, needs_state=True)
        nodes, found = match.nodes, len(match.nodes)
        cache.hold(nodes)
        if match.state is not None:
            cache.hold_state(match.state)
            self.sessions.note(session, nodes[-1].key)
        cache.used(match)
        cache.resumed(match, session)
        block_ids = cache.blocks_of(nodes) + cache.allocate_blocks(len(keys) - found)
        slot = cache.allocate_slot()
        cache.extend(nodes, keys, len(keys), block_ids)
        state = cache.put_state(nodes[-1], slot, Place.END, session)
        self.sessions.note(session, nodes[-1].key)
        self.slots.free([] if state is not None else [slot])
        owned = {node.block_id for node in nodes}
        self.blocks.free([block_id for block_id in block_ids if block_id not in owned])
        for held in (match.state, state):
            if held is not None:
                cache.release_state(held)
        cache.release(reversed(nodes))
        self.tier.take()
        return found

    def on_device(self, *texts):
        return [text for text in texts if self.cache.state(text.encode()) is not None]

    def in_host(self, *texts):
        return [text for text in texts if self.tier.start(text.encode()) is not None]

    def tend(self, session, action, owner="", into=""):
        news = self.sessions.tend(TendSession(session, action, owner, into=into))
        self.copies = self.tier.take()
        return news


@pytest.mark.parametrize("policy", [LruEviction, lambda: ValueEviction(SIZES)], ids=["lru", "value"])
def test_starts_that_a_session_has_gone_beyond_go_before_all_others(policy):
    world = World(num_slots=5, policy=policy())
    for text, session in (("x", ""), ("a", ONE), ("ab", ONE), ("abc", ONE)):
        world.turn(text, session)
    assert world.turn("abcd", ONE) == 3
    world.turn("y", "")
    world.turn("z", "")
    assert world.on_device("a", "ab", "abc", "abcd", "x", "y", "z") == ["abc", "abcd", "x", "y", "z"]
    assert world.in_host("a", "ab") == [], "nobody goes back there"


def test_a_start_that_others_use_too_is_not_outdated():
    world = World(num_slots=4)
    world.turn("a", ONE)
    world.turn("ab", ONE)
    assert world.turn("ac", TWO) == 1
    assert world.turn("abd", ONE) == 2
    world.turn("x", "")
    assert world.in_host("a") == ["a"], "it was the one used least recently, and went to host memory"


def test_a_start_that_a_request_uses_again_is_not_outdated_any_more():
    world = World(num_slots=4)
    for text in ("a", "ab", "abc"):
        world.turn(text, ONE)
    assert world.turn("ax", ONE) == 1, "the client goes back to its first turn"
    world.turn("y", "")
    assert world.on_device("a") == ["a"]


def test_without_a_session_nothing_is_outdated():
    world = World(num_slots=4)
    for text in ("a", "ab", "abc", "abcd"):
        world.turn(text)
    world.turn("x")
    assert world.in_host("a") == ["a"]


def test_in_host_memory_too_a_session_s_older_starts_go_first():
    world = World(num_slots=2, num_pages=15)
    world.turn("x")
    world.turn("ab", ONE)
    world.turn("abc", ONE)
    for other in "yw":
        world.turn(other)
    assert world.in_host("x", "ab", "abc") == ["x", "ab", "abc"]
    world.tier.resumed([b"a", b"ab", b"abc"], ONE)
    for other in "uv":
        world.turn(other)
    assert world.in_host("x", "ab", "abc", "y", "w") == ["x", "abc", "y", "w"]


def test_retained_starts_stay_in_host_memory_until_they_are_let_go():
    world = World(num_slots=2, num_pages=40)
    world.turn("abc", ONE)
    assert world.tend(ONE, "retain", "alice") == SessionNews(1, 3)
    (copy,) = world.copies.demoted
    assert len(copy.block_ids) == 3
    assert world.on_device("abc") == ["abc"], "the device has it as well"
    assert world.tier.figures.retained_bytes == 50
    for number in range(30):
        world.turn(chr(ord("A") + number) * 3)
    assert world.in_host("abc") == ["abc"]
    assert world.on_device("abc") == []
    assert world.tend(ONE, "let_go") == SessionNews(1, 3)
    assert world.tier.figures.retained_bytes == 0
    for number in range(30):
        world.turn(chr(ord("A") + number) * 4)
    assert world.in_host("abc") == []


def test_newer_starts_are_retained_in_place_of_older_ones():
    world = World(num_pages=80)
    for text in ("a", "ab", "abc"):
        world.turn(text, ONE)
        assert world.tend(ONE, "retain", "alice").num_tokens == len(text)
    assert world.tier._retained == {world.tier.start(b"ab"), world.tier.start(b"abc")}


def test_an_owner_retains_no_more_than_a_part_of_the_memory():
    world = World(num_pages=60, num_slots=20, num_blocks=100)
    names = [f"{number:032x}" for number in range(12)]
    for number, name in enumerate(names):
        world.turn(chr(ord("A") + number) * 5, name)
    told = [world.tend(name, "retain", "alice") for name in names[:4]]
    assert [news.num_starts for news in told] == [1, 1, 0, 0], "7 pages each, of 15"
    assert [news.over_quota for news in told] == [False, False, True, True]
    told = [world.tend(name, "retain", f"owner {number}") for number, name in enumerate(names[4:])]
    assert [news.num_starts for news in told] == [1, 1] + [0] * 6, "all owners together: 30 pages"
    world.tend(names[0], "let_go")
    assert world.tend(names[2], "retain", "alice").num_starts == 1
    assert world.tend(names[2], "retain", "alice").num_starts == 1, "the same again costs nothing"


def test_what_is_released_goes_before_all_others():
    world = World(num_slots=3)
    world.turn("x")
    world.turn("y")
    world.turn("a", ONE)
    world.tend(ONE, "retain", "alice")
    assert world.tend(ONE, "release") == SessionNews(1, 1)
    world.turn("z")
    assert world.on_device("x", "y", "a", "z") == ["x", "y", "z"]
    assert not world.tier._retained
    assert world.tend(ONE, "release") == SessionNews(0, 0)


def test_a_start_comes_back_before_a_request_needs_it():
    world = World(num_slots=2)
    world.turn("abc", ONE)
    world.turn("abd")
    world.turn("x")
    world.turn("y")
    assert world.on_device("abc") == []
    assert world.tend(ONE, "prefetch") == SessionNews(1, 3)
    (copy,) = world.copies.promoted
    assert copy.state_pages == world.tier.start(b"abc").state_pages
    assert copy.block_ids == (), "the device still has its blocks"
    assert world.turn("abce", ONE) == 3
    assert world.tend(ONE, "prefetch") == SessionNews(1, 4)
    assert world.copies.promoted == (), "it is there"


def test_blocks_that_the_device_lacks_come_back_with_the_state():
    world = World(num_slots=2, num_blocks=6)
    world.turn("abc", ONE)
    world.turn("uvwxyz")
    assert world.tend(ONE, "prefetch") == SessionNews(1, 3)
    (copy,) = world.copies.promoted
    assert len(copy.block_ids) == 3
    assert world.turn("abcd", ONE) == 3


def test_nothing_is_taken_from_requests_for_a_prefetch():
    world = World(num_slots=1)
    world.turn("abc", ONE)
    world.turn("x")
    held = world.cache.match([b"x"], needs_state=True).state
    world.cache.hold_state(held)
    assert world.tend(ONE, "prefetch") == SessionNews(0, 0)
    assert world.copies.promoted == ()
    world.cache.release_state(held)


def test_neither_session_gives_up_what_a_fork_begins_from():
    world = World(num_slots=12)
    for text in ("a", "ab", "abc"):
        world.turn(text, ONE)
    assert world.tend(ONE, "fork", into=TWO) == SessionNews(2, 3)
    for number, text in enumerate(("abcd", "abcde", "abcdef")):
        assert world.turn(text, ONE) == 3 + number
    for number, text in enumerate(("abcx", "abcxy", "abcxyz")):
        assert world.turn(text, TWO) == 3 + number, "the old session went beyond it"
    outdated = {state.node.key for state in world.cache._outdated}
    assert outdated == {b"a", b"abcd", b"abcx"}
    assert world.tend(ONE, "release") == SessionNews(2, 6)
    assert world.turn("abcz", TWO) == 3, "what both begin from is nobody's alone"


def test_in_host_memory_too_a_fork_s_starts_stay():
    world = World(num_slots=2, num_pages=60)
    world.turn("abc", ONE)
    for other in "xyz":
        world.turn(other)
    assert world.in_host("abc") == ["abc"]
    assert world.tend(ONE, "fork", into=TWO) == SessionNews(1, 3)
    assert world.tier.start(b"abc").session == ""
    assert world.tend(TWO, "prefetch") == SessionNews(1, 3)
    assert world.turn("abcd", TWO) == 3


def test_a_fork_takes_the_place_of_an_older_session_of_its_name():
    world = World(num_slots=8)
    world.turn("abc", ONE)
    world.turn("xy", TWO)
    world.tend(ONE, "fork", into=TWO)
    assert list(world.sessions._newest[TWO]) == [b"abc"]


def test_retained_starts_of_a_fork_count_for_its_own_owner():
    world = World(num_pages=60, num_slots=8)
    world.turn("abcde", ONE)
    world.tend(ONE, "retain", "alice")
    world.tend(ONE, "fork", into=TWO)
    assert world.tend(TWO, "retain", "alice") == SessionNews(1, 5)
    assert world.sessions.num_retained_pages == 14, "as if no other start shared their blocks"
    world.tend(ONE, "let_go")
    assert world.tier._retained == {world.tier.start(b"abcde")}
    world.tend(TWO, "let_go")
    assert not world.tier._retained


def test_of_unknown_sessions_nothing_is_known():
    world = World()
    world.turn("abc", ONE)
    for action in ("retain", "let_go", "release", "prefetch"):
        assert world.tend(TWO, action) == SessionNews(0, 0)
    assert world.tend(TWO, "fork", into=ONE) == SessionNews(0, 0)


def test_without_host_memory_nothing_is_retained():
    world = World(num_pages=0)
    world.turn("abc", ONE)
    assert world.tend(ONE, "retain").num_starts == 0
    assert world.tend(ONE, "prefetch") == SessionNews(1, 3), "the device has it"


def test_only_so_many_sessions_and_starts_are_remembered(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 3)
    world = World()
    for number in range(10):
        for length in range(1, 6):
            world.sessions.note(f"{number:032x}", bytes([number, length]))
    assert len(world.sessions._newest) == 3
    assert [list(starts) for starts in world.sessions._newest.values()] == [
        [bytes([number, 4]), bytes([number, 5])] for number in (7, 8, 9)
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("short", "retain"), "a name of 32 characters, got 5"),
        ((ONE, "retain", "x" * 257), "at most 256 characters, got 257"),
        ((ONE, "retain", "", -1.0), "0 to 86400 seconds, got -1.0"),
        ((ONE, "retain", "", float("nan")), "0 to 86400 seconds, got nan"),
        ((ONE, "retain", "", 86_401.0), "0 to 86400 seconds, got 86401.0"),
        ((ONE, "fork"), "a fork names another session"),
        ((ONE, "fork", "", 0.0, ONE), "a fork names another session"),
        ((ONE, "fork", "", 0.0, "short"), "a name of 32 characters, got 5"),
        ((ONE, "release", "", 0.0, TWO), "a fork names another session, and nothing else does"),
    ],
)
def test_calls_are_bounded(fields, message):
    with pytest.raises(WireError, match=message):
        TendSession(*fields)
