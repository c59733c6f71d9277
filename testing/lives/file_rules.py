"""Rules and checks for files behind host memory: reads, writes, faults, time, the end of the process."""

from collections import Counter
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from engine.files.file_choices import FileChoices
from engine.files.file_tier import FileTier
from engine.files.start_files import longest_start
from engine.request import Request
from testing.lives.invariants import BLOCK, OwnedOnce
from testing.lives.modelled_files import ModelledFiles
from wire.messages.sampling_params import SamplingParams

KNOWN_MEANWHILE = "read, and known meanwhile"
"""A read has ended whose start has come to host memory from the device."""
BEHIND_NOTHING = "not read, behind nothing else"
"""A read has failed, and the last block before it in host memory leads to no other start."""
RECALLED = 20
"""Of so many prompts, the last ones, one may come again."""
MOST_RECALLED = 50
"""Tokens of such a prompt. Some have nearly all that the model's context takes, with their answers."""
FAULTS = ("fail", "damage", "damage", "drop_oldest")


class FileRules(OwnedOnce):
    """Read, write, wait, give up, fail, restart. Time passes only when a rule says so.

    The machine can ``boot`` a process and let it take ``one_step``.
    """

    has_files = False
    seen: ClassVar[Counter] = Counter()
    """Counts what has happened, so that a test can tell that it has."""

    def make_files(self, speeds, segments):
        """Make files that take ``page_s`` for a page, and segments of so many records."""
        page_s, self.block_s, self.wait_s = speeds
        records_each, max_segments = segments
        self.files = ModelledFiles(
            has_kv=self.has_kv,
            has_state=self.has_state,
            page_s=page_s,
            records_each=records_each,
            max_segments=max_segments,
            seen=self.seen,
        )

    def make_file_tier(self, tier):
        if self.files is None:
            return None
        return FileTier(tier, self.files.figures)

    def make_choices(self, owned):
        """Make what decides about the files of a booted process."""
        self.choices = None
        if self.files is not None:
            self.choices = FileChoices(
                *(owned.files, owned.cache.tier, self.files, None, owned.look_ups),
                compute_s=self.compute_s,
                least_wait_s=self.wait_s,
                clock=lambda: self.now,
            )

    def tell(self):
        """Decide about files, before a plan, as the engine does."""
        owned = self.scheduler.owned
        came = list(owned._newcomers.values())
        for request in came:
            request.longest_wait_s = self.longest_wait_s(request)
        news = None if self.choices is None else self.choices.news()
        self.note_ends(news)
        owned.take_file_news(news)
        self.seen["asked of files"] += sum(request.fetch is not None for request in came)

    def note_ends(self, news):
        """Counts reads that find host memory changed at their end."""
        owned = self.scheduler.owned
        for ended in () if news is None else news.ended:
            fetch = owned.files.fetches.get(ended.number)
            if fetch is None:
                continue
            known, is_here = fetch.reserved.known, owned.cache.tier.start(fetch.job.start) is not None
            is_last = known is not None and not known.is_start and known.num_children == 1
            self.seen[KNOWN_MEANWHILE] += ended.is_done and is_here
            self.seen[BEHIND_NOTHING] += not ended.is_done and is_last

    def compute_s(self, start, end):
        return (end - start) * self.block_s

    # --- waits -----------------------------------------------------------------------------------

    def check_waits(self, plan):
        """No request waits for files for longer than computing takes, and whoever waits is woken."""
        files = self.scheduler.owned.files
        if plan.is_short_of_blocks:  # nobody is admitted then, so nobody's wait has begun
            return
        held = [one for one in self.scheduler.waiting.values() if files.holds_up(one.fetch)]
        for request in held:
            begun_s = self.waits.setdefault(request.request_id, self.now)
            assert self.now < begun_s + request.longest_wait_s, "a request waits longer than computing takes"
        wait_s = None if self.choices is None else self.choices.wait_s()
        assert wait_s is not None or not held, "nobody will look after the requests"
        self.seen["waits"] += len(held)

    def longest_wait_s(self, request):
        """The time that computing takes what only files have when the request is looked up in them."""
        if self.files is None or request.ticket is not None:
            return 0.0
        known, length = self.known_and_in_files(request)
        return max(self.compute_s(known, length), self.wait_s)

    def known_and_in_files(self, request):
        """Return the blocks of the request's longest start on the device or in host memory, and of the
        longest one in files: 0 if it is not longer."""
        owned = self.scheduler.owned
        found, most = owned._match(request), (request.target - 1) // BLOCK
        in_host = owned.cache.tier.longest(found, most)
        known = len(found.nodes) if in_host is None else in_host.num_blocks
        return known, longest_start(self.files, found.keys[:most], known)

    def pass_time(self):
        """Lets files work in every second life, and time pass only as far as a waiting request asks for."""
        if self.files is None:
            return
        if self.seed % 2:
            self.files.work(3)
        self.now += self.choices.wait_s() or 0.0

    # --- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: self.has_files)
    @rule(num_pages=st.sampled_from([1, 2, 5, 20, 100]))
    def files_work(self, num_pages):
        self.files.work(num_pages)

    @precondition(lambda self: self.has_files)
    @rule(seconds=st.sampled_from([0.125, 1.0, 8.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.files.recover()

    @precondition(lambda self: self.has_files)
    @rule(num_pages=st.integers(0, 6), fault=st.sampled_from(FAULTS))
    def files_fail(self, num_pages, fault):
        self.files.work(num_pages)
        getattr(self.files, fault)()

    @precondition(lambda self: self.has_files)
    @rule(on_device=st.booleans(), in_host=st.booleans())
    def forget(self, on_device, in_host):
        """Others need all that the device can give up, or that host memory can."""
        owned = self.scheduler.owned
        if on_device:
            owned.blocks.free(owned.cache.allocate_blocks(owned.cache.num_available_blocks))
            owned.slots.free([owned.cache.allocate_slot() for _ in range(owned.cache.num_available_slots)])
            self.one_step()
        if in_host:
            owned.cache.tier.purge(lambda salt: True)

    @precondition(lambda self: self.has_files)
    @rule(pick=st.integers(0, 99))
    def recall(self, pick):
        """A prompt comes again of which only files have the beginning."""
        again = [self.ask_again(*one) for one in self.asked[-RECALLED:]]
        found = [(one, *self.known_and_in_files(one)) for one in again]
        found = [(one, known) for one, known, length in found if length]
        found = [(one, known) for one, known in found if known] or found
        if found:
            self.scheduler.add(found[pick % len(found)][0])

    def ask_again(self, tokens, salt):
        self.count += 1
        params = SamplingParams(max_tokens=2)
        request = Request(f"r{self.count}", [*tokens[:MOST_RECALLED], 99], params, cache_salt=salt)
        request.stops_after = request.breaks_after = 0
        return request

    @property
    def is_reading(self):
        return bool(self.scheduler.owned.files.fetches)

    @precondition(lambda self: self.has_files)
    @rule()
    def overtake(self):
        """A start that is read slowly is computed meanwhile, and given up by the device. Then it is read."""
        owned = self.scheduler.owned
        for fetch in list(owned.files.fetches.values())[:1]:
            for _ in range(40):
                node = owned.cache.start(fetch.job.start)
                if node is not None and not node.num_users:
                    break
                self.now += 8.0
                self.one_step()
            self.forget(on_device=True, in_host=False)
            self.files.work(100)
            self.one_step()

    @precondition(lambda self: self.has_files and self.count > 3)
    @rule()
    def restart(self):
        """The process is killed, whatever is under way. Its files stay."""
        self.files.restart()
        self.boot()
        self.seen["restart"] += 1
