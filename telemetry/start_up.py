"""The time from the start of a process until it is ready, in phases. Each phase begins when the one before it
ended.

| phase | is |
|---|---|
| imports | interpreter, modules, flags |
| ranks | the other tensor-parallel ranks start and connect; only if there are any |
| config | the model's configuration; ports |
| weights | loading the weights, in the form in which they are used |
| pools | cache memory, fingerprint, tables |
| warm_up | short requests, which compile the kernels that are not compiled yet |
| graphs | capturing decode steps |
| transfer | NIXL, registering the pools; only if state is handed over |
| server | opening the port |
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

Phase = Literal["imports", "ranks", "config", "weights", "pools", "warm_up", "graphs", "transfer", "server"]


class StartUp:
    """The phases of one process. One thread at a time writes; the phases are complete once the process is
    ready."""

    def __init__(self, began_s: float | None = None) -> None:
        """``began_s`` is a time of ``time.monotonic``; None means now."""
        self.seconds: dict[Phase, float] = {}
        self.weight_bytes = 0
        """Bytes of the weights as they are stored."""
        self.weights_are_inherited = False
        """Whether this process was forked from one that had loaded them."""
        self._marked_s = time.monotonic() if began_s is None else began_s

    @classmethod
    def of_process(cls) -> StartUp:
        """Begin at the start of this process, or now if the operating system does not report the start."""
        return cls(time.monotonic() - _age_s())

    def ended(self, phase: Phase) -> None:
        """End a phase. Its time is what has passed since the last phase ended."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._marked_s
        self._marked_s = now

    def figures(self) -> dict[str, object]:
        """Return the times and the size for JSON."""
        return {"seconds": dict(self.seconds), "weight_bytes": self.weight_bytes}

    def __str__(self) -> str:
        """``2.31 s: imports 1.60, weights 0.25 (0.48 GB, 1.9 GB/s), …``"""
        parts = [f"{phase} {seconds:.2f}{self._rate(phase)}" for phase, seconds in self.seconds.items()]
        return f"{sum(self.seconds.values()):.2f} s: {', '.join(parts)}"

    def _rate(self, phase: Phase) -> str:
        if phase != "weights":
            return ""
        if self.weights_are_inherited:
            return f" ({self.weight_bytes / 1e9:.2f} GB, loaded before this process was forked)"
        rate = self.weight_bytes / max(self.seconds[phase], 1e-9)
        return f" ({self.weight_bytes / 1e9:.2f} GB, {rate / 1e9:.1f} GB/s)"


def _age_s() -> float:
    """Return the age of this process, to a hundredth of a second. 0 if the operating system does not report
    it."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), since boot
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return max(0.0, age_s)
