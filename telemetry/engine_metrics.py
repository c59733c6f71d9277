"""What a server counts and times while it works, in addition to the stats that it sends to routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from telemetry.histogram import Tally

StepKind = Literal["decode", "prefill", "mixed"]
"""The rows of a step: decode rows alone, prefill rows alone, or both."""
StepRun = Literal["graph", "eager"]
"""Whether the step was one launch of a captured graph."""
End = Literal["stop", "length", "cancelled", "error", "moved", "prefilled"]
"""A finish reason, or ``prefilled``: the prompt waits to be read by a decode server."""
CacheTier = Literal["device", "host"]
"""Where a cached prompt was found: on the device or in host memory."""
Fault = Literal["state", "logits"]
"""What showed that a request's memory was damaged: the sanitizer before a step, or logits that are not
finite."""

STEP_S = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TRANSFER_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
    30.0,
)
POWERS = tuple(float(1 << i) for i in range(15))
"""Bounds of buckets for numbers of rows and tokens: 1, 2, 4, … 16,384."""


@dataclass
class HostCacheFigures:
    """What one rank's host memory has of cached prefixes, and what has moved since the server's start."""

    size_bytes: int = 0
    used_bytes: int = 0
    retained_bytes: int = 0
    """The part that holds retained starts of sessions, as if they shared nothing."""
    demoted: int = 0
    """Prefixes that were copied from the device."""
    promoted: int = 0
    """Prefixes that were copied back."""
    promoted_tokens: int = 0
    """Tokens that were not computed for that."""
    dropped: int = 0
    """Prefixes that the device gave up and that host memory did not take: there was no room for them, or the
    step had copied enough."""


FileFailure = Literal["damaged", "torn", "foreign", "gone", "read", "write", "full"]
"""Why a cached prefix in a file is of no use, or could not be written. ``damaged``: other bytes than were
written. ``torn``: its end was never written. ``foreign``: of another model, layout or key. ``gone``: deleted.
``read`` and ``write``: the file system reports an error. ``full``: it has no room."""
PACE_TOKENS = 64
"""A step with fewer tokens of prompts says little about how long computing a prompt takes."""
PACE_WEIGHT = 0.25


@dataclass(frozen=True)
class RankFileFigures:
    """What the files of a rank other than 0 take, and what has moved there since the server's start."""

    used_bytes: int
    read_bytes: int
    written_bytes: int
    failures: Mapping[str, int]


@dataclass
class FileCacheFigures:
    """What a server's files have of cached prefixes, and what has moved since the server's start.

    Prefixes are counted by rank 0. For bytes and failures on all ranks see :meth:`total` and
    :meth:`all_failures`.
    """

    size_bytes: int = 0
    used_bytes: int = 0
    read: int = 0
    """Prefixes that were read into host memory."""
    read_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    dropped: int = 0
    """Prefixes that left host memory, or the files' order, before they were written."""
    computed: int = 0
    """Prefixes in files that were computed instead: reading would have taken longer, or host memory had no
    room."""
    late: int = 0
    """Prefixes whose reading took longer than was expected, so that they were computed."""
    purged: int = 0
    """Prefixes that purges have deleted."""
    failures: dict[FileFailure, int] = field(default_factory=lambda: dict.fromkeys(get_args(FileFailure), 0))
    incomplete: int = 0
    """Prefixes of which some ranks have their share and others do not, so that nobody reads them."""
    others: dict[int, RankFileFigures] = field(default_factory=dict)
    """What the other ranks have told last."""
    prompt_token_s: float = 0.0
    """Seconds in which the server computes one token of a prompt; 0: it has computed none yet."""

    def total(self, name: str) -> int:
        """Return a field's sum over all ranks; the value of rank 0 if others don't have the field."""
        others = list(self.others.values())
        return int(getattr(self, name)) + sum(getattr(one, name, 0) for one in others)

    def all_failures(self) -> dict[FileFailure, int]:
        """Return the failures of all ranks."""
        others = list(self.others.values())
        return {
            kind: count + sum(one.failures.get(kind, 0) for one in others)
            for kind, count in self.failures.items()
        }

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """Note how long a step with prompts alone took."""
        if num_tokens < PACE_TOKENS:
            return
        token_s = seconds / num_tokens
        if self.prompt_token_s:
            token_s = self.prompt_token_s + PACE_WEIGHT * (token_s - self.prompt_token_s)
        self.prompt_token_s = token_s


NeighbourFailure = Literal["gone", "form", "limit", "damaged", "late", "lost"]
"""Why a cached prefix could not be read from another server. ``gone``: that server has given it up. ``form``:
its starts have another form. ``limit``: it lends as much as it may. ``damaged``: other bytes came than were
lent. ``late``: it did not answer in time. ``lost``: it is out of reach, or its lease had ended."""


@dataclass
class NeighbourCacheFigures:
    """Cached prefixes read from other servers' host memory, and lent to other servers, since the server's
    start."""

    read: int = 0
    """Prefixes that were read into host memory; those that a leaving server offered are among them."""
    read_bytes: int = 0
    computed: int = 0
    """Prefixes of other servers that were computed instead: reading would have taken longer, or there was no
    room."""
    late: int = 0
    """Prefixes whose reading took longer than was expected, so that they were computed."""
    lent: int = 0
    lent_bytes: int = 0
    lent_now_bytes: int = 0
    """Bytes of host memory that other servers may be reading now, as if nothing was shared."""
    handed_over: int = 0
    """Prefixes that other servers took when this one was drained."""
    failures: dict[NeighbourFailure, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(NeighbourFailure), 0)
    )


class Measures:
    """Counts and times since the server's start. The engine's thread writes them, any thread may read them.
    Times are in seconds."""

    def __init__(
        self,
        host_cache: HostCacheFigures | None = None,
        file_cache: FileCacheFigures | None = None,
        neighbour_cache: NeighbourCacheFigures | None = None,
        flops: Callable[[int, int], float] = lambda start, end: 0.0,
    ) -> None:
        """``flops`` returns the FLOP of computing the tokens of a prompt from one position to another."""
        self.host_cache = host_cache or HostCacheFigures()
        self.file_cache = file_cache or FileCacheFigures()
        self.neighbour_cache = neighbour_cache or NeighbourCacheFigures()
        self._flops = flops
        self.steps: dict[tuple[StepKind, StepRun], int] = {
            ("decode", "graph"): 0,
            ("prefill", "graph"): 0,  # mixed steps have no graphs
            **{(kind, "eager"): 0 for kind in get_args(StepKind)},
        }
        self.step_seconds = {kind: Tally(STEP_S) for kind in get_args(StepKind)}
        self.batch_size = Tally(POWERS)
        self.batch_tokens = Tally(POWERS)
        self.queue = Tally(REQUEST_S)
        self.prefill = Tally(REQUEST_S)
        self.transfer = Tally(TRANSFER_S)
        self.time_to_first_token = Tally(REQUEST_S)
        self.inter_token_latency = Tally(TOKEN_S)
        self.ended: dict[str, int] = dict.fromkeys(get_args(End), 0)
        self.state_faults: dict[Fault, int] = dict.fromkeys(get_args(Fault), 0)
        self.prompt_tokens_looked_up = 0
        self.prompt_tokens_found = 0
        """The looked-up tokens that the prefix cache had, up to the last state from which a request could
        start."""
        self.saved_flops: dict[CacheTier, float] = dict.fromkeys(get_args(CacheTier), 0.0)
        """FLOP of the found tokens, by the tier that had them."""
        self._last_landed_s = 0.0

    def admitted(self, waited_s: float, num_tokens: int, num_cached: int, num_promoted: int = 0) -> None:
        """Note that a request got room for the first time. Of its cached tokens, the last ``num_promoted``
        came from host memory."""
        self.queue.add(waited_s)
        self.prompt_tokens_looked_up += num_tokens
        self.prompt_tokens_found += num_cached
        on_device = num_cached - num_promoted
        self.saved_flops["device"] += self._flops(0, on_device)
        self.saved_flops["host"] += self._flops(on_device, num_cached)

    def stepped(
        self,
        kind: StepKind,
        run: StepRun,
        *,
        num_rows: int,
        num_tokens: int,
        num_steps: int,
        launched_s: float,
        now: float,
    ) -> None:
        """Note that a step was read back, or a burst of ``num_steps`` equal ones. If two steps are in flight,
        the time of the second step begins when the first step ends."""
        self.steps[kind, run] += num_steps
        seconds = now - max(launched_s, self._last_landed_s)
        self.step_seconds[kind].add(seconds / num_steps, num_steps)
        if kind == "prefill":
            self.file_cache.stepped(num_tokens, seconds)
        self.batch_size.add(num_rows, num_steps)
        self.batch_tokens.add(num_tokens, num_steps)
        self._last_landed_s = now
