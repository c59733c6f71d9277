"""Pages of host memory for starts that are read from files."""

from engine.files.file_choices import FileChoices
from engine.files.file_tier import FileTier
from engine.files.start_files import NO_JOBS, NoFiles
from engine.memory.cached_start import CachedBlock, Match, Place
from engine.memory.host_tier import HostMemory, HostTier

STATE_PAGES = 2


def make(num_pages=20, has_kv=True, state_pages=STATE_PAGES):
    return HostTier(HostMemory(num_pages, 10, state_pages, has_kv))


def keys(text):
    return [text[: i + 1].encode() for i in range(len(text))]


def demote(tier, text):
    node = None
    for index, key in enumerate(keys(text)):
        node = CachedBlock(key, node, index + 1, index + 1)
    tier.demote(node, 7, Place.END)
    tier.take()


def length(tier, text):
    start = tier.longest(Match([], None, [], keys(text)), 100)
    return None if start is None else start.num_blocks


def num_free(tier):
    return tier._pages.num_free


def test_only_what_host_memory_lacks_is_read():
    tier = make()
    demote(tier, "abc")
    before = num_free(tier)
    assert tier.num_missing_pages(keys("abde")) == 2 + STATE_PAGES
    reserved = tier.reserve(keys("abde"), "")
    assert reserved.keys == tuple(keys("abde")[2:])
    assert (len(reserved.block_pages), len(reserved.state_pages)) == (2, STATE_PAGES)
    assert length(tier, "abde") is None
    used = tier.enter(reserved, Place.BRANCH)
    assert sorted(used) == sorted((*reserved.block_pages, *reserved.state_pages))
    assert length(tier, "abde") == 4
    assert num_free(tier) == before - 2 - STATE_PAGES
    assert tier.longest(Match([], None, [], keys("abde")), 100).place is Place.BRANCH


def test_a_start_that_could_not_be_read_leaves_nothing():
    tier = make()
    demote(tier, "abc")
    before = num_free(tier)
    reserved = tier.reserve(keys("abde"), "")
    demote(tier, "xyz")
    tier.clear()
    assert length(tier, "abc") is None
    tier.cancel(reserved)
    assert (num_free(tier), tier._blocks, before) == (20, {}, 15)


def test_the_blocks_before_a_start_that_is_read_stay():
    tier = make(num_pages=10)
    demote(tier, "abc")
    reserved = tier.reserve(keys("abde"), "")
    demote(tier, "uv")
    assert length(tier, "abc") is None, "the state has gone, the blocks have not"
    tier.enter(reserved, Place.INNER)
    assert length(tier, "abde") == 4
    tier.clear()
    assert num_free(tier) == 10


def test_what_was_demoted_meanwhile_is_not_kept_twice():
    tier = make()
    reserved = tier.reserve(keys("abc"), "")
    demote(tier, "abc")
    assert tier.enter(reserved, Place.END) == []
    assert num_free(tier) == 20 - 3 - STATE_PAGES
    tier.clear()
    assert num_free(tier) == 20


def test_a_start_that_is_written_is_not_given_up():
    tier = make(num_pages=10)
    demote(tier, "abc")
    demote(tier, "xyz")
    oldest = next(iter(tier._starts))
    tier.pin(oldest)
    demote(tier, "uvw")
    assert [length(tier, text) for text in ("abc", "xyz", "uvw")] == [3, None, 3]
    tier.unpin(oldest)
    demote(tier, "rst")
    assert length(tier, "abc") is None


def test_a_start_without_kv_takes_pages_for_its_state():
    tier = make(has_kv=False, state_pages=1)
    reserved = tier.reserve(keys("abc"), "")
    assert (reserved.keys, reserved.num_before, reserved.block_pages) == ((b"abc",), 2, ())
    tier.enter(reserved, Place.END)
    assert length(tier, "abc") == 3


def test_without_files_nothing_is_asked():
    host = make()
    tier = FileTier(host)
    choices = FileChoices(tier, host, NoFiles())
    demote(host, "abc")
    tier.note()
    assert (choices.news(), choices.wait_s()) == (None, None)
    tier.take_news(None)
    assert (tier.take(), tier.arrived) == (NO_JOBS, [b"abc"])
    tier.take_news(None)
    assert tier.arrived == []
    assert not tier.holds_up(None)


def test_what_came_to_host_memory_since_it_was_looked_up_is_not_read():
    """Without states, a request can start behind any block that is there."""
    host = make(state_pages=0)
    demote(host, "abc")
    tier = FileTier(host)
    assert tier.fetch(1, keys("ab"), "") is None
    assert tier.fetch(2, keys("abx"), "") is not None
    assert list(tier.fetches) == [2]
