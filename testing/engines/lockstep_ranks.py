"""Data-parallel ranks for tests: real processes, each with an engine, its thread and its loop.

    with ranks(model_dir, 2, num_speculative=3) as (busy, idle):
        busy.ask(asks)
        busy.answers()          # waits for them
        idle.call(num_dummy_steps)

Functions that run in a rank belong to this module or to a test's. Each gets the rank's :class:`Inside` and
runs between two steps.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.group.data_parallel import DataParallel
from engine.group.store import GroupStore
from engine.host import EngineHost
from engine.sanitizer.poison import Poison
from testing.engines.leading import own
from testing.engines.speculating import Answer, Ask
from twinfang.stack.ports import free_ports

DEADLINE_S = 120.0
POLL_S = 0.02
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["testing.engines.lockstep_ranks"])
SETTINGS = {"max_num_seqs": 16, "cache_memory_bytes": 64 << 20, "max_batch_tokens": 256, "num_threads": 1}


class Inside:
    """The objects of a rank's process, for functions that run in it."""

    def __init__(self, config: EngineConfig) -> None:
        self.failures: list[BaseException] = []
        self.left_by: list[int] = []
        self.answers: dict[str, Answer] = {}
        self.memory: tuple[torch.Tensor, ...] = ()
        self.host = EngineHost(
            config,
            on_step=self._on_step,
            on_fatal=self._on_fatal,
            on_leaving=self.left_by.append,
        )
        self.engine = self.host.engine
        self.own = own(self.engine)

    def _on_step(self, result) -> None:
        for output in result.outputs:
            self.answers[output.request_id].add(output)

    def _on_fatal(self, error: BaseException) -> None:
        print(f"rank {self.engine.config.data_parallel.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(3)


def add(inside: Inside, asks: dict[str, Ask]) -> None:
    for name, ask in asks.items():
        inside.answers[name] = Answer(ask.request(name))
        inside.engine.add(inside.answers[name].request)


def cancel(inside: Inside, names: Sequence[str]) -> None:
    for name in names:
        inside.engine.cancel(name)
        inside.answers[name].finish_reason = "cancelled"


def are_answered(inside: Inside) -> bool:
    return all(answer.finish_reason is not None for answer in inside.answers.values())


def num_tokens(inside: Inside) -> int:
    return sum(len(answer.tokens) for answer in inside.answers.values())


def take_answers(inside: Inside) -> dict[str, Answer]:
    answers, inside.answers = inside.answers, {}
    return answers


def num_dummy_steps(inside: Inside) -> int:
    return inside.own.num_dummy_steps


def num_steps(inside: Inside) -> int:
    return inside.engine.stats().num_steps


def poison(inside: Inside) -> None:
    """Fill all memory except the null entries with NaN; remember the memory and the row tables."""
    caches = inside.engine.caches
    filler = Poison(caches)
    filler.blocks(torch.arange(1, caches.num_blocks))
    filler.slots(torch.arange(1, caches.num_slots))
    inside.memory = tuple(one.clone() for one in _memory(inside))


def is_untouched(inside: Inside) -> bool:
    """Return whether memory and tables are bit for bit those that :func:`poison` left."""
    return all(
        torch.equal(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8))
        for now, then in zip(_memory(inside), inside.memory, strict=True)
    )


def owns_nothing(inside: Inside) -> bool:
    engine = inside.own
    owned = engine.scheduler.owned
    return (
        owned.cache.num_available_blocks == owned.blocks.capacity
        and owned.cache.num_available_slots == owned.slots.capacity
        and not engine._runner.state.active.any()
    )


def forget_prefixes(inside: Inside) -> None:
    inside.own.scheduler.owned.cache.clear()


def _memory(inside: Inside) -> list[torch.Tensor]:
    engine = inside.own
    tables = [table for table in vars(engine._runner.state).values() if isinstance(table, torch.Tensor)]
    return [engine.caches.kv[1:], engine.caches.state[1:], *(table[:-1] for table in tables)]


class Rank:
    """One rank as the test sees it."""

    def __init__(self, config: EngineConfig) -> None:
        self._ours, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_run, args=(config, theirs))
        self.process.start()
        theirs.close()

    def call(self, function, *arguments):
        """Return the result of ``function(inside, *arguments)`` in the rank."""
        self._ours.send((function, arguments))
        return self._receive()

    def wait_until(self, function, what: str, deadline_s: float = DEADLINE_S) -> None:
        limit = time.monotonic() + deadline_s
        while not self.call(function):
            assert time.monotonic() < limit, f"not within {deadline_s} s: {what}"
            time.sleep(POLL_S)

    def ask(self, asks: Sequence[Ask]) -> None:
        self.call(add, {str(i): ask for i, ask in enumerate(asks)})

    def answers(self) -> list[Answer]:
        """Return the answers to the last requests once all are complete."""
        self.wait_until(are_answered, "all requests are answered")
        return list(self.call(take_answers).values())

    def until_ready(self) -> None:
        assert self._receive() == "ready"

    def stop(self) -> None:
        self._ours.send(None)

    def until_stopped(self) -> None:
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == 0

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, signum)

    def _receive(self):
        assert self._ours.poll(DEADLINE_S), "the rank does not answer"
        return self._ours.recv()


def configs(model_dir: Path, size: int, **settings) -> list[EngineConfig]:
    settings = SETTINGS | settings
    address = f"127.0.0.1:{free_ports(1)[0]}"
    return [
        EngineConfig(
            model_dir,
            "both",
            device="cpu",
            expert_parallel=True,
            data_parallel=DataParallel(rank, size, GroupStore(address)),
            **settings,
        )
        for rank in range(size)
    ]


@contextmanager
def ranks(model_dir: Path, size: int, **settings) -> Iterator[list[Rank]]:
    """Yield ready ranks; at the end all must stop cleanly."""
    with ExitStack() as exits:
        made = []
        for config in configs(model_dir, size, **settings):
            made.append(Rank(config))
            exits.callback(made[-1].process.kill)
        for rank in made:
            rank.until_ready()
        yield made
        living = [rank for rank in made if rank.process.is_alive()]
        for rank in living:
            rank.stop()
        for rank in living:
            rank.until_stopped()


def _run(config: EngineConfig, connection) -> None:
    asyncio.run(_serve(config, connection))


async def _serve(config: EngineConfig, connection) -> None:
    inside = Inside(config)
    inside.host.start()
    calls: asyncio.Queue = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(connection, loop, calls), daemon=True).start()
    connection.send("ready")
    while (call := await calls.get()) is not None:
        function, arguments = call
        connection.send(await inside.host.ask(lambda f=function, a=arguments: f(inside, *a)))
    await inside.host.leave_group(DEADLINE_S)
    await asyncio.to_thread(inside.host.stop)


def _listen(connection, loop, calls) -> None:
    while True:
        try:
            call = connection.recv()
        except EOFError:
            os._exit(1)
        loop.call_soon_threadsafe(calls.put_nowait, call)
