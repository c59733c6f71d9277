"""The loads of the comparison, and how many requests each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.serving.closed_load import summary
from benchmarks.serving.load import Run, Workload, run_conversations, run_load, run_open_load
from benchmarks.side_by_side.models import FIRST_TOKEN_ID, last_token_id
from benchmarks.speculation.prompts import PROMPT_TOKENS, make_prompts

PLAIN, DRAFTS = "plain", "drafts"
"""How servers are started: with their own defaults, or with n-gram speculation of ``NUM_DRAFTS`` tokens."""
NUM_DRAFTS = 3
OURS = ("up", "serve")
EVERYBODY = (*OURS, "vllm", "vllm-pair", "transformers", "llama.cpp")
SERVERS = (*OURS, "vllm", "llama.cpp")
"""Those with continuous batching and caches. vLLM's pair and transformers get the first load only: it shows
that they are far slower than the others."""

TTFT_OBJECTIVE_S, TPOT_OBJECTIVE_S = 0.2, 0.01
NUM_REPETITIVE_PROMPTS = 128
WARM_UP_TOKENS, WARM_UP_SEED = 8, 500_032


@dataclass(frozen=True)
class Load:
    """A closed load: a new request starts when one ends. All prompts differ."""

    name: str
    title: str
    input_len: int
    output_len: int
    requests: Mapping[str, Mapping[int, int]]
    """By model and by requests in flight: the number of requests of one measurement."""
    seconds: Mapping[str, float]
    """By model: about how long one server takes for one measurement of each."""
    contenders: Sequence[str] = SERVERS
    variant: str = PLAIN
    temperature: float = 0.0
    top_p: float = 1.0
    shared_len: int = 0
    is_repetitive: bool = False

    @property
    def unit(self) -> str:
        """What the numbers of ``requests`` count."""
        return "in flight"

    def num_requests(self, model: str, at: int, scale: float) -> int:
        """Returns the number of requests of one measurement: never fewer than those in flight."""
        return max(at, round(self.requests[model][at] * scale))

    def workload(self, directory: Path, seed: int) -> Workload:
        return Workload(
            self.input_len,
            self.output_len,
            FIRST_TOKEN_ID,
            last_token_id(directory),
            seed,
            self.temperature,
            self.top_p,
            self.shared_len,
            _repetitive_prompts(directory) if self.is_repetitive else (),
        )

    def num_warm_up(self, at: int) -> int:
        return at

    async def run(self, url: str, model: str, workload: Workload, at: int, num: int) -> Run:
        return await run_load(url, model, workload, concurrency=at, num_requests=num)

    def figures(self, run: Run) -> dict[str, Any]:
        return dict(summary(run))

    def about(self) -> dict[str, Any]:
        """Returns what tables say about it."""
        return {
            "title": self.title,
            "unit": self.unit,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "variant": self.variant,
        }


@dataclass(frozen=True)
class Conversations(Load):
    """Conversations of several turns; each prompt is the whole conversation and ``input_len`` new tokens."""

    turns: int = 4

    @property
    def unit(self) -> str:
        return "conversations"

    async def run(self, url: str, model: str, workload: Workload, at: int, num: int) -> Run:
        return await run_conversations(
            url, model, workload, turns=self.turns, concurrency=at, num_conversations=num
        )


@dataclass(frozen=True)
class OpenLoad(Load):
    """Requests that arrive at a rate, whether or not earlier ones have ended."""

    @property
    def unit(self) -> str:
        return "requests/s"

    def num_warm_up(self, at: int) -> int:
        return 8

    async def run(self, url: str, model: str, workload: Workload, at: int, num: int) -> Run:
        return await run_open_load(url, model, workload, rate=at, num_requests=num)

    def figures(self, run: Run) -> dict[str, Any]:
        """Adds the requests that met both objectives, of those sent and per second."""
        good = sum(
            timing.ttft_s <= TTFT_OBJECTIVE_S and timing.tpot_s <= TPOT_OBJECTIVE_S for timing in run.timings
        )
        return super().figures(run) | {
            "refused": run.num_refused,
            "within_objectives": round(good / (len(run.timings) + run.num_refused), 4),
            "goodput_per_s": round(good / run.duration_s, 2),
        }


SMALL, LARGE, BUNDLED = "2m", "120m", "bundled"
SHORT = {SMALL: {1: 8, 8: 32, 32: 64}, LARGE: {1: 2, 8: 16}}
REPETITIVE = {BUNDLED: {1: 8, 8: 32}}

LOADS = {
    load.name: load
    for load in (
        Load("short", "256 → 128", 256, 128, SHORT, {SMALL: 12, LARGE: 16}, EVERYBODY),
        Load(
            "long",
            "2,048 → 128",
            2048,
            128,
            {SMALL: {1: 4, 8: 16}, LARGE: {1: 2, 8: 8}},
            {SMALL: 8, LARGE: 32},
        ),
        Load(
            *("sampled", "256 → 128, temperature 1, top-p 0.95", 256, 128, SHORT, {SMALL: 12, LARGE: 16}),
            temperature=1.0,
            top_p=0.95,
        ),
        Load(
            *("prefix", "1,024 shared + 256 → 128", 1280, 128),
            {SMALL: {1: 8, 8: 32}, LARGE: {8: 16}},
            {SMALL: 8, LARGE: 16},
            shared_len=1024,
        ),
        Conversations(
            *("conversation", "4 turns, each 256 new → 64", 256, 64),
            {SMALL: {8: 16}, LARGE: {4: 4}},
            {SMALL: 5, LARGE: 14},
            contenders=("up", "serve", "vllm"),
        ),
        OpenLoad(
            *("open", "128 → 64, arrivals at a rate", 128, 64),
            {SMALL: {16: 512, 32: 512, 64: 512}},
            {SMALL: 65},
        ),
        Load(
            *("repetitive", "repetitive text, 192 → 128", PROMPT_TOKENS, 128, REPETITIVE, {BUNDLED: 6}),
            is_repetitive=True,
        ),
        Load(
            *("repetitive-drafts", f"the same, {NUM_DRAFTS} n-gram drafts", PROMPT_TOKENS, 128),
            REPETITIVE,
            {BUNDLED: 6},
            variant=DRAFTS,
            is_repetitive=True,
        ),
    )
}


def seed_of(load: Load, round_number: int, at: int) -> int:
    """Returns the seed of a measurement's prompts: contenders get the same prompts in a round, and no two
    measurements of a server share the beginning of any, which its prefix cache would keep.

    Repetitive prompts of all loads begin with the same one: seeds of loads differ by multiples of their
    number.
    """
    number = list(LOADS).index(load.name)
    return 8000 * NUM_REPETITIVE_PROMPTS * number + 1000 * round_number + 10 * at


@cache
def _repetitive_prompts(directory: Path) -> tuple[tuple[int, ...], ...]:
    """Returns prompts that repeat a passage of text eight times."""
    return tuple(map(tuple, make_prompts(directory, NUM_REPETITIVE_PROMPTS)["repetitive"]))
