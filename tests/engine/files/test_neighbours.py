"""Which starts of other servers are read, and what becomes of those that do not come."""

import pytest

from engine.files.file_choices import FileChoices, LookUp
from engine.files.file_tier import FileTier
from engine.files.start_files import EndedJob, NoFiles
from engine.memory.cached_start import CachedBlock, Match, Place
from engine.memory.host_tier import HostMemory, HostTier
from telemetry.engine_metrics import NeighbourCacheFigures

ADDRESS = "10.0.0.2:8100"


class ScriptedNeighbours:
    """Neighbours whose reads end when the test says so."""

    is_on = True

    def __init__(self):
        self.figures = NeighbourCacheFigures()
        self.read_s, self.is_paused = 0.0, False
        self._landed = []

    def may_read(self, address):
        return not self.is_paused

    def seconds(self, num_pages):
        return self.read_s

    def end(self, job, is_done=True):
        self._landed.append(EndedJob(job, is_done, is_write=False, place=int(Place.BRANCH)))

    def landed(self):
        landed, self._landed = self._landed, []
        return landed


class World:
    def __init__(self, num_pages=20, **settings):
        self.host = HostTier(HostMemory(num_pages, 10, 2))
        self.neighbours = ScriptedNeighbours()
        self.now_s = 0.0
        self.come = []
        settings = {"compute_s": lambda start, end: float(end - start), **settings}
        self.tier = FileTier(self.host, neighbour_figures=self.neighbours.figures)
        self.choices = FileChoices(
            *(self.tier, self.host, NoFiles(), self.neighbours, self.look_ups),
            clock=lambda: self.now_s,
            **settings,
        )

    def look_ups(self, *, has_neighbour):
        assert has_neighbour, "there are no files"
        return self.come

    def fetch(self, text, num_blocks, most=100, on_device=0):
        """What a request waits for that comes with this prompt."""
        keys = [text[: i + 1].encode() for i in range(len(text))]
        nodes = [CachedBlock(key, None, i + 1, i + 1) for i, key in enumerate(keys[:on_device])]
        self.come = [LookUp("request", Match(nodes, None, [], keys), most, ADDRESS, num_blocks)]
        reads = self.land()
        self.come = []
        if not reads:
            return None
        (read,) = reads
        return self.tier.fetch(read.number, keys[: read.num_blocks], "", read.address)

    def land(self):
        """Lets a step take the news."""
        news = self.choices.news()
        self.tier.take_news(news)
        return () if news is None else news.reads

    def has(self, text):
        return self.host.usable(text.encode()) is not None


def test_a_start_that_a_neighbour_has_is_read_into_host_memory():
    world = World()
    fetch = world.fetch("abcd", 3)
    assert world.tier.holds_up(fetch)
    (job,) = world.tier.take().reads
    assert (job.address, job.start, job.num_blocks, job.num_pages) == (ADDRESS, b"abc", 3, 5)
    assert world.fetch("abcx", 3) is fetch, "a second request waits for the same read"
    world.neighbours.end(job)
    world.land()
    assert not world.tier.holds_up(fetch)
    assert world.has("abc")
    assert len(world.tier.take().landed_pages) == 5
    assert world.tier.take().reads == ()


def test_what_is_here_is_not_read():
    world = World()
    assert world.fetch("abcd", 3, on_device=3) is None
    fetch = world.fetch("abcd", 3, on_device=1)
    (job,) = world.tier.take().reads
    assert job.num_pages == 5, "host memory has its blocks too"
    world.neighbours.end(job)
    world.land()
    assert fetch.has_ended
    assert world.fetch("abcx", 3) is None
    (job,) = (world.fetch("abcde", 5) and world.tier.take()).reads
    assert len(job.block_pages) == 2


def test_a_start_that_takes_too_long_is_computed():
    world = World()
    world.neighbours.read_s = 3.5
    assert world.fetch("abcd", 3) is None
    assert world.neighbours.figures.computed == 1
    patient = World(neighbour_wait_s=4.0)
    patient.neighbours.read_s = 3.5
    assert patient.fetch("abcd", 3) is not None


def test_a_request_waits_no_longer_than_computing_takes():
    world = World()
    fetch = world.fetch("abcd", 3)
    assert world.tier.holds_up(fetch)
    assert world.choices.wait_s() == 3.0
    world.now_s = 3.1
    world.land()
    assert not world.tier.holds_up(fetch)
    assert world.neighbours.figures.late == 1
    (job,) = world.tier.take().reads
    world.neighbours.end(job)
    world.land()
    assert world.has("abc"), "the next request finds it"


@pytest.mark.parametrize("way", ["paused", "too long for the prompt", "no room"])
def test_nothing_is_read_that_can_not_be_used(way):
    world = World(num_pages=4 if way == "no room" else 20)
    world.neighbours.is_paused = way == "paused"
    assert world.fetch("abcd", 3, most=2 if way == "too long for the prompt" else 100) is None
    assert world.tier.take().reads == ()


def test_a_read_that_fails_leaves_nothing():
    world = World()
    fetch = world.fetch("abcd", 3)
    (job,) = world.tier.take().reads
    world.neighbours.end(job, is_done=False)
    world.land()
    assert not world.tier.holds_up(fetch)
    assert not world.has("abc")
    assert world.host._pages.num_free == 20


def test_what_a_leaving_server_offers_is_read_within_a_bound():
    world, read = World(), []
    keys = [b"a", b"ab", b"abc"]
    assert world.choices.take_over(keys, "", ADDRESS, 4, read.append) == 0, "it takes five pages"
    assert world.choices.take_over(keys, "", ADDRESS, 5, read.append) == 5
    assert world.choices.take_over(keys, "", ADDRESS, 5, read.append) == 0, "it is on its way"
    (job,) = world.tier.take().reads
    assert world.choices.wait_s() is None, "no request waits for it"
    world.neighbours.end(job)
    world.land()
    assert read == [True]
    assert world.choices.take_over(keys, "", ADDRESS, 5, read.append) == 0, "it is here"
