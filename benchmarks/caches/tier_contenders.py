"""Who holds the conversations: our server with less and more tiers, and vLLM with what it offers."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar, Protocol

import httpx

from benchmarks.caches.tier_load import TierLoad, warm_up
from benchmarks.serving.load import LoadError
from benchmarks.side_by_side.contenders.arrangement import (
    ANY_MODEL,
    MORTAL_STACK,
    STACK_ENVIRONMENT,
    START_TIMEOUT_S,
    local_url,
    started,
    wait_until_ready,
)
from benchmarks.side_by_side.contenders.vllm import Vllm
from engine.config import EngineConfig
from engine.models import read_config
from kv_transfer.files.write_pace import WRITE_BYTES_PER_S, WRITE_CORE_SHARE
from testing.fleets.stack import running_stack
from twinfang.stack.ports import free_ports
from wire.errors import TwinfangError

ROOM_FOR_SESSIONS = 4
"""Conversations of full length that the device has room for."""
HOST_ROOM_FOR_SESSIONS = 8
"""Those that host memory has room for, where files are behind it."""
STATES_EACH = 3
"""Cached states for each of these conversations."""
SERVER = "both-0"
FILE_CACHE_GIB = 8
WRITE_MARGIN = 1.3
WRITE_CPU_S = 1.5e-3
"""Processor time of writing a prompt, at most. The files' thread may use a small part of a core."""
GIB, MIB = 1 << 30, 1 << 20
FIGURES = re.compile(r"^twinfang_((?:host|file)_cache_\w+)(?:\{kind=\"(\w+)\"\})? (\S+)$", re.MULTILINE)
FAILURES = (LoadError, TwinfangError, httpx.HTTPError, OSError, ExceptionGroup)


@dataclass(frozen=True)
class Room:
    """Bytes of a model's conversations."""

    device_bytes: int
    """Of the device's pools for ``ROOM_FOR_SESSIONS`` conversations."""
    session_bytes: int
    """Of a conversation at its full length, with its states."""
    turn_bytes: int
    """That a turn adds to files."""

    @classmethod
    def of(cls, model: Path, load: TierLoad) -> Room:
        config = EngineConfig(
            model,
            "both",
            device="cpu",
            dtype="float32",
            max_num_seqs=ROOM_FOR_SESSIONS,
            max_model_len=load.max_tokens + 1,
            cached_states=STATES_EACH * ROOM_FOR_SESSIONS,
        )
        demand = config.demand(read_config(model))
        return cls(
            demand.slots_bytes + demand.max_blocks * demand.block_bytes,
            STATES_EACH * demand.slot_bytes + demand.blocks_per_seq * demand.block_bytes,
            demand.slot_bytes + load.turn_tokens * demand.token_bytes,
        )


@dataclass(frozen=True)
class Running:
    """A running server."""

    url: str
    pids: tuple[int, ...]
    """Ids of its first processes."""
    restart: Callable[[], None] = lambda: None
    """Kills the server and returns when it is back. Does nothing where there is nothing to lose."""
    figures: Callable[[], dict[str, float]] = dict
    """Returns what the server has counted in its tiers."""
    uses: str = ""
    """The way in which it keeps conversations, if it had to be found out."""
    refusals: list[dict[str, object]] = field(default_factory=list)
    """Ways that it does not offer, and what it says."""


class Contender(Protocol):
    """One way of keeping conversations, or of computing them anew."""

    @property
    def title(self) -> str: ...

    def pace_s(self, model: Path, load: TierLoad) -> float:
        """Returns the least time between two requests."""

    def running(self, model: Path, load: TierLoad, folder: Path) -> AbstractContextManager[Running]:
        """Runs the server inside the block. Raises one of ``FAILURES``."""

    def command(self, model: Path, load: TierLoad) -> str: ...


@dataclass(frozen=True)
class Ours:
    """``twinfang serve`` with room on its device for few conversations."""

    title: str
    host_sessions: int = 0
    """Conversations that host memory has room for."""
    has_files: bool = False

    def pace_s(self, model: Path, load: TierLoad) -> float:
        """Files are written at a limited rate: requests that come faster leave host memory unwritten."""
        room = Room.of(model, load)
        write_s = max(room.turn_bytes / WRITE_BYTES_PER_S, WRITE_CPU_S / WRITE_CORE_SHARE)
        return WRITE_MARGIN * write_s if self.has_files else 0.0

    def command(self, model: Path, load: TierLoad) -> str:
        return shlex.join(["twinfang", "serve", *self._flags(model, load, Path("DIR"))[2:]])

    def _flags(self, model: Path, load: TierLoad, files: Path) -> list[str]:
        room = Room.of(model, load)
        words = (
            f"--dtype float32 --max-num-seqs {ROOM_FOR_SESSIONS} --max-model-len {load.max_tokens + 1} "
            f"--cached-states {STATES_EACH * ROOM_FOR_SESSIONS} "
            f"--cache-memory {room.device_bytes / GIB:.6f} --log-level warning"
        )
        if self.host_sessions:
            words += f" --host-cache-size {-(-self.host_sessions * room.session_bytes // MIB)}M"
        if self.has_files:
            words += f" --file-cache-dir {files} --file-cache-size {FILE_CACHE_GIB}G"
        return ["--model", str(model), *shlex.split(words)]

    @contextmanager
    def running(self, model: Path, load: TierLoad, folder: Path) -> Iterator[Running]:
        with (
            tempfile.TemporaryDirectory(prefix="files-", dir=folder) as files,
            running_stack(
                *("serve", *self._flags(model, load, Path(files))),
                environment=STACK_ENVIRONMENT,
                module=MORTAL_STACK,
            ) as stack,
        ):

            def restart() -> None:
                pid = stack.kill(SERVER)
                stack.wait_until(
                    lambda: stack.has_restarted(SERVER, pid), "the server is back", START_TIMEOUT_S
                )

            def figures() -> dict[str, float]:
                found = FIGURES.findall(stack.metrics(SERVER))
                return {" ".join(filter(None, (name, kind))): float(value) for name, kind, value in found}

            yield Running(stack.url, (stack.supervisor.pid,), restart, figures)


OURS = {
    "no tiers": Ours("no tiers"),
    "host": Ours("host memory for all", host_sessions=32),
    "files": Ours("host memory for 8, and files", HOST_ROOM_FOR_SESSIONS, has_files=True),
}
REFERENCE = "no tiers"
"""Its answers are those that all later prompts contain."""


@dataclass(frozen=True)
class Theirs:
    """vLLM with the first of its ways of keeping conversations that works, or with none."""

    vllm: Vllm
    title: str = "vLLM"

    WAYS: ClassVar[dict[str, str]] = {
        "offloading to host memory": "--enable-prefix-caching --kv-offloading-size 4 "
        "--kv-offloading-backend native",
        "prefix caching": "--enable-prefix-caching",
    }
    """Flags by what they switch on."""

    def pace_s(self, model: Path, load: TierLoad) -> float:
        return 0.0

    def command(self, model: Path, load: TierLoad) -> str:
        program, *flags = self.vllm.server("").command(ANY_MODEL, 0)
        return shlex.join([Path(program).name, *flags])

    @contextmanager
    def running(self, model: Path, load: TierLoad, folder: Path) -> Iterator[Running]:
        refusals: list[dict[str, object]] = []
        uses = chosen = ""
        for what, flags in self.WAYS.items():
            says = self._attempt(model, load, flags)
            if says is None:
                uses, chosen = what, flags
                break
            refusals.append({"what": what, "flags": flags, "says": says})
            print(f"  {what} ({flags}): {says}", flush=True)
        with self.vllm.server(chosen).running(model) as server:
            yield Running(server.url, server.pids, uses=uses, refusals=refusals)

    def _attempt(self, model: Path, load: TierLoad, flags: str) -> list[str] | None:
        """Returns the errors in the server's log if it can't answer with these flags; None: it can."""
        process, [port] = self.vllm.server(flags), free_ports(1)
        with started(process.command(model, port), process.environment) as (handle, log):
            try:
                wait_until_ready(local_url(port), handle, log)
                asyncio.run(warm_up(local_url(port), model.name, load))
            except FAILURES as error:
                return errors_in(log) or [str(error)]
        return None


_PREFIX = re.compile(r"^\s*(?:\(\w+ pid=\d+\) )?(?:\w+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): \S")


def errors_in(log: IO[bytes]) -> list[str]:
    """Returns the errors that a log names, each once, in their order."""
    text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
    lines = (_PREFIX.sub("", line) for line in text.splitlines())
    return list(dict.fromkeys(line.strip() for line in lines if _ERROR.match(line)))


def contenders(vllm: Vllm | None) -> dict[str, Contender]:
    """Returns all contenders, the reference first."""
    found: dict[str, Contender] = {**OURS}
    return found if vllm is None else {**found, "vllm": Theirs(vllm)}
