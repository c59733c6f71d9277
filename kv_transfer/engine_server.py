"""What a prefill and a decode server have in common: a configuration and an engine."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from engine.config import EngineConfig
from engine.files.neighbours import StartNeighbours
from engine.host import EngineHost
from engine.step_result import StepResult
from kv_transfer.ranks.files_of_ranks import server_files
from kv_transfer.ranks.other_ranks import REPORTS
from kv_transfer.ranks.rank_exchange import rank_main
from kv_transfer.ranks.rank_files import rank_files
from telemetry.engine_metrics import Measures
from telemetry.start_up import StartUp
from wire.errors import ConfigError, TwinfangError
from wire.messages.generation import DrainNews, ServerInfo, SetDraining
from wire.messages.prefixes import PrefixNews
from wire.messages.purge import PurgeNews, PurgePrefixes
from wire.messages.ranks import RankFileNews
from wire.messages.sessions import SessionNews, TendSession
from wire.server import GrpcServer
from wire.tls.identity_files import IdentityFiles

log = logging.getLogger(__name__)

PURGE_COPY_S = 5.0
"""How long a copy of a start is waited for that goes on when its owner's prompts have been deleted."""
PURGE_POLL_S = 0.05
"""Between two looks whether requests under way have ended."""

VerifyHandoffs = Literal["off", "quick", "all"]
"""``quick``: tickets that wait for digests of at most :data:`kv_transfer.digester.QUICK_BYTES`, on a CPU."""


@dataclass(frozen=True)
class EngineServerConfig:
    """The configuration of one prefill or decode server process."""

    engine: EngineConfig
    host: str
    port: int
    served_model_name: str
    metrics_port: int | None = None
    """HTTP port for metrics and probes. 0: none; None: 10,000 above :attr:`port`."""
    vllm_metrics: bool = False
    """Whether metrics are shown under vLLM's names too."""
    otlp_endpoint: str = ""
    """Base URL of the collector that gets the traces. Empty: the OTEL_* variables decide, if set."""
    advertise_host: str | None = None
    """Host at which other servers reach this one. None: ``host``."""
    identity: IdentityFiles | None = None
    """Files for mutual TLS with routers and other servers. None: all talk in clear."""
    transfer_deadline_s: float = 30.0
    """If none of a transfer's reads ends for this long, the transfer is given up and its destination is
    quarantined."""
    handshake_timeout_s: float = 15.0
    verify_handoffs: VerifyHandoffs = "quick"
    """Which tickets carry digests of the memory that they name. Unless this is ``off``, what is read is also
    compared with the digests of other servers."""
    hang_deadline_s: float = 600.0
    """If a step of the engine takes longer than this, the server reports that it hangs. The default is the
    time that a router gives to a whole request. 0: a step may take any time."""

    def __post_init__(self) -> None:
        if self.engine.role != "both" and self.advertise_host is None and self.host in ("0.0.0.0", "::"):
            is_prefill = self.engine.role == "prefill"
            raise ConfigError(
                f"`host` {self.host} listens on every address, but "
                f"{'a ticket' if is_prefill else 'the ticket of a kept state'} must name one: "
                f"set `advertise_host` to a host that {'decode' if is_prefill else 'prefill'} servers reach"
            )
        if not self.transfer_deadline_s > 0:
            raise ConfigError(f"`transfer_deadline_s` must be positive, got {self.transfer_deadline_s}")
        if not 0 <= self.hang_deadline_s < math.inf:
            raise ConfigError(f"`hang_deadline_s` must be at least 0, got {self.hang_deadline_s}")


class EngineServer:
    """Runs an engine and describes it to others. Each service is a subclass that adds its own calls.

    ``on_step`` is called on the engine's thread with the result of each step. ``neighbours``: other servers
    from whose host memory cached prefixes may be read.
    """

    def __init__(
        self,
        config: EngineServerConfig,
        server: GrpcServer,
        *,
        incarnation: str,
        start_up: StartUp,
        on_step: Callable[[StepResult], None],
        local_prefill: bool = False,
        neighbours: StartNeighbours | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._served_model_name = config.served_model_name
        self._local_prefill = local_prefill
        self._hang_deadline_s = config.hang_deadline_s
        self._is_draining = False
        self._retained: dict[str, asyncio.TimerHandle] = {}
        """The ends of the times for which sessions' starts are retained."""
        self._host = EngineHost(
            config.engine,
            on_step=on_step,
            on_fatal=server.fail,
            on_leaving=server.stop_with,
            rank_main=rank_main(config.engine.role),
            reports=(*REPORTS, RankFileNews),
            start_up=start_up,
            files=partial(server_files, config.engine.file_cache, incarnation, server.fail),
            rank_files=rank_files,
            neighbours=neighbours,
        )
        self._engine = self._host.engine

    @property
    def measures(self) -> Measures:
        return self._engine.measures

    def start(self) -> None:
        self._host.start()

    def hang(self) -> str | None:
        """Returns what hangs, or None if the engine works or has nothing to do. Thread-safe."""
        lasts_s = self._host.turn_s
        if not 0 < self._hang_deadline_s <= lasts_s:
            return None
        return f"the engine hangs: a step has lasted for {lasts_s:.0f} s"

    def describe(self) -> ServerInfo:
        return self._host.describe(
            incarnation=self._incarnation,
            served_model_name=self._served_model_name,
            local_prefill=self._local_prefill,
            is_draining=self._is_draining,
        )

    async def prefix_news(self, since: int | None) -> PrefixNews:
        return await self._host.ask(lambda: self._engine.prefix_news(since))

    async def tend_session(self, call: TendSession) -> SessionNews:
        """Does what a router asks for a session. What is retained is let go when its time is over."""
        news = await self._host.ask(lambda: self._engine.tend(call))
        if call.action != "prefetch" and (timer := self._retained.pop(call.session, None)) is not None:
            timer.cancel()
        if call.action == "retain" and news.num_starts:
            loop = asyncio.get_running_loop()
            self._retained[call.session] = loop.call_later(call.for_s, self._let_go_session, call.session)
        return news

    async def purge(self, wanted: PurgePrefixes) -> PurgeNews:
        """Deletes cached prompts. Raises :class:`TwinfangError` if something in files may be left."""
        purges = self._engine.purges
        give_up = time.monotonic() + wanted.wait_s
        left = await self._ended(await self._host.ask(lambda: purges.begin(wanted)), wanted, give_up)
        num_starts = await self._host.ask(lambda: purges.purge(wanted))
        files = await self._host.purge_files(wanted)
        if files.error:
            raise TwinfangError(f"not everything could be deleted: {files.error}")
        # A start that was being written could not be deleted before.
        ids = await self._host.ask(lambda: purges.under_way(wanted))
        give_up = max(give_up, time.monotonic() + PURGE_COPY_S)
        left |= await self._ended(ids, wanted, give_up, "copy ", "read ")
        num_starts += await self._host.ask(lambda: purges.purge(wanted))
        return PurgeNews(num_starts, files.num_records, files.num_bytes, len(left))

    async def _ended(
        self, ids: frozenset[str], wanted: PurgePrefixes, give_up: float, *beginnings: str
    ) -> frozenset[str]:
        """Waits until what has these names has ended, or only names with these beginnings. Returns what has
        not."""
        purges = self._engine.purges
        ids = frozenset(name for name in ids if name.startswith(beginnings or ""))
        while ids and time.monotonic() < give_up:
            await asyncio.sleep(PURGE_POLL_S)
            ids &= await self._host.ask(lambda: purges.under_way(wanted))
        return ids

    def _let_go_session(self, session: str) -> None:
        del self._retained[session]
        self._host.post(lambda: self._let_go_on_engine(session))

    def _let_go_on_engine(self, session: str) -> None:
        self._engine.tend(TendSession(session, "let_go"))

    def _drain_news(self) -> DrainNews:
        return DrainNews(self._is_draining, self._incarnation)

    def _note_draining(self, message: SetDraining) -> None:
        self._is_draining = message.is_draining
        log.info("draining" if message.is_draining else "serving again: draining was taken back")
