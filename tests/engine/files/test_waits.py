"""For how long requests wait for a start that is being read from files."""

from collections import Counter

import pytest

from engine.files.file_tier import FileTier
from engine.memory.cached_start import CachedBlock, Match
from engine.memory.host_tier import HostMemory, HostTier
from kv_transfer.files.file_index import Contents
from kv_transfer.files.record import Record
from kv_transfer.files.seal import CHECK_BYTES
from testing.lives.modelled_files import ModelledFiles


def keys(text):
    return [text[: i + 1].encode() for i in range(len(text))]


@pytest.fixture
def host():
    return HostTier(HostMemory(40, 10, 1))


@pytest.fixture
def files():
    """They have a start behind four blocks."""
    made = ModelledFiles(
        has_kv=True, has_state=True, page_s=0.1, records_each=1, max_segments=9, seen=Counter()
    )
    made.index.add(Contents(), Record(1, tuple(keys("abcd")), b"", 4, 0, 4, b"x" * 5 * CHECK_BYTES, 1))
    return made


def demote(host, text):
    node = None
    for index, key in enumerate(keys(text)):
        node = CachedBlock(key, node, index + 1, index + 1)
    host.demote(node, 7)
    host.take()


def test_a_request_waits_as_long_as_computing_takes_from_when_it_could_be_admitted(host, files):
    now = [5.0]
    tier = FileTier(host, files, compute_s=lambda start, end: float(end - start), clock=lambda: now[0])
    fetch = tier.fetch(Match(keys=keys("abcdef")), 6)
    now[0] = 9.0
    assert tier.holds_up(fetch)
    assert tier.wait_s == 4.0
    now[0] = 12.5
    assert tier.holds_up(fetch)
    now[0] = 13.0
    assert not tier.holds_up(fetch)
    assert (tier.wait_s, tier.figures.late) == (None, 1)


def test_a_request_with_less_to_compute_does_not_wait_for_one_that_has_more(host, files):
    now = [0.0]
    tier = FileTier(host, files, compute_s=lambda start, end: float(end - start), clock=lambda: now[0])
    first = tier.fetch(Match(keys=keys("abcde")), 5)
    assert tier.holds_up(first)
    assert tier.fetch(Match(keys=keys("abcdf")), 5) is first
    demote(host, "abc")
    assert tier.fetch(Match(keys=keys("abcdg")), 5) is None, "it has one block to compute, not four"
    now[0] = 3.0
    assert tier.fetch(Match(keys=keys("abcdh")), 5) is first
