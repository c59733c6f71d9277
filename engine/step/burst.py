"""Decode steps that follow each other without a plan between them.

A small model's step on a CPU takes less time than its plan and the way of its tokens to the client. So steps
of the same rows are run one after the other, and their tokens are sent together. The device advances its rows
itself, and ends them itself: to the rows this is the same as steps that are launched ahead.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import EngineConfig
from kernels.cpu.threads import Repeats
from wire.errors import ConfigError

CPU_INTERVAL_S = 0.025
"""The default on a CPU: a film shows a new image less often, and 40 messages a second cost little."""

MAX_STEPS = 8
"""Maximum number of steps in a burst. Blocks are given ahead for so many. More would save little: the work of
a plan and a message is divided by eight already."""


def stream_interval(config: EngineConfig, device: torch.device) -> float:
    """Returns ``config.stream_interval_s``, or its default.

    A GPU computes its next step while the host handles tokens, so it has no bursts. Several ranks take the
    same steps, which a clock can't decide. The sanitizer looks at each step.

    Raises :class:`ConfigError` if the interval excludes another setting.
    """
    obstacle = None
    if device.type != "cpu":
        obstacle = f"the device {device}, which computes while tokens are sent"
    elif config.tensor_parallel > 1 or config.is_lockstep:
        obstacle = "several ranks, which must take the same steps"
    elif config.sanitize:
        obstacle = "`sanitize`, which looks at each step"
    elif config.steps_ahead:
        obstacle = "`steps_ahead` 1, which launches steps one by one"
    interval_s = config.stream_interval_s
    if interval_s is None:
        return CPU_INTERVAL_S if obstacle is None else 0.0
    if not 0 <= interval_s < math.inf:
        raise ConfigError(f"`stream_interval_s` must be at least 0, got {interval_s}")
    if interval_s and obstacle is not None:
        raise ConfigError(f"`stream_interval_s` {interval_s:g} and {obstacle}, exclude each other: use 0")
    return interval_s


class Wanted:
    """Whether an event waits for the engine: a request, a cancellation, a transfer's end.

    The flag is one word, so that native code finds it too. Any thread may set it.
    """

    def __init__(self) -> None:
        self._word = np.zeros(1, dtype=np.int64)
        self.address: int = self._word.ctypes.data

    def set(self) -> None:
        self._word[0] = 1

    def clear(self) -> None:
        self._word[0] = 0

    def __bool__(self) -> bool:
        return bool(self._word[0])


@dataclass(frozen=True, slots=True)
class Burst:
    """How long the steps of one plan may go on."""

    max_steps: int
    until_s: float
    """The time at which no further step begins."""
    wanted: Wanted

    def repeats(self, num_steps: int) -> Repeats:
        """Returns the same rule for native code that goes on after ``num_steps``."""
        return Repeats(self.max_steps - num_steps, self.wanted.address, int(self.until_s * 1e9))

    def goes_on(self, num_steps: int, began_s: float) -> bool:
        """Returns whether a step follows after ``num_steps``, the first of which began at ``began_s``.

        A step that would end too late by as much as the others took does not begin.
        """
        if num_steps >= self.max_steps or self.wanted:
            return False
        now = time.monotonic()
        return now + (now - began_s) / num_steps < self.until_s


ONE_STEP = Burst(1, 0.0, Wanted())


class Bursts:
    """Begins bursts. ``interval_s``: the longest time for which tokens wait to be sent; 0: each plan has one
    step."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.wanted = Wanted()
        """Set by whoever posts events to the engine."""

    def begin(self, max_steps: int) -> Burst:
        """Begins a burst of at most ``max_steps`` steps, for which the plan's rows have all memory."""
        if max_steps == 1 or not self._interval_s:
            return ONE_STEP
        return Burst(min(max_steps, MAX_STEPS), time.monotonic() + self._interval_s, self.wanted)
