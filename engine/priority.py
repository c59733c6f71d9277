"""The priority of this process's compute threads among other threads that want the same cores."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

from kernels.cpu.threads import cpu_threads
from wire.messages.generation import StepOutputs

log = logging.getLogger(__name__)

TOKEN_S = 3e-3
"""The least time for a token of a decoding request while prompts are computed on the same cores."""
LOOK_S = 1e-3
"""How long decode steps rest before they look again whether prompts are computed."""


def lower_priority(niceness: int) -> None:
    """Sets the niceness of the calling thread and of the CPU kernels' helper threads; 0 changes nothing.

    Only compute threads get a lower priority. The threads that answer (event loop, gRPC, transfers) keep
    theirs: a token should leave as soon as it exists.
    """
    if niceness == 0:
        return
    if sys.platform != "linux":  # elsewhere a thread has no niceness of its own
        log.warning("`niceness` %d: only Linux gives threads a niceness of their own; it stays 0", niceness)
        return
    cpu_threads().shared_cores.lower_priority(niceness)
    for thread_id in (threading.get_native_id(), *cpu_threads().helper_ids):
        os.setpriority(os.PRIO_PROCESS, thread_id, niceness)


class Pace:
    """Lets decode steps rest while a server with a lower niceness computes, as `up`'s prefill servers have.

    Requests in flight are among the waiting prompts or in decode steps. A small model's steps give each
    request a thousand tokens a second, so nearly all requests would wait for their first token while steps
    take a core from the prompts. A token each 3 ms is still more than anybody reads. Steps that take longer
    by themselves, such as those of larger models and of many rows, never rest.
    """

    def __init__(self) -> None:
        self._shared_cores = cpu_threads().shared_cores
        self._not_before_s = 0.0

    @property
    def rests(self) -> bool:
        """Whether the next step comes later, unless an event comes."""
        return time.monotonic() < self._not_before_s and self._shared_cores.comes_second

    def stepped(self, began_s: float, outputs: StepOutputs) -> None:
        """Notes how many tokens the step that began then gave each request, or a burst of steps did."""
        self._not_before_s = began_s + TOKEN_S * max(map(len, outputs.token_ids.values()), default=0)

    def hurry(self) -> None:
        """Lets the next step begin at once: it may begin a transfer, or give a request its first token."""
        self._not_before_s = 0.0
