"""For how long requests wait for a start that is being read from files."""

from collections import Counter

import pytest

from engine.files.file_choices import FileChoices, LookUp
from engine.files.file_tier import FileTier
from engine.memory.cached_start import CachedBlock, Match
from engine.memory.host_tier import HostMemory, HostTier
from kv_transfer.files.file_index import Contents
from kv_transfer.files.record import Record
from kv_transfer.files.seal import CHECK_BYTES
from testing.lives.modelled_files import ModelledFiles


def keys(text):
    return [text[: i + 1].encode() for i in range(len(text))]


class World:
    """Files that have a start behind four blocks. Computing a block takes a second."""

    def __init__(self):
        self.host = HostTier(HostMemory(40, 10, 1))
        files = ModelledFiles(
            has_kv=True, has_state=True, page_s=0.1, records_each=1, max_segments=9, seen=Counter()
        )
        files.index.add(Contents(), Record(1, tuple(keys("abcd")), b"", 4, 0, 4, b"x" * 5 * CHECK_BYTES, 1))
        self.tier = FileTier(self.host, files.figures)
        self.now_s = 0.0
        self.come = []
        self.choices = FileChoices(
            *(self.tier, self.host, files, None, lambda *, has_neighbour: self.come),
            compute_s=lambda start, end: float(end - start),
            clock=lambda: self.now_s,
        )

    def fetch(self, text):
        """What a request waits for that comes with this prompt."""
        self.come = [LookUp("request", Match(keys=keys(text)), len(text))]
        reads = self.land()
        self.come = []
        if not reads:
            return None
        return self.tier.fetch(reads[0].number, keys(text)[: reads[0].num_blocks], "")

    def land(self):
        news = self.choices.news()
        self.tier.take_news(news)
        return () if news is None else news.reads

    def demote(self, text):
        node = None
        for index, key in enumerate(keys(text)):
            node = CachedBlock(key, node, index + 1, index + 1)
        self.host.demote(node, 7)
        self.host.take()


@pytest.fixture
def world():
    return World()


def test_a_request_waits_as_long_as_computing_takes_from_when_it_could_be_admitted(world):
    fetch = world.fetch("abcdef")
    world.now_s = 9.0
    world.land()
    assert world.tier.holds_up(fetch)
    assert world.choices.wait_s() == 4.0
    world.now_s = 12.5
    world.land()
    assert world.tier.holds_up(fetch)
    world.now_s = 13.0
    world.land()
    assert not world.tier.holds_up(fetch)
    assert (world.choices.wait_s(), world.tier.figures.late) == (None, 1)


def test_a_request_with_less_to_compute_does_not_wait_for_one_that_has_more(world):
    first = world.fetch("abcde")
    assert world.tier.holds_up(first)
    assert world.choices.wait_s() == 4.0
    assert world.fetch("abcdf") is first
    world.demote("abc")
    assert world.fetch("abcdg") is None, "it has one block to compute, not four"
    world.now_s = 3.0
    assert world.fetch("abcdh") is first


def test_nobody_waits_for_a_read_that_is_late(world):
    first = world.fetch("abcde")
    assert world.tier.holds_up(first)
    world.choices.wait_s()
    world.now_s = 4.0
    assert world.fetch("abcdf") is None
    assert first.is_late
