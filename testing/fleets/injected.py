"""Faults that a test switches on in a server's process: ``python -m testing.fleets.slowed decode …``.

A fault is on while a file of its name lies in the folder that the environment names
(:mod:`testing.fleets.fault_folder`). Without such a file the process behaves like ``python -m twinfang``.

| fault | the process |
|---|---|
| ``dies-in-read`` | kills itself as soon as a read of a prompt's state is posted |
| ``damaged-handshake`` | sends a handshake in which one bit of NIXL's metadata is wrong |
| ``damaged-state`` | changes a bit of a state after its ticket's digests were computed; once |
| ``late-done`` | sends the notification that ends a lease only before the next one |
| ``small-chunks`` | computes at most 32 tokens of a prompt a step, and rests for 50 ms before each |
| ``late-start`` | waits, with everything imported, before it takes its port |
| ``slow-steps`` | rests for 20 ms before each step of a decode server: requests wait as on a small machine |
| ``slower-steps`` | rests for 100 ms before each such step: answers last as long as a test looks at them |
| ``lost-gpu`` | gets the error of a lost CUDA context from a step of a decode server; only the first server |
| ``hanging-step`` | waits for ever in such a step, like one whose kernel hangs; only the first server |
| ``no-gpu-memory`` | gets torch's out-of-memory error while the engine warms up |
| ``late-neighbour`` | waits before it reads a cached prefix that another server has lent |
| ``no-renewal`` | lets the leases of waiting requests expire: a bug on purpose, which tests must find |
| ``no-quarantine`` | reuses the destination of a read that missed its deadline: also a bug on purpose |
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine.engine import Engine
from engine.schedule.cache_modes import StateBlocks
from engine.schedule.prompt_chunks import PromptChunks
from kv_transfer.leases.seals import DigestSeals
from kv_transfer.leases.source import TransferSource
from kv_transfer.nixl.agent import TransferAgent
from kv_transfer.reads.lease_renewer import LeaseRenewer
from kv_transfer.reads.transfer import Transfer
from kv_transfer.starts.start_transfer import StartTransfer
from wire.server import GrpcServer

REST_S = 0.02
LONG_REST_S = 0.1
SMALL_CHUNK = 32
REST_AFTER_CHUNK_S = 0.05
FEW_TOKENS = 8
LOST_CONTEXT = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\n"
)
"""A message of torch, like the next one."""
NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.50 "
    "GiB is free. Including non-PyTorch memory, this process has 77.60 GiB memory in use."
)
WAITS = "waits for its start"
"""Printed by a process with fault ``late-start`` when only the start itself is left to do."""


def inject(folder: Path) -> None:
    """Replaces the methods that have faults by versions that look into ``folder``."""

    def replace(owner: type, name: str, fault: str, faulty: Callable[..., Any]) -> None:
        sound = getattr(owner, name)

        def chosen(*arguments: Any, **fields: Any) -> Any:
            if (folder / fault).exists():
                return faulty(sound, *arguments, **fields)
            return sound(*arguments, **fields)

        setattr(owner, name, chosen)

    replace(Transfer, "read_part", "dies-in-read", _die_in_read)
    replace(Transfer, "late", "no-quarantine", _give_up_as_if_settled)
    replace(TransferSource, "handshake", "damaged-handshake", _damage_handshake)
    replace(DigestSeals, "_sealed", "damaged-state", _damage_state(folder / "damaged-state"))
    replace(TransferAgent, "notify", "late-done", _late_notify())
    replace(Engine, "step", "slow-steps", _step_after(REST_S))
    replace(Engine, "step", "slower-steps", _step_after(LONG_REST_S))
    replace(Engine, "step", "lost-gpu", _once(folder / "lost-gpu", _lose_context))
    replace(Engine, "step", "hanging-step", _once(folder / "hanging-step", _hang))
    replace(Engine, "warm_up", "no-gpu-memory", _find_no_memory)
    replace(StateBlocks, "chunk_end", "small-chunks", _small_chunk_end)
    replace(PromptChunks, "plan", "small-chunks", _plan_slowly)
    replace(StartTransfer, "go_on", "late-neighbour", _wait_while(folder / "late-neighbour"))
    replace(LeaseRenewer, "hold", "no-renewal", _do_nothing)
    replace(GrpcServer, "__init__", "late-start", _start_late(folder / "late-start"))


def _do_nothing(_sound: Callable[..., Any], *_arguments: Any, **_fields: Any) -> None:
    pass


def _damage_handshake(sound: Callable[..., Any], *arguments: Any) -> Any:
    reply = sound(*arguments)
    (first, *others) = reply.ranks
    metadata = bytearray(first.agent_metadata)
    metadata[len(metadata) // 2] ^= 1
    damaged = dataclasses.replace(first, agent_metadata=bytes(metadata))
    return dataclasses.replace(reply, ranks=(damaged, *others))


def _damage_state(switch: Path) -> Callable[..., Any]:
    def seal_and_damage(sound: Callable[..., Any], seals: DigestSeals, ticket: Any, known: Any) -> Any:
        sealed = sound(seals, ticket, known)
        if sealed.unit_digests is not None:
            with contextlib.suppress(FileNotFoundError):
                switch.unlink()
                seals._digester._caches.state[ticket.state_slot, 0] ^= 1
        return sealed

    return seal_and_damage


def _late_notify() -> Callable[..., Any]:
    held: list[tuple[Any, ...]] = []

    def notify_of_the_last(sound: Callable[..., Any], *arguments: Any) -> None:
        for late in held:
            sound(*late)
        held[:] = [arguments]

    return notify_of_the_last


def _start_late(switch: Path) -> Callable[..., Any]:
    def wait(sound: Callable[..., Any], *arguments: Any) -> None:
        print(WAITS, flush=True)
        while switch.exists():
            time.sleep(REST_S)
        sound(*arguments)

    return wait


def _wait_while(switch: Path) -> Callable[..., Any]:
    def wait(sound: Callable[..., Any], *arguments: Any) -> None:
        while switch.exists():
            time.sleep(REST_S)
        sound(*arguments)

    return wait


def _step_after(rest_s: float) -> Callable[..., Any]:
    def rest_and_step(sound: Callable[..., Any], engine: Engine) -> Any:
        if engine.config.role == "decode":
            time.sleep(rest_s)
        return sound(engine)

    return rest_and_step


def _once(switch: Path, faulty: Callable[[], None]) -> Callable[..., Any]:
    """Runs ``faulty`` in one step of a decode server amid an answer: the fault switches itself off."""

    def fail_and_step(sound: Callable[..., Any], engine: Engine) -> Any:
        answers = engine.scheduler.running.values() if engine.config.role == "decode" else ()
        if any(len(request.tokens) > request.num_prompt + FEW_TOKENS for request in answers):
            with contextlib.suppress(FileNotFoundError):  # another server was faster
                switch.unlink()
                faulty()
        return sound(engine)

    return fail_and_step


def _lose_context() -> None:
    raise torch.AcceleratorError(LOST_CONTEXT)


def _hang() -> None:
    threading.Event().wait()


def _find_no_memory(_sound: Callable[..., Any], _engine: Engine) -> None:
    raise torch.OutOfMemoryError(NO_MEMORY)


def _small_chunk_end(sound: Callable[..., Any], mode: StateBlocks, request: Any, start: int, end: int) -> Any:
    return sound(mode, request, start, min(end, start + SMALL_CHUNK))


def _plan_slowly(sound: Callable[..., Any], chunks: PromptChunks, *arguments: Any) -> Any:
    joined, chunks._joined_tokens = chunks._joined_tokens, math.inf  # the chunks are small, not the prompts
    try:
        planned = sound(chunks, *arguments)
    finally:
        chunks._joined_tokens = joined
    if planned:
        time.sleep(REST_AFTER_CHUNK_S)
    return planned


def _die_in_read(sound: Callable[..., Any], transfer: Transfer, part: Any) -> None:
    sound(transfer, part)  # a small read may be over by now, but the lease's owner does not know yet
    os.kill(os.getpid(), signal.SIGKILL)


def _give_up_as_if_settled(sound: Callable[..., Any], transfer: Transfer) -> None:
    setup = transfer._setup
    listener = SimpleNamespace(
        transferred=lambda result: setup.listener.transferred(dataclasses.replace(result, settled=True)),
        settled=setup.listener.settled,
    )
    transfer._setup = dataclasses.replace(setup, listener=listener)
    sound(transfer)
