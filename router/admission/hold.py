"""Handles absences. An absence is a time in which no server serves a model. This module measures how long an
absence lasts, and lets answers in progress wait until it is over.

A server that was killed is back after seconds if something restarts it. Until then requests wait in the queue
(:mod:`router.admission.gate`), and answers in progress wait here, both for at most ``hold_s``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from router.config import RouterConfig
from router.fleet.model_servers import ModelServers
from router.policies.policy import Demand

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
"""Time between two looks at a model's servers while no answer waits for them."""
WAIT_INTERVAL_S = 0.01
"""Time between two looks at a model's servers while an answer waits for them."""


class Hold:
    """The absence of one model's servers: when it began, and which answers wait for its end.

    ``is_stopping`` says whether the router is about to stop and so has no time left to wait for servers.
    """

    def __init__(
        self, servers: ModelServers, config: RouterConfig, *, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.hold_s = config.hold_s
        self.num_waiting = 0
        """The number of answers in progress that wait for a server."""
        self._servers = servers
        self._is_stopping = is_stopping
        self._was_served = False
        self._since_s: float | None = None
        """When the absence began, by the monotonic clock; None: the model is served."""
        self._waiting: dict[Demand, list[asyncio.Future[bool]]] = {}
        """Waiting answers, by the kind of demand that a server must be able to take."""
        self._timer: asyncio.TimerHandle | None = None

    def use_limits(self, config: RouterConfig) -> None:
        """Use the limits of ``config`` from now on. Answers that wait already keep their old limit."""
        self.hold_s = config.hold_s

    @property
    def may_end(self) -> bool:
        """Whether it makes sense to wait, because some server may come back while the router still runs."""
        return self.hold_s > 0 and not self._is_stopping() and self._servers.may_return()

    @property
    def is_short(self) -> bool:
        """Whether a request that comes now is likely to be served: there is no absence, or only a short
        one."""
        self.look()
        if self._since_s is None:
            return True
        return self._was_served and self.may_end and time.monotonic() - self._since_s < self.hold_s

    def look(self) -> None:
        """Note the beginning and the end of an absence."""
        absence = self._servers.not_ready_reason()
        if absence is None:
            if self._since_s is not None and self._was_served:
                took_s = time.monotonic() - self._since_s
                log.info("model %s is served again after %.1f s", self._servers.model, took_s)
            self._was_served, self._since_s = True, None
        elif self._since_s is None:
            self._since_s = time.monotonic()
            if self._was_served:
                log.warning("model %s: no server serves it: %s", self._servers.model, absence.detail)

    async def end(self, demand: Demand, *, deadline: float) -> bool:
        """Wait until some server can take ``demand``. Return False if no server could take it within
        ``hold_s`` or before ``deadline`` (on the event loop's clock), or if no server is expected any
        more."""
        loop = asyncio.get_running_loop()
        kind = replace(demand, token_ids=(), cache_salt="", session=None, session_name="")
        with self._wait_of(kind) as verdict:
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + self.hold_s)):
                    return await verdict
            except TimeoutError:
                return False

    @contextmanager
    def _wait_of(self, kind: Demand) -> Iterator[asyncio.Future[bool]]:
        """Yield the verdict on a wait: True once a server can take ``kind``, False once no server is expected
        any more."""
        verdict = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(kind, []).append(verdict)
        self.num_waiting += 1
        self._look_soon()
        try:
            yield verdict
        finally:
            self.num_waiting -= 1
            self._waiting[kind].remove(verdict)
            if not self._waiting[kind]:
                del self._waiting[kind]

    def _look_soon(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(WAIT_INTERVAL_S, self._judge)

    def _judge(self) -> None:
        """Look at the servers once for each kind of demand, and decide for all answers with such a demand."""
        self._timer = None
        may_end = self.may_end
        for kind, waiting in self._waiting.items():
            can_take = self._servers.can_take(kind)
            if can_take or not may_end:
                for verdict in waiting:
                    if not verdict.done():
                        verdict.set_result(can_take)
        self._look_soon()


async def watch(holds: Sequence[Hold]) -> None:
    """Have all ``holds`` look at their servers regularly, until this task is cancelled."""
    while True:
        for hold in holds:
            hold.look()
        await asyncio.sleep(WATCH_INTERVAL_S)
