"""Twinfang under test: ``twinfang up`` with one server of each role. Its supervisor restarts what dies."""

from __future__ import annotations

import asyncio
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.side_by_side.contenders.arrangement import MORTAL_STACK
from conformance.faults import kill, lives
from conformance.pair import ROLES, Profile, Role
from testing.fleets.fleet import held
from testing.fleets.stack import Stack, run_async, running_stack
from testing.router.prefill_calls import prefill
from twinfang.bench.machine import machine
from wire.errors import TwinfangError
from wire.messages.generation import PrefillRequest
from wire.rpc import open_channel

RECOVERY_S = 60.0
DRAFT_FLAGS = ("--speculative", "3", "--drafter", "ngram")
ENVIRONMENT = {"UCX_TLS": "^cma"}
"""As between containers: a read needs the process that is read, and a frozen one stops it halfway."""
MEMORY_FLAGS = {
    "plain": "--cache-memory 0.012 --cached-states 4",
    "drafts": "--cache-memory 0.02 --cached-states 4",
    "attention-drafts": "--cache-memory 0.0035",
}
"""By profile: room for about ten prompts."""
SINGLE_FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "8")


@dataclass(frozen=True)
class TwinfangPair:
    """``twinfang up``."""

    lease_s: float = 2.0
    name: str = "twinfang"

    @property
    def title(self) -> str:
        return f"Twinfang {machine()['twinfang']}"

    @property
    def without_drafts(self) -> Mapping[str, object]:
        return {"speculate": False}

    def about(self) -> Mapping[str, object]:
        packages = ("twinfang", "torch", "nixl")
        return {
            "versions": {name: machine()[name] for name in packages},
            **{
                f"pair, {name}": shlex.join(["twinfang", "up", "--model", "MODEL", *self._flags(name)])
                for name in MEMORY_FLAGS
            },
            "single server": shlex.join(["twinfang", "serve", "--model", "MODEL", *SINGLE_FLAGS]),
            "environment": ENVIRONMENT,
        }

    def _flags(self, profile: str) -> tuple[str, ...]:
        deadlines = ("--lease-ttl", f"{self.lease_s:g}", "--transfer-deadline", f"{self.lease_s:g}")
        drafts = () if profile == "plain" else DRAFT_FLAGS
        return (*SINGLE_FLAGS, "--threads", "1", *shlex.split(MEMORY_FLAGS[profile]), *deadlines, *drafts)

    @contextmanager
    def monolith(self, profile: Profile, model: Path) -> Iterator[str]:
        with running_stack("serve", "--model", str(model), *SINGLE_FLAGS, module=MORTAL_STACK) as stack:
            yield stack.url

    @contextmanager
    def running(self, profile: Profile, model: Path, logs: Path) -> Iterator[RunningTwinfang]:
        with running_stack(
            "up",
            "--model",
            str(model),
            *self._flags(profile.name),
            environment=ENVIRONMENT,
            module=MORTAL_STACK,
        ) as stack:
            try:
                yield RunningTwinfang(stack)
            finally:
                (logs / f"{self.name}-{profile.name}.log").write_text(stack.log, encoding="utf-8")


@dataclass(frozen=True)
class RunningTwinfang:
    """A running ``twinfang up``."""

    stack: Stack

    @property
    def url(self) -> str:
        return self.stack.url

    @property
    def model(self) -> str:
        return self.stack.model

    def pids(self, role: Role) -> Sequence[int]:
        process = self.stack.processes().get(f"{role}-0")
        return [] if process is None else [process.pid]

    def num_handed_over(self) -> int:
        return self.stack.stats("prefill-0")["prefill-0"].leases_held

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        address = self.stack.processes()["prefill-0"].address

        async def compute(channel: grpc.aio.Channel, prompt: Sequence[int]) -> None:
            async for _ in prefill(channel, PrefillRequest(f"alone-{uuid.uuid4()}", tuple(prompt))):
                pass

        async def compute_all() -> None:
            async with open_channel(address) as channel:
                await asyncio.gather(*(compute(channel, prompt) for prompt in prompts))

        run_async(compute_all)

    def held(self) -> Mapping[str, int]:
        try:
            stats = self.stack.stats()
        except (grpc.RpcError, TwinfangError) as error:
            raise ConnectionError(str(error)) from error
        return {
            f"{server} {kind}": count for server, one in stats.items() for kind, count in held(one).items()
        }

    def restart(self) -> None:
        for role in ROLES:
            kill(self, role)
        self.recover()

    def recover(self) -> None:
        self.stack.wait_until(self._is_whole, "the stack is ready again", RECOVERY_S)

    def _is_whole(self) -> bool:
        """Whether all processes of the status live and serve. After a kill, the status is late."""
        pids = [pid for role in ROLES for pid in self.pids(role)]
        return len(pids) == len(ROLES) and all(map(lives, pids)) and self.stack.is_ready()
