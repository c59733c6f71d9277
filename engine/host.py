"""An engine as an asyncio service sees it: post events, ask for values, know who it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from engine.config import EngineConfig
from engine.engine import Engine
from engine.lead_engine import LeadEngine
from engine.loop import EngineLoop
from engine.mailbox import Mailbox
from engine.model_shard import check_divides
from engine.models import read_config
from engine.rank_processes import RankMain, RankProcesses, work
from engine.step_result import StepResult
from telemetry.start_up import StartUp
from wire.generation import ServerInfo

T = TypeVar("T")


class EngineHost:
    """Owns an engine and its thread. Made on the event loop that it answers to."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_step: Callable[[StepResult], None],
        on_fatal: Callable[[BaseException], None],
        rank_main: RankMain = work,
        reports: tuple[type, ...] = (),
        start_up: StartUp | None = None,
    ) -> None:
        self.ranks: RankProcesses | None = None
        """The other tensor-parallel ranks, where there are any; they run ``rank_main``."""
        if config.tensor_parallel == 1:
            self.engine = Engine(config, start_up=start_up)
        else:
            check_divides(read_config(config.model_dir, config.dtype), config.tensor_parallel)
            self.ranks = RankProcesses(config, rank_main, reports=reports, on_fatal=on_fatal)
            tp = self.ranks.join()
            if start_up is not None:
                start_up.ended("ranks")
            self.engine = LeadEngine(config, tp, self.ranks.tell, start_up=start_up)
        self._loop = EngineLoop(self.engine, on_step=on_step, on_fatal=on_fatal)
        self._event_loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._event_loop)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()
        if self.ranks is not None:
            self.ranks.stop()
        self._mailbox.close()

    def post(self, event: Callable[[], None]) -> None:
        """Runs ``event`` on the engine's thread between two steps. From any thread."""
        self._loop.post(event)

    def answer(self, callback: Callable[..., None], *args: object) -> None:
        """Runs ``callback`` on the event loop; the engine's thread speaks to asyncio through this alone."""
        self._mailbox.post(callback, *args)

    async def ask(self, question: Callable[[], T]) -> T:
        """What ``question`` returns when run on the engine's thread."""
        future: asyncio.Future[T] = self._event_loop.create_future()

        def run() -> None:
            answer = question()
            self.answer(lambda: None if future.done() else future.set_result(answer))

        self.post(run)
        return await future

    def describe(
        self,
        *,
        incarnation: str,
        served_model_name: str,
        local_prefill: bool = False,
        is_draining: bool = False,
    ) -> ServerInfo:
        """Who this server is, for the router."""
        model_config = self.engine.model.config
        return ServerInfo(
            role=self.engine.config.role,
            incarnation=incarnation,
            served_model_name=served_model_name,
            fingerprint=self.engine.fingerprint,
            vocab_size=model_config.vocab_size,
            max_model_len=self.engine.max_model_len,
            block_size=self.engine.config.block_size,
            max_num_seqs=self.engine.config.max_num_seqs,
            eos_token_ids=model_config.eos_token_ids,
            local_prefill=local_prefill,
            is_draining=is_draining,
            max_batch_tokens=self.engine.config.max_batch_tokens,
        )
