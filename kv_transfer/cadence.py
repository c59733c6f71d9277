"""How often to poll: fast while news is likely, slower the longer nothing happens."""

from __future__ import annotations

SPIN_FOR_S = 150e-6
"""How long a read that was just posted is polled without a pause: a small one is over by then, and a pause
of 50 µs takes 120 on a busy machine."""
FAST_S = 50e-6
FAST_FOR_S = 5e-3
SLOW_S = 1e-3
"""Measured between two processes: at 1 ms a read whose target takes part (TCP, shared memory without
CMA) pays at most 1 ms more and keeps its bandwidth; a poll costs 4 to 40 µs."""

LATE_S = 0.1
"""Of a server where no read is expected, but one whose lease has run out may still be on its way, behind a
link that was cut or is slow: its destination stays in quarantine until it is answered."""
LATE_FOR_S = 120.0
"""How long that may be: UCX gives up a link that was cut after the read's deadline, some 40 s."""
IDLE_S = 1.0
"""Of a server where nothing is expected: peers that came or went are noticed."""


def poll_delay(quiet_s: float) -> float:
    """Seconds until the next poll, ``quiet_s`` after the last thing that happened."""
    return FAST_S if quiet_s < FAST_FOR_S else SLOW_S


def idle_delay(since_ended_s: float) -> float:
    """Seconds until the next poll where no read is expected, so long after one may have been cut off."""
    return LATE_S if since_ended_s < LATE_FOR_S else IDLE_S


def read_poll_delay(quiet_s: float) -> float:
    """The same where reads are under way."""
    return 0.0 if quiet_s < SPIN_FOR_S else poll_delay(quiet_s)
