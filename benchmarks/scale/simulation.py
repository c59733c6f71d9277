"""Simulates prefill and decode servers step by step, with given step costs and the router's own policy.

| part | as |
|---|---|
| arrivals | Poisson; prompt and answer lengths are drawn independently |
| router | one, whose bookkeeping is current; it takes the less loaded of two servers of each kind |
| prefill server | first come, first served; a step takes chunks of waiting prompts up to ``chunk_tokens`` |
| handoff | all blocks after the prompt's end; a decode server's link reads one prompt at a time |
| decode server | first come, first served into free rows with blocks for prompt and answer |

A row gains one token per step; its first comes from computing the prompt's last token. Early reads of long
prompts, prefix caches, drafts, preemption and faults are left out.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from engine.cost.goodput import Lengths, Objective, ServerLimits
from engine.cost.step_cost import StepCosts, pairs_of
from router.fleet.links.assignments import Assignment
from router.policies.least_loaded import LeastLoaded
from router.policies.policy import Demand
from testing.simulation.policies import INFO
from testing.simulation.time import SimulatedRouter, SimulatedTime


@dataclass
class SimulatedRequest:
    """Times are seconds since the simulation's start."""

    arrived_s: float
    num_prompt: int
    num_answer: int
    first_token_s: float = -1.0
    ended_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """0 for an answer of one token."""
        return (self.ended_s - self.first_token_s) / max(1, self.num_answer - 1)

    def meets(self, objective: Objective) -> bool:
        return self.ttft_s <= objective.ttft_s and self.tpot_s <= objective.tpot_s


def poisson_requests(
    num: int, prompts: Lengths, answers: Lengths, seed: int, per_s: float = 1.0
) -> list[SimulatedRequest]:
    """Return the same requests for each ``per_s``, only closer together, so that rates can be compared."""
    rng, at, requests = random.Random(seed), 0.0, []
    for _ in range(num):
        at += rng.expovariate(1.0)
        lengths = (lengths.at(rng.uniform(1e-9, 1 - 1e-9)) for lengths in (prompts, answers))
        requests.append(SimulatedRequest(at / per_s, *lengths))
    return requests


class PrefillServer:
    """Computes chunks of waiting prompts, oldest first, step after step."""

    def __init__(self, time: SimulatedTime, costs: StepCosts, limits: ServerLimits) -> None:
        self._time, self._costs, self._chunk_tokens = time, costs.prefill, limits.chunk_tokens
        self._waiting: deque[list[int]] = deque()
        """Tokens computed and tokens to compute of each prompt."""
        self._done: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def add(self, num_tokens: int, done: Callable[[], None]) -> None:
        self._waiting.append([0, num_tokens])
        self._done.append(done)
        if not self._is_busy:
            self._step()

    def _step(self) -> None:
        budget, num_pairs, num_ended = self._chunk_tokens, 0.0, 0
        for prompt in self._waiting:
            size = min(budget, prompt[1] - prompt[0])
            num_pairs += pairs_of(prompt[0], size)
            prompt[0] += size
            budget -= size
            num_ended += prompt[0] == prompt[1]
            if budget == 0:
                break
        self._is_busy = True
        seconds = self._costs.seconds(self._chunk_tokens - budget, num_pairs)
        self._time.at(self._time.now + seconds, partial(self._end, num_ended))

    def _end(self, num_ended: int) -> None:
        self._is_busy = False
        ended = [self._done.popleft() for _ in range(num_ended)]
        for _ in range(num_ended):
            self._waiting.popleft()
        if self._waiting:
            self._step()
        for done in ended:
            done()


@dataclass
class _Row:
    request: SimulatedRequest
    num_blocks: int
    ended: Callable[[], None]


class DecodeServer:
    """Rows with a place and blocks gain one token per step. A step costs O(rows that begin or end)."""

    def __init__(self, time: SimulatedTime, costs: StepCosts, limits: ServerLimits) -> None:
        self._time, self._costs, self._limits = time, costs, limits
        self._waiting: deque[_Row] = deque()
        self._link_free_s = 0.0
        self.num_admitted = 0
        self.free_blocks = limits.num_blocks
        self._landed: list[_Row] = []
        self._new: list[_Row] = []
        self._running: list[tuple[int, int, _Row]] = []
        """A heap, ordered by the step in which each row ends."""
        self._num_context = 0
        self._num_steps = 0
        self._is_busy = False
        self.most_rows = 0

    def add(self, request: SimulatedRequest, ended: Callable[[], None]) -> None:
        """Adds a request whose prompt is computed. Raises :class:`ValueError` if it can never have enough
        blocks."""
        num_blocks = self._limits.blocks_for(request.num_prompt + request.num_answer)
        if num_blocks > self._limits.num_blocks:
            raise ValueError(
                f"a request of {request.num_prompt} + {request.num_answer} tokens needs {num_blocks} blocks, "
                f"a decode server has {self._limits.num_blocks}; lower the lengths' maximum"
            )
        self._waiting.append(_Row(request, num_blocks, ended))
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.num_admitted < self._limits.max_rows:
            row = self._waiting[0]
            if row.num_blocks > self.free_blocks:
                break
            self._waiting.popleft()
            self.num_admitted += 1
            self.free_blocks -= row.num_blocks
            self.most_rows = max(self.most_rows, self.num_admitted)
            handoff, now = self._costs.handoff, self._time.now
            self._link_free_s = max(now, self._link_free_s) + handoff.reading_s(row.request.num_prompt)
            self._time.at(self._link_free_s + handoff.latency_s, partial(self._land, row))

    def _land(self, row: _Row) -> None:
        self._landed.append(row)
        if not self._is_busy:
            self._step()

    def _step(self) -> None:
        for row in self._landed:
            last_step = self._num_steps + row.request.num_answer
            heapq.heappush(self._running, (last_step, id(row), row))
            self._num_context += row.request.num_prompt
        self._new, self._landed = self._landed, []
        self._is_busy = True
        seconds = self._costs.decode.seconds(len(self._running), self._num_context)
        self._time.at(self._time.now + seconds, self._end)

    def _end(self) -> None:
        self._is_busy = False
        self._num_steps += 1
        self._num_context += len(self._running)
        for row in self._new:
            row.request.first_token_s = self._time.now
        ended = []
        while self._running and self._running[0][0] == self._num_steps:
            row = heapq.heappop(self._running)[2]
            row.request.ended_s = self._time.now
            self._num_context -= row.request.num_prompt + row.request.num_answer
            self.num_admitted -= 1
            self.free_blocks += row.num_blocks
            ended.append(row)
        self._admit()
        if self._running or self._landed:
            self._step()
        for row in ended:
            row.ended()


class ScaleSimulation(SimulatedTime):
    """A simulation of ``num_prefill`` and ``num_decode`` servers, each kind with the same costs and
    limits."""

    def __init__(
        self, costs: StepCosts, limits: ServerLimits, *, num_prefill: int, num_decode: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.prefill = {f"prefill-{i}": PrefillServer(self, costs, limits) for i in range(num_prefill)}
        self.decode = {f"decode-{i}": DecodeServer(self, costs, limits) for i in range(num_decode)}
        self._to_prefill = SimulatedRouter(LeastLoaded(random.Random(seed)), self)
        self._to_decode = SimulatedRouter(LeastLoaded(random.Random(seed + 1)), self)
        for address in self.prefill:
            self._to_prefill.join(address, INFO)
        for address in self.decode:
            self._to_decode.join(address, replace(INFO, role="decode"))

    def answer(self, requests: Sequence[SimulatedRequest]) -> None:
        """Answers all requests, until the last has ended."""
        for request in requests:
            self.at(request.arrived_s, partial(self._send, request))
        self.run()

    def _send(self, request: SimulatedRequest) -> None:
        demand = _demand(request.num_prompt)
        decode = self._to_decode.choose(self.decode, demand)
        decoding = self._to_decode.known[decode].begin(request.num_prompt)
        if request.num_prompt == 1:  # nothing to hand over
            self.decode[decode].add(request, decoding.ended)
            return
        prefill = self._to_prefill.choose(self.prefill, demand)
        computing = self._to_prefill.known[prefill].begin(request.num_prompt)
        done = partial(self._hand_over, request, computing, self.decode[decode], decoding)
        self.prefill[prefill].add(request.num_prompt - 1, done)

    @staticmethod
    def _hand_over(
        request: SimulatedRequest, computing: Assignment, decode: DecodeServer, decoding: Assignment
    ) -> None:
        computing.ended()
        decode.add(request, decoding.ended)


@lru_cache(maxsize=4096)
def _demand(num_tokens: int) -> Demand:
    """Returns a demand; only a prompt's length matters here."""
    return Demand((0,) * num_tokens)
