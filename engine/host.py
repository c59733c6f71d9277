"""Lets an asyncio service use an engine: post events to it, ask it for values, describe the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine.config import EngineConfig
from engine.device_faults import start_faults
from engine.engine import Engine
from engine.files.neighbours import StartNeighbours
from engine.files.start_files import NoFiles, PurgedFiles, StartFiles
from engine.group.lockstep import GroupLockstep, LeadLockstep
from engine.group.mesh import Listener
from engine.loop import EngineLoop
from engine.mailbox import Mailbox
from engine.ranks.lead import LeadEngine
from engine.ranks.membership import Membership, check_model
from engine.ranks.process import MakeRankFiles, RankMain, no_files, work
from engine.ranks.processes import RankProcesses
from engine.step_result import StepResult
from telemetry.start_up import StartUp
from wire.codec import PROTOCOL_VERSION
from wire.errors import GroupLostError
from wire.messages.generation import ServerInfo
from wire.messages.purge import PurgePrefixes

log = logging.getLogger(__name__)

T = TypeVar("T")

MakeFiles = Callable[[RankProcesses | None], StartFiles]
"""Makes the files of this process's engine. It gets the other ranks, whose files it asks too."""

NO_MEETING_POINT = Path()
"""Passed as the meeting point of a server with one tensor-parallel rank, which needs no meeting point."""


class EngineHost:
    """Owns an engine and its thread. Must be made on the event loop that gets its answers."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_step: Callable[[StepResult], None],
        on_fatal: Callable[[BaseException], None],
        on_leaving: Callable[[str], None] = lambda rank: None,
        rank_main: RankMain = work,
        reports: tuple[type, ...] = (),
        start_up: StartUp | None = None,
        files: MakeFiles = lambda ranks: NoFiles(),
        rank_files: MakeRankFiles = no_files,
        neighbours: StartNeighbours | None = None,
    ) -> None:
        """Starts the other ranks, if there are any, and makes the engine. ``files`` and ``rank_files`` make
        what keeps cached prefixes: for this process, and for each other rank. ``neighbours`` are other
        servers that have some.

        ``on_leaving`` is called, on another thread, with the name of a rank that is about to stop: a
        data-parallel rank, or a rank of this server on another host. The other ranks can't compute without
        this rank.
        """
        self.ranks: RankProcesses | None = None
        """The other tensor-parallel ranks, if there are any; they run ``rank_main``."""
        self._membership = Membership()
        self._neighbours = neighbours
        if config.num_expert_ranks > 1:
            check_model(config)
        if config.tensor_parallel > 1:
            self.ranks = RankProcesses(
                config,
                rank_main,
                files=rank_files,
                reports=reports,
                on_fatal=on_fatal,
                on_leaving=lambda rank: on_leaving(f"tensor-parallel rank {rank}"),
            )
            self._membership = self.ranks.join()
        elif config.is_lockstep:
            self._membership = Membership.enter(config, 0, NO_MEETING_POINT)
        if start_up is not None and config.num_expert_ranks > 1:
            start_up.ended("ranks")
        self._group = self._join_group(on_fatal, on_leaving)
        self._files = files(self.ranks)
        with start_faults():
            self.engine = self._make_engine(config, start_up)
        self._loop = EngineLoop(
            self.engine,
            on_step=on_step,
            on_fatal=on_fatal,
            step_deadline_s=config.resolve_step_deadline(config.resolve_device()),
        )
        self.engine.grammars.on_news(lambda: self._loop.post(lambda: None))
        if self._group is not None:
            self._group.on_wake(lambda: self._loop.post(lambda: None))
        self._event_loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._event_loop)

    def _join_group(
        self, on_fatal: Callable[[BaseException], None], on_leaving: Callable[[str], None]
    ) -> GroupLockstep | None:
        membership = self._membership
        if membership.mesh is None:
            return None
        if not membership.is_lockstep:
            membership.mesh.start(_Watch(on_fatal))
            return None
        group = GroupLockstep(
            membership.mesh,
            membership.leads,
            on_lost=on_fatal,
            on_leaving=lambda rank: on_leaving(f"data-parallel rank {rank}"),
        )
        membership.mesh.start(group)
        return group

    def _make_engine(self, config: EngineConfig, start_up: StartUp | None) -> Engine | LeadEngine:
        tp, group = self._membership.tp, self._group
        if self.ranks is None:
            files, neighbours = self._files, self._neighbours
            return Engine(config, tp, lockstep=group, start_up=start_up, files=files, neighbours=neighbours)
        lockstep = None if group is None else LeadLockstep(group, self.ranks.tell)
        engine = Engine(config, tp, lockstep=lockstep, start_up=start_up, files=self._files)
        if self._membership.mesh is not None and group is None:
            self._membership.mesh.watch_closely()
        return LeadEngine(engine, self.ranks.tell)

    def start(self) -> None:
        self._files.start(lambda: self._loop.post(lambda: None))
        self._loop.start()

    async def leave_group(self, timeout_s: float) -> None:
        """Tells the group that this server has nothing left to compute, and waits until all ranks have said
        the same. Until then this server still computes steps together with the others.
        """
        if self._membership.mesh is not None and self._membership.is_lockstep:
            self._membership.mesh.leave()
            if not await asyncio.to_thread(self._membership.mesh.wait_until_all_left, timeout_s):
                log.warning("not all ranks of the group were done within %g s", timeout_s)

    def stop(self) -> None:
        self._loop.stop()
        self._files.close()
        self.engine.grammars.close()
        self._membership.say_goodbye()
        if self.ranks is not None:
            self.ranks.stop()
        self._membership.end()
        self._mailbox.close()

    def post(self, event: Callable[[], None]) -> None:
        """Runs ``event`` on the engine's thread between two steps. May be called from any thread."""
        self._loop.post(event)

    @property
    def turn_s(self) -> float:
        """For how long the engine's current step or event has lasted; 0 if there is none. Thread-safe."""
        return self._loop.turn_s

    def answer(self, callback: Callable[..., None], *args: object) -> None:
        """Runs ``callback`` on the event loop. The engine's thread uses only this method to reach asyncio."""
        self._mailbox.post(callback, *args)

    async def ask(self, question: Callable[[], T]) -> T:
        """Returns the result of ``question``, which runs on the engine's thread."""
        future: asyncio.Future[T] = self._event_loop.create_future()

        def run() -> None:
            answer = question()
            self.answer(lambda: None if future.done() else future.set_result(answer))

        self.post(run)
        return await future

    async def purge_files(self, wanted: PurgePrefixes) -> PurgedFiles:
        """Deletes what is wanted from files."""
        future: asyncio.Future[PurgedFiles] = self._event_loop.create_future()
        self.post(lambda: self._files.purge(wanted, lambda purged: self.answer(future.set_result, purged)))
        return await asyncio.shield(future)

    def describe(
        self,
        *,
        incarnation: str,
        served_model_name: str,
        local_prefill: bool = False,
        is_draining: bool = False,
    ) -> ServerInfo:
        """Returns the description of this server that the router gets."""
        model_config = self.engine.model.config
        return ServerInfo(
            role=self.engine.config.role,
            incarnation=incarnation,
            served_model_name=served_model_name,
            fingerprint=self.engine.fingerprint,
            vocab_size=model_config.vocab_size,
            max_model_len=self.engine.capacity.max_model_len,
            block_size=self.engine.config.block_size,
            max_num_seqs=self.engine.config.max_num_seqs,
            eos_token_ids=model_config.eos_token_ids,
            local_prefill=local_prefill,
            is_draining=is_draining,
            max_batch_tokens=self.engine.config.max_batch_tokens,
            protocol=PROTOCOL_VERSION,
        )


class _Watch(Listener):
    """Rank 0's watch over the server's ranks on other hosts."""

    def __init__(self, on_lost: Callable[[BaseException], None]) -> None:
        self._on_lost = on_lost

    def lost(self, error: GroupLostError) -> None:
        self._on_lost(error)
