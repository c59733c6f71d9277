"""Keeps the processes of a stack running, and stops them all."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from twinfang.forking.client import ForkServer
from twinfang.stack.child import Child, ChildSpec, describe_exit
from twinfang.stack.restart_policy import RestartLimits, RestartPolicy
from twinfang.turn import Turn
from wire.errors import TwinfangError

log = logging.getLogger(__name__)

COMPANION_GRACE_S = 4.0
"""The time in which companions may end by themselves after one of them has died."""
REFUSED_EXIT_CODES = (1, 2)
"""Exit codes of children that can't start. A child that ends with such a code before it was ever ready has
logged the reason, and a restart would fail again."""

ORDERLY_EXIT_CODES = (0, -signal.SIGTERM)
"""Exit codes of a child that was told to stop. The second code means that the child had not yet installed its
handler of SIGTERM."""


class ChildFailedError(TwinfangError):
    """A child can't start, or died more often than its limit allows."""

    code = "child_failed"


class Supervisor:
    """Runs groups of children. Each group is prepared at once, starts when the previous group is ready, and
    stops before the previous group stops.

    ``on_change`` is called whenever a child has become ready or has died. ``forks`` starts the children that
    may be forked, and is closed at the end.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[ChildSpec]],
        *,
        environment: Mapping[str, str],
        start_timeout_s: float,
        limits: RestartLimits | None = None,
        on_change: Callable[[Child], None] = lambda child: None,
        forks: ForkServer | None = None,
    ) -> None:
        self.groups = [[Child(spec) for spec in group] for group in groups]
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._limits = limits or RestartLimits()
        self._on_change = on_change
        self._forks = forks
        self._stop_requested = asyncio.Event()
        self._hurry_requested = asyncio.Event()
        self._kill_requested = asyncio.Event()
        self._lifeline_fd, self._lifeline_end = os.pipe()

    @property
    def children(self) -> list[Child]:
        return [child for group in self.groups for child in group]

    @property
    def is_ready(self) -> bool:
        return all(child.is_ready for child in self.children)

    @property
    def is_stopping(self) -> bool:
        return self._stop_requested.is_set()

    def request_stop(self) -> None:
        """Lets :meth:`run` stop everything and return. After a second request, running answers are ended; a
        third one kills what still runs."""
        requests = (self._stop_requested, self._hurry_requested, self._kill_requested)
        next((one for one in requests if not one.is_set()), self._kill_requested).set()

    async def run(self) -> None:
        """Runs all groups until a stop is requested. Raises :class:`ChildFailedError` if a child fails. In
        both cases no child is left."""
        keepers = [
            asyncio.create_task(self._keep(companions, after=earlier), name=companions[0].name)
            for earlier, group in zip([[], *self.groups], self.groups, strict=False)
            for companions in _by_fate(group)
        ]
        stop = asyncio.create_task(self._stop_requested.wait())
        try:
            done, _ = await asyncio.wait({*keepers, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*keepers, stop):
                task.cancel()
            await asyncio.gather(*keepers, stop, return_exceptions=True)
            if self._forks is not None:
                self._forks.close()
            await self._stop_children()
            os.close(self._lifeline_fd)
            os.close(self._lifeline_end)

    async def _keep(self, companions: list[Child], after: list[Child]) -> None:
        """Starts the children of one fate, again and again as long as their limit allows. They wait for their
        turn until ``after`` is ready."""
        policy = RestartPolicy(self._limits)
        while True:
            with Turn() as turn:
                child, code = await self._live(companions, turn, after)
            if code in REFUSED_EXIT_CODES and not child.first_ready.is_set():
                raise ChildFailedError(f"{child.name} could not start ({describe_exit(code)}); see its error")
            delay_s = policy.delay_s(asyncio.get_running_loop().time())
            if delay_s is None:
                raise ChildFailedError(
                    f"{child.name} died again ({describe_exit(code)}): more than {self._limits.max_restarts} "
                    f"restarts within {self._limits.window_s:g} s; see its log for the cause"
                )
            for one in companions:
                one.num_restarts += 1
            log.warning(
                "child died: name=%s exit=%s restarts=%d delay_s=%g",
                child.name,
                describe_exit(code),
                child.num_restarts,
                delay_s,
            )
            await asyncio.sleep(delay_s)

    async def _live(self, companions: list[Child], turn: Turn, after: list[Child]) -> tuple[Child, int]:
        """Starts all companions, opens their turn when ``after`` is ready, and waits until all have ended.
        Returns the companion that died first, and its exit code."""
        waits_for = [earlier for earlier in after if not earlier.first_ready.is_set()]
        for child in companions:
            await child.start(
                lifeline_fd=self._lifeline_fd,
                turn_fd=turn.fd if waits_for else None,
                environment=self._environment,
                forks=self._forks,
            )
        lives = {asyncio.create_task(self._watch(child, turn, waits_for)): child for child in companions}
        try:
            ended, others = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            first = min(ended, key=lambda life: life.result()[1])
            if others:  # each notices the death by itself, unless it is frozen
                await asyncio.wait(others, timeout=COMPANION_GRACE_S)
            for child in companions:
                child.kill()
            await asyncio.gather(*lives)
        finally:
            for life in lives:
                life.cancel()
        for child in companions:
            self._on_change(child)
        return lives[first], first.result()[0]

    async def _watch(self, child: Child, turn: Turn, waits_for: list[Child]) -> tuple[int, float]:
        """Waits for the child's turn and its end. Returns its exit code, and when it ended."""
        if waits_for:
            await child.wait_while(asyncio.gather(*(earlier.first_ready.wait() for earlier in waits_for)))
            turn.open()
        if await child.wait_until_ready(self._start_timeout_s):
            self._on_change(child)
        elif child.pid is not None:
            log.error("%s was not ready within %g s; killing it", child.name, self._start_timeout_s)
            child.kill()
        return await child.wait(), asyncio.get_running_loop().time()

    async def _stop_children(self) -> None:
        for group in reversed(self.groups):
            stopped = await asyncio.gather(
                *(child.stop(self._hurry_requested, self._kill_requested) for child in group)
            )
            for child, code in zip(group, stopped, strict=True):
                if code is None:
                    log.warning("%s did not stop in time and was killed", child.name)
                elif code not in ORDERLY_EXIT_CODES:
                    log.warning("%s was told to stop and ended with %s", child.name, describe_exit(code))


def _by_fate(children: Sequence[Child]) -> list[list[Child]]:
    """Returns the groups of children that live together, in order. A child without a fate lives alone."""
    together: dict[str, list[Child]] = {}
    for child in children:
        together.setdefault(child.spec.fate or f"alone: {child.name}", []).append(child)
    return list(together.values())
