"""The autoscaler's loop: reads metrics pages, decides, prints each decision, and scales if --apply is given.

A look is one pass of the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from router.kubernetes.cluster_error import ClusterError
from twinfang.autoscale.metrics import AutoscaleFigures
from twinfang.autoscale.metrics_page import Page, Unread, read_pages
from twinfang.autoscale.needs import Need, decode_need, prefill_need
from twinfang.autoscale.page_window import PageWindow
from twinfang.autoscale.pool_planner import SLACK, Decision, Needs, PoolHistory, PoolSize, decide
from twinfang.autoscale.readings import RouterReading, decode_reading, prefill_reading, router_reading
from twinfang.autoscale.settings import AutoscaleConfig, PoolSource
from twinfang.autoscale.step_line import TpotPoint
from twinfang.autoscale.trust import Trusts
from wire.errors import ConfigError

if TYPE_CHECKING:
    from twinfang.autoscale.scale_target import ScaleTarget
    from wire.tls.identity import Identity

log = logging.getLogger(__name__)

TPOT_MEMORY_S = 3600.0
"""How long measured TPOT is used. Prompt lengths change over a day, and the cost of a row changes with
them."""


@dataclass
class Pool:
    """The state of one pool between two looks."""

    source: PoolSource
    window: PageWindow
    target: ScaleTarget | None
    history: PoolHistory
    num_serving: int = 0
    unread: tuple[str, ...] = ()
    """The addresses at which no page could be read in the last look: those of servers and of routers."""
    said: tuple[str, int, int] | str = ""
    """The subject of the last line that was printed. The next line is printed only if the subject changes,
    not if only the measured values in the line change."""


class Autoscaler:
    """Plans both pools. ``say`` gets a line for each decision that differs from the last one."""

    def __init__(
        self,
        config: AutoscaleConfig,
        identity: Identity | None = None,
        *,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = AutoscaleFigures(clock)
        self._config = config
        self._say = say
        self._clock = clock
        self._trusts = Trusts(config, identity)
        self._shown = config.router_token()
        self.routers = PageWindow(config.window_s)
        self.prefill, self.decode = (self._pool(source) for source in (config.prefill, config.decode))
        self._unread: set[Unread] = set()
        self._no_router = ""
        """Why nothing can be computed: no router's metrics were read. Empty if any router's metrics were
        read."""
        self._tpot_seen: deque[tuple[float, TpotPoint]] = deque()

    def _pool(self, source: PoolSource) -> Pool:
        config, target = self._config, None
        if source.deployment:
            from twinfang.autoscale.scale_target import ScaleTarget  # this module needs an optional package

            target = ScaleTarget(config.namespace, source.deployment, config.kubeconfig)
        return Pool(source, PageWindow(config.window_s), target, PoolHistory())

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            began_s = self._clock()
            await self.look()
            await asyncio.sleep(max(0.0, self._config.interval_s - (self._clock() - began_s)))

    async def look(self) -> None:
        """Reads all pages once and decides for both pools."""
        now_s = self._clock()
        has_routers = await self._read_pages(now_s)
        routers = router_reading(self.routers) if has_routers else None
        for pool, needs in (
            (self.prefill, self._prefill_needs(routers)),
            (self.decode, self._decode_needs(routers, now_s)),
        ):
            await self._plan(pool, needs, now_s)

    async def _read_pages(self, now_s: float) -> bool:
        """Reads all pages. Returns whether any router has been read twice."""
        config = self._config
        of_servers = self._trusts.of_servers()
        routers, prefill, decode = await asyncio.gather(
            read_pages(config.router_urls, now_s, self._trusts.of_routers(), self._token()),
            read_pages(config.prefill.urls, now_s, of_servers),
            read_pages(config.decode.urls, now_s, of_servers),
        )
        self._log_unread([*routers, *prefill, *decode])
        self._no_router = "" if _read_of(routers) else _no_router(config.router_urls, routers)
        self.routers.take(_read_of(routers))
        for pool, found in ((self.prefill, prefill), (self.decode, decode)):
            pages = _read_of(found)
            pool.unread = tuple(one.address for one in (*routers, *found) if isinstance(one, Unread))
            pool.window.take(pages)
            pool.num_serving = sum(bool(page.sum("twinfang_server_state", state="serving")) for page in pages)
        return bool(self.routers.changes())

    def _token(self) -> str:
        """What routers are shown: what the file holds now, or held last."""
        try:
            self._shown = self._config.router_token()
        except ConfigError as error:
            log.warning("%s", error.message)
        return self._shown

    def _log_unread(self, found: list[Page | Unread]) -> None:
        """Logs once that a page can't be read; again only for another reason, or if the page was read
        meanwhile. Without this limit each starting pod would cause many lines, since it has an address before
        it listens."""
        unread = {one for one in found if isinstance(one, Unread)}
        for one in sorted(unread - self._unread, key=lambda one: one.address):
            log.warning("can't read metrics of %s: %s", one.address, one.reason)
        self._unread = unread

    def _prefill_needs(self, routers: RouterReading | None) -> Needs | None:
        load, goals = prefill_reading(self.prefill.window), self._config.objectives
        if routers is None or not load.num_servers:
            return None
        return _needs(lambda growth: prefill_need(load, routers, goals, growth=growth), self.prefill.unread)

    def _decode_needs(self, routers: RouterReading | None, now_s: float) -> Needs | None:
        load, goals = decode_reading(self.decode.window), self._config.objectives
        if routers is None or not load.num_servers:
            return None
        if load.batch_rows and routers.tpot.count:
            tpot_s = routers.tpot.quantile(goals.share)
            self._tpot_seen.append((now_s, TpotPoint(load.batch_rows, tpot_s)))
        while self._tpot_seen and self._tpot_seen[0][0] < now_s - TPOT_MEMORY_S:
            self._tpot_seen.popleft()
        seen = [point for _, point in self._tpot_seen]
        return _needs(
            lambda growth: decode_need(load, routers, goals, seen, growth=growth), self.decode.unread
        )

    async def _plan(self, pool: Pool, needs: Needs | None, now_s: float) -> None:
        role = pool.source.role
        try:
            scale = None if pool.target is None else await pool.target.read()
            size = PoolSize(pool.num_serving if scale is None else scale.replicas, pool.num_serving)
            if scale is None and not size.wanted:
                self._tell(pool, "nobody", f"{role} stays: no server serves, as far as its metrics tell")
                return
            decision, history = decide(
                now_s, size, needs, pool.source.limits, self._config.pace, pool.history
            )
            if decision.kind == "unknown" and self._no_router:
                decision = replace(decision, why=self._no_router)
            self.figures.decided(role, size, decision.num_servers)
            if decision.num_servers == size.wanted:
                pool.history = history
            elif pool.target is not None and scale is not None and self._config.applies:
                await pool.target.change(scale, decision.num_servers)
                pool.history = history
            cause = decision.why if decision.kind == "unknown" else decision.kind
            about = (cause, size.wanted, decision.num_servers)
            self._tell(pool, about, _line(role, size, decision, will_apply=self._config.applies))
            if needs is not None:
                self.figures.planned(role)
        except ClusterError as error:
            self.figures.failures[role] += 1
            self._tell(pool, error.cause, f"{role} stays: {error.message}")

    def _tell(self, pool: Pool, about: tuple[str, int, int] | str, line: str) -> None:
        if about != pool.said:
            pool.said = about
            self._say(line)


def _needs(need: Callable[[float], Need], unread: Iterable[str]) -> Needs:
    now = need(1.0)
    return Needs(now.num_servers, need(SLACK).num_servers, now.why, ", ".join(unread))


def _line(role: str, size: PoolSize, decision: Decision, *, will_apply: bool) -> str:
    if decision.num_servers == size.wanted:
        return f"{role} stays at {size.wanted}: {decision.why}"
    mode = "" if will_apply else " (dry run)"
    return f"{role} {size.wanted} -> {decision.num_servers}{mode}: {decision.why}"


def _no_router(urls: Iterable[str], found: list[Page | Unread]) -> str:
    unread = [f"{one.address}: {one.reason}" for one in found if isinstance(one, Unread)]
    told = "; ".join(unread) or f"{', '.join(urls)}: the name stands for no address"
    return f"no router's metrics can be read ({told}): check that a router runs, and check --router-metrics"


def _read_of(found: list[Page | Unread]) -> list[Page]:
    return [one for one in found if isinstance(one, Page)]
