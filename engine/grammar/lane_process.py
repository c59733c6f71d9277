"""Code of a lane, a process that compiles grammars and computes masks, so that no grammar can stall the
server.

The library (llguidance) limits only counts of items, which bounds neither time nor memory tightly enough:
within its limits a mask of an ambiguous grammar can take half a second. In a lane the operating system limits
time and memory. If a job takes more processor time than allowed, the signal ``SIGPROF`` ends the process. If
a job needs more memory than allowed, an allocation fails, which ends the process too.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from engine.grammar.messages import Followed, FollowedAll, Job, Jobs, LaneReady
from wire.codec import decode, encode
from wire.idle_class import run_behind_others, run_when_idle

KEPT_GRAMMARS = 32
"""Number of compiled grammars that a shared lane keeps, since clients use one schema in many requests."""
PROBE_S = 0.05
"""A grammar may use a shared lane only if it is compiled and gives its first mask in this processor time.
Schemas of tools take 10 to 15 ms in a copy, and up to 28 ms on a busy machine. If they were taken for slow,
they would starve there."""
SLOW_JOB_S = 0.005
"""A follower whose job took longer has to leave the shared lane, since other followers have to wait for
it."""
FLUSH_S = 0.001
MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True)
class LaneSettings:
    """What a lane's process is given at its start."""

    tokenizer: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    is_shared: bool
    is_probing: bool
    """Whether the lane follows no answers, and only finds out which grammars are quick enough for a shared
    lane."""
    max_job_s: float
    """Maximum processor time of one job."""
    base_s: float
    """All jobs together may take this much processor time, plus ``per_job_s`` for each job; 0: no limit."""
    per_job_s: float
    max_bytes: int
    """Maximum memory in addition to the memory that the process uses when it is ready."""

    @property
    def num_words(self) -> int:
        """W: number of int32 words that hold one bit for each token."""
        return (self.vocab_size + 31) // 32


def run(connection: Connection, settings: LaneSettings) -> None:
    """Runs in the lane's process: does jobs until the server is gone or closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    # Lanes have a lower priority than steps: a late mask delays only its own row, a late step all rows.
    if settings.is_shared:
        run_behind_others()
    else:
        run_when_idle()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes to stderr when it dies
    try:
        tokenizer = _load_tokenizer(settings)
    except (OSError, ValueError) as error:
        connection.send_bytes(encode(LaneReady(str(error))))
        return
    _limit_memory(settings.max_bytes)
    connection.send_bytes(encode(LaneReady(None)))
    lane = _Lane(tokenizer, settings)
    try:
        while True:
            lane.work(decode(connection.recv_bytes(), Jobs), connection)
    except (EOFError, OSError):  # the server is gone
        pass


def _load_tokenizer(settings: LaneSettings) -> LLTokenizer:
    text = settings.tokenizer.read_text(encoding="utf-8")
    return LLTokenizer(text, n_vocab=settings.vocab_size, eos_token=list(settings.eos_token_ids))


def _limit_memory(max_bytes: int) -> None:
    """Makes allocations of more than ``max_bytes`` from now on fail, which ends the process."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class _Lane:
    def __init__(self, tokenizer: LLTokenizer, settings: LaneSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._limits = LLParserLimits(verbose_errors=False)  # messages go to clients and logs
        self._matchers: dict[int, LLMatcher] = {}
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._allowed_s = settings.base_s

    def work(self, jobs: Jobs, connection: Connection) -> None:
        """Does the jobs and sends the answers.

        When jobs take long, it sends the finished answers early, so that few answers are lost if the process
        is killed.
        """
        for key in jobs.ended:
            self._matchers.pop(key, None)
        followed: list[Followed] = []
        flushed_s = time.monotonic()
        for job in jobs.jobs:
            followed.append(self._follow(job))
            if (now := time.monotonic()) - flushed_s > FLUSH_S:
                connection.send_bytes(encode(FollowedAll(tuple(followed))))
                followed, flushed_s = [], now
        signal.setitimer(signal.ITIMER_PROF, 0)
        if followed:
            connection.send_bytes(encode(FollowedAll(tuple(followed))))

    def _follow(self, job: Job) -> Followed:
        if self._settings.is_probing:
            return Followed(job.key, b"", None, not self._is_quick(job))
        began_s = time.thread_time()
        self._arm()
        matcher = self._matchers[job.key] if job.grammar is None else self._open(job, job.grammar)
        failing = "compiled" if matcher.is_error() else "followed"
        masks = _masks(matcher, job, self._settings)
        error = f"can't be {failing}: {_short(matcher.get_error())}" if matcher.is_error() else None
        is_slow = job.grammar is None and time.thread_time() - began_s > SLOW_JOB_S
        return Followed(job.key, masks, error, is_slow)

    def _arm(self) -> None:
        """Makes the operating system end this process if the next job takes more processor time than
        allowed."""
        settings = self._settings
        limit_s = settings.max_job_s
        if settings.base_s:
            self._allowed_s += settings.per_job_s
            limit_s = min(limit_s, self._allowed_s - time.process_time())
        signal.setitimer(signal.ITIMER_PROF, max(limit_s, 0.001))

    def _is_quick(self, job: Job) -> bool:
        """Whether a shared lane can begin with the job's grammar without stalling other followers.

        A copy of this process tries the grammar: the library can't be interrupted, but a process can be
        killed.
        """
        assert job.grammar is not None
        copy = os.fork()
        if copy == 0:
            signal.setitimer(signal.ITIMER_PROF, PROBE_S)
            try:
                _masks(self._compile(job.grammar), job, self._settings)
            finally:
                os._exit(0)
        _, status = os.waitpid(copy, 0)
        return status == 0

    def _open(self, job: Job, grammar: str) -> LLMatcher:
        kept = job.salt, grammar
        compiled = self._compiled.get(kept)
        if compiled is None:
            compiled = self._compiled[kept] = self._compile(grammar)
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(kept)
        matcher = self._matchers[job.key] = compiled.deep_copy()
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)


def _masks(matcher: LLMatcher, job: Job, settings: LaneSettings) -> bytes:
    """Advances the matcher over the job's tokens and returns the masks after them and after each draft.

    After the drafts are tried, the matcher is rolled back to the end of the tokens.
    """
    masks = np.full((1 + len(job.drafts), settings.num_words), -1, dtype=np.int32)
    if not matcher.is_error():
        matcher.consume_tokens(list(job.token_ids))
    if matcher.is_error():
        return b""
    fill_next_token_bitmask(matcher, masks, 0)
    matcher.rollback(_try_drafts(matcher, job.drafts, masks, settings.eos_token_ids))
    return masks.tobytes()


def _try_drafts(
    matcher: LLMatcher, drafts: Sequence[int], masks: NDArray[np.int32], eos_token_ids: Sequence[int]
) -> int:
    """Fills the mask after each draft, up to the first draft that is forbidden or ends the answer.

    Returns how many drafts the matcher consumed.
    """
    for i, draft in enumerate(drafts):
        if matcher.is_error() or draft in eos_token_ids or matcher.try_consume_tokens([draft]) != 1:
            return i
        fill_next_token_bitmask(matcher, masks, i + 1)
    return len(drafts)


def _short(message: str) -> str:
    text = " ".join(message.removesuffix("<non-verbose/>").split())
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"
