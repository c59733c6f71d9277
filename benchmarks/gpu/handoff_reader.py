"""The reading side of measured handoffs: a decode engine that reads what a prefill process lends."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.prefill_process import ADDRESS, PrefillProcess
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sanitizer.checksum import Checksums
from kv_transfer.handshake import introduce
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferListener, TransferResult
from wire.messages.generation import RequestOutput
from wire.messages.handoff import Digests, Ticket
from wire.messages.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
DEADLINE_S = 60.0
IDLE_S = 0.0005
SHOWN = 8


class HandoffReader(TransferListener):
    """The reading engine, its transfers and what they came to."""

    def __init__(self, config: EngineConfig, there: PrefillProcess) -> None:
        self._ended: queue.SimpleQueue[TransferResult | BaseException] = queue.SimpleQueue()
        self._there = there
        self.engine = Engine(config)
        self._checksums = Checksums(self.engine.caches)
        who = introduce(self.engine.caches, f"decode-{secrets.token_hex(4)}", self.engine.fingerprint)
        self._thread = TransferThread(self.engine.caches, who.incarnation, self._ended.put)
        self._sink = TransferSink(self._thread, who, self)
        self._thread.start(self._sink)
        self._sink.add_peer(ADDRESS, there.handshake(self._sink.introduction))
        self._reading: dict[str, Request] = {}
        self.results: list[TransferResult] = []
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self.answers: dict[str, list[int]] = {}
        self.num_ended = 0
        self._prompts: dict[str, list[int]] = {}

    def ask(self, request_id: str, prompt: list[int]) -> None:
        """Has the prompt prefilled; its answer comes later."""
        self._prompts[request_id] = prompt
        self._there.prefill(request_id, prompt)

    def turn(self) -> None:
        """Admits tickets that have come, runs a step, reads and lands."""
        for ticket in self._there.tickets():
            prompt = self._prompts.pop(ticket.request_id)
            self.engine.add(Request(ticket.request_id, list(prompt), PARAMS, ticket=ticket))
        result = self.engine.step()
        for request in result.to_transfer:
            assert request.ticket is not None
            self._reading[request.request_id] = request
            self._sink.read(
                request.ticket,
                block_ids=request.memory.block_ids[: len(request.ticket.block_ids)],
                state_slot=request.memory.state_slot,
                deadline_s=DEADLINE_S,
            )
        self._note(result.outputs)
        while not self._ended.empty():
            self._landed(self._ended.get())
        if result.did_nothing:
            time.sleep(IDLE_S)

    def _landed(self, transfer: TransferResult | BaseException) -> None:
        if isinstance(transfer, BaseException):
            raise transfer
        request = self._reading.pop(transfer.request_id)
        assert isinstance(request.ticket, Ticket)
        if transfer.error is None:
            self.results.append(transfer)
            if self._digests(request, request.ticket) != request.ticket.digests:
                self.wrong.append(transfer.request_id)
        self._note(self.engine.transferred(request, error=transfer.error, settled=transfer.settled))

    def _note(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error is not None:
                self.errors.append(f"{output.request_id}: {output.error}")
            self.num_ended += output.finish_reason is not None

    def _digests(self, request: Request, ticket: Ticket) -> Digests:
        """Computes what the sanitizer of the prefill engine computed for the ticket."""
        block_ids = request.memory.block_ids[: len(ticket.block_ids)]
        block_size, device = self.engine.config.block_size, self.engine.device
        covered = ticket.num_tokens - np.arange(len(block_ids)) * block_size
        sums = self._checksums.shares_of_blocks(
            torch.tensor(block_ids, device=device),
            torch.from_numpy(covered.clip(0, block_size)).to(device),
        )
        state = self._checksums.shares_of_state(request.memory.state_slot)
        return Digests(tuple(sums.tolist()), tuple(state.tolist()))

    def close(self) -> None:
        self._thread.close()

    # --- on the transfer thread ------------------------------------------------------------------

    def transferred(self, result: TransferResult) -> None:
        self._ended.put(result)

    # --- what it came to -------------------------------------------------------------------------

    def figures(self, began_s: float) -> dict[str, Any]:
        seconds = [result.seconds for result in self.results]
        rates = [result.num_bytes / result.seconds / 1e9 for result in self.results]
        elapsed_s = time.monotonic() - began_s
        num_tokens = sum(map(len, self.answers.values()))
        return {
            "memory": "VRAM" if self.engine.caches.kv.is_cuda else "DRAM",
            "handoffs": len(self.results),
            "failed": self.errors[:SHOWN],
            "num_failed": len(self.errors),
            "wrong": self.wrong[:SHOWN],
            "num_wrong": len(self.wrong),
            "transfer_ms": _percentiles([1e3 * one for one in seconds]),
            "gb_per_s": _percentiles(rates),
            "mean_bytes": sum(result.num_bytes for result in self.results) / max(1, len(self.results)),
            "mean_descriptors": sum(r.num_descriptors for r in self.results) / max(1, len(self.results)),
            "seconds": elapsed_s,
            "tokens_per_s": num_tokens / elapsed_s,
            "steps": {" ".join(key): count for key, count in self.engine.measures.steps.items()},
        }


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return (
        {f"p{p}": round(ordered[(len(ordered) - 1) * p // 100], 4) for p in (10, 50, 90, 99)}
        if ordered
        else {}
    )
