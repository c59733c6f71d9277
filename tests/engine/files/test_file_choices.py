"""What is written, read and waited for. Two ranks that take the same news stay equal."""

import pytest

from engine.files.file_choices import FileChoices, LookUp
from engine.files.file_tier import FileTier
from engine.files.start_files import EndedJob, NoFiles
from engine.memory.cached_start import CachedBlock, Match, Place
from engine.memory.host_tier import HostMemory, HostTier

LIMIT_S = 3.0


class Shelf(NoFiles):
    """Files of which the test says what they hold, how fast they are, and what has ended."""

    is_on = True
    may_write = True

    def __init__(self, *starts):
        super().__init__()
        self.starts = {text.encode() for text in starts}
        self.read_s = 1.0
        self.ended = []

    def has_start(self, key):
        return key in self.starts

    def num_known(self, keys):
        return next(
            (n for n, key in enumerate(keys) if not any(s.startswith(key) for s in self.starts)), len(keys)
        )

    def seconds(self, num_pages):
        return self.read_s

    def landed(self):
        ended, self.ended = self.ended, []
        return ended


class Rank:
    def __init__(self, state_pages):
        self.host = HostTier(HostMemory(20, 10, state_pages))
        self.tier = FileTier(self.host)


class Server:
    """Two ranks, and the choices of the first one."""

    def __init__(self, *starts, state_pages=2):
        self.ranks = [Rank(state_pages), Rank(state_pages)]
        self.shelf = Shelf(*starts)
        self.now_s = 0.0
        self.come = []
        self.waiting = {}
        self.choices = FileChoices(
            *(self.ranks[0].tier, self.ranks[0].host, self.shelf, None, self.look_ups),
            compute_s=lambda start, end: LIMIT_S,
            clock=lambda: self.now_s,
        )

    def look_ups(self, *, has_neighbour):
        assert not has_neighbour, "there are files"
        return self.come

    def step(self, *prompts):
        """Returns the jobs of a plan before which requests with these prompts have come."""
        self.come = [LookUp(text, Match([], None, [], keys(text)), len(text)) for text in prompts]
        news = self.choices.news()
        plans = []
        for rank in self.ranks:
            rank.tier.take_news(news)
            for read in () if news is None else news.reads:
                fetch = rank.tier.fetch(read.number, keys(read.request_id)[: read.num_blocks], "")
                if rank is self.ranks[0]:
                    self.waiting[read.request_id] = fetch
            rank.host.take()
            plans.append(rank.tier.take())
        first, second = plans
        described = [
            [
                (job.number, job.keys, job.parent, job.block_pages, job.state_pages)
                for job in (*p.reads, *p.writes)
            ]
            for p in plans
        ]
        assert described[0] == described[1]
        assert first.landed_pages == second.landed_pages
        assert contents(self.ranks[0].host) == contents(self.ranks[1].host)
        return first

    def demote(self, text):
        for rank in self.ranks:
            node = None
            for index, key in enumerate(keys(text)):
                node = CachedBlock(key, node, index + 1, index + 1)
            rank.host.demote(node, 7, Place.END)

    def end(self, job, *, is_done=True, is_write=False):
        self.shelf.ended.append(EndedJob(job, is_done, is_write, Place.END))

    def holds_up(self, text):
        return self.ranks[0].tier.holds_up(self.waiting.get(text))


def keys(text):
    return [text[: i + 1].encode() for i in range(len(text))]


def contents(host):
    return [(start.key, start.state_pages, start.is_pinned) for start in host._starts], host._pages.num_free


def test_nothing_is_written_of_a_model_without_states_whose_blocks_are_all_in_files():
    server = Server("abc", state_pages=0)
    server.shelf.has_start = lambda key: False  # a disk has failed: nothing is read for a while
    server.demote("abc")
    server.step()
    assert server.step().writes == ()
    server.demote("abcd")
    server.step()
    assert [job.keys for job in server.step().writes] == [(b"abcd",)]


def test_starts_are_written_one_at_a_time_in_the_order_in_which_they_came():
    server = Server()
    for text in ("abc", "abd", "x"):
        server.demote(text)
    server.step()
    (first,) = server.step().writes
    assert (first.start, first.keys, first.parent) == (b"abc", (b"a", b"ab", b"abc"), b"")
    assert server.ranks[1].host.start(b"abc").is_pinned
    assert server.step().writes == ()
    server.shelf.starts.add(b"abc")
    server.end(first, is_write=True)
    (second,) = server.step().writes
    assert (second.start, second.keys, second.parent) == (b"abd", (b"abd",), b"ab")
    assert not server.ranks[1].host.start(b"abc").is_pinned
    server.end(second, is_write=True)
    (third,) = server.step().writes
    assert len({first.number, second.number, third.number}) == 3
    server.end(third, is_write=True)
    assert server.step().writes == ()
    assert not server.choices.has_work


def test_what_host_memory_has_given_up_by_then_is_dropped():
    server = Server()
    server.demote("abc")
    server.step()
    for rank in server.ranks:
        rank.host.clear()
    assert server.step().writes == ()
    assert server.shelf.figures.dropped == 1


def test_a_request_waits_until_its_start_is_there():
    server = Server("abcd")
    (job,) = server.step("abcdef").reads
    assert (job.start, job.num_blocks) == (b"abcd", 4)
    assert server.holds_up("abcdef")
    assert server.choices.wait_s() == LIMIT_S
    server.now_s = LIMIT_S - 1
    server.step()
    assert server.holds_up("abcdef")
    assert server.choices.wait_s() == 1
    server.end(job)
    assert len(server.step().landed_pages) == 4 + 2
    assert not server.holds_up("abcdef")
    assert server.choices.wait_s() is None
    assert server.step("abcdef").reads == ()
    assert server.shelf.figures.late == 0


def test_a_request_waits_no_longer_than_computing_takes_from_when_it_could_begin():
    server = Server("abcd")
    (job,) = server.step("abcdef").reads
    server.now_s = 100.0
    server.step()
    assert server.choices.wait_s() is None
    assert server.holds_up("abcdef")
    assert server.choices.wait_s() == LIMIT_S
    server.now_s += LIMIT_S
    server.step()
    assert not server.holds_up("abcdef")
    assert (server.choices.wait_s(), server.shelf.figures.late) == (None, 1)
    assert server.step("abcdeg").reads == ()
    assert not server.holds_up("abcdeg"), "it comes too late for others too"
    server.end(job)
    assert server.step().landed_pages


def test_requests_wait_for_one_read_of_the_same_start():
    server = Server("abcd")
    (job,) = server.step("abcdef", "abcdeg").reads
    assert server.step("abcdx").reads == ()
    assert server.waiting["abcdef"] is server.waiting["abcdeg"] is server.waiting["abcdx"]
    server.end(job, is_done=False)
    assert server.step("abcdy").reads == ()
    assert "abcdy" not in server.waiting, "a read that has just ended is not waited for"
    assert not server.holds_up("abcdx")
    assert server.ranks[1].host._pages.num_free == 20


@pytest.mark.parametrize(("read_s", "num_reads"), [(LIMIT_S, 1), (LIMIT_S + 0.1, 0)])
def test_what_takes_longer_to_read_than_to_compute_is_computed(read_s, num_reads):
    server = Server("abcd")
    server.shelf.read_s = read_s
    assert len(server.step("abcdef").reads) == num_reads
    assert server.shelf.figures.computed == 1 - num_reads


def test_no_room_in_host_memory_is_no_wait():
    server = Server("abcdefghijklmnopqrst")
    assert server.step("abcdefghijklmnopqrstu").reads == ()
    server.step()
    assert (server.choices._limit_s, server.choices.wait_s()) == ({}, None)
