"""What a server counts and times while it works, in addition to the stats that it sends to routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from telemetry.histogram import Tally

StepKind = Literal["decode", "prefill", "mixed"]
"""The rows of a step: decode rows alone, prefill rows alone, or both."""
StepRun = Literal["graph", "eager"]
"""Whether the step was one launch of a captured graph."""
End = Literal["stop", "length", "cancelled", "error", "moved", "prefilled"]
"""A finish reason, or ``prefilled``: the prompt waits to be read by a decode server."""
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
    demoted: int = 0
    """Prefixes that were copied from the device."""
    promoted: int = 0
    """Prefixes that were copied back."""
    promoted_tokens: int = 0
    """Tokens that were not computed for that."""
    dropped: int = 0
    """Prefixes that the device gave up and that host memory did not take: there was no room for them, or the
    step had copied enough."""


class Measures:
    """Counts and times since the server's start. The engine's thread writes them, any thread may read them.
    Times are in seconds."""

    def __init__(self, host_cache: HostCacheFigures | None = None) -> None:
        self.host_cache = host_cache or HostCacheFigures()
        self.steps: dict[tuple[StepKind, StepRun], int] = {
            ("decode", "graph"): 0,  # other kinds of steps have no graphs
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
        self._last_landed_s = 0.0

    def admitted(self, waited_s: float, num_tokens: int, num_cached: int) -> None:
        """Note that a request got room for the first time."""
        self.queue.add(waited_s)
        self.prompt_tokens_looked_up += num_tokens
        self.prompt_tokens_found += num_cached

    def stepped(
        self, kind: StepKind, run: StepRun, *, num_rows: int, num_tokens: int, launched_s: float, now: float
    ) -> None:
        """Note that a step was read back. If two steps are in flight, the time of the second step begins when
        the first step ends."""
        self.steps[kind, run] += 1
        self.step_seconds[kind].add(now - max(launched_s, self._last_landed_s))
        self.batch_size.add(num_rows)
        self.batch_tokens.add(num_tokens)
        self._last_landed_s = now
