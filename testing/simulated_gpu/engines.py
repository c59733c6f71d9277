"""An engine on the simulated GPU beside the same engine on the CPU, which says what the answers must be."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from llguidance import LLMatcher

from engine.config import EngineConfig
from engine.engine import Engine
from testing.checkpoints.random_checkpoint import EOS_TOKEN_ID
from testing.engines.speculating import Answer, Ask, greedy_asks, sampled_asks, serve, short_asks
from testing.simulated_gpu.gpu import SimulatedGpu
from testing.simulated_gpu.streams import AtOnce, Late, Pace
from wire.messages.sampling_params import Thinking


@dataclass(frozen=True)
class Setting:
    """A model and the settings of an engine that runs it."""

    model: str
    """A name of the test's checkpoints."""
    k: int = 0
    drafter: str | None = None
    mode: str = "none"
    more: tuple[tuple[str, object], ...] = ()

    def engine(self, model_dir: Path, device: str, role: str = "both") -> Engine:
        sizes = {"max_num_seqs": 4, "cache_memory_bytes": 16 << 20, "max_batch_tokens": 64}
        settings = {"sanitize": False, **sizes, **dict(self.more)}
        config = EngineConfig(
            model_dir,
            role,
            device=device,
            cache_mode=self.mode,
            num_speculative=self.k,
            drafter=self.drafter if self.k else None,
            steps_ahead=0 if device == "cpu" or settings["sanitize"] else 1,
            **settings,
        )
        with patch("engine.engine_parts.GPU_FLOPS_PER_BYTE", 0.0):  # a GPU computes so small models at once
            return Engine(config)


CROWDED = Setting(
    "dense",
    2,
    "ngram",
    "none",
    (("cache_memory_bytes", 440 << 10), ("block_size", 4), ("max_model_len", 72)),
)
HOST_MEMORY = Setting(
    "dense",
    2,
    "ngram",
    "all",
    (
        ("cache_memory_bytes", 700 << 10),
        ("host_cache_bytes", 4 << 20),
        ("cached_states", 2),
        ("block_size", 8),
        ("max_model_len", 160),
    ),
)
SETTINGS = {
    "plain": Setting("dense"),
    "mtp": Setting("dense", 2, "mtp", "align"),
    "ngram": Setting("dense", 3, "ngram", "all", (("state_block_size", 16),)),
    "replay": Setting(
        "dense", 3, "ngram", "all", (("speculative_state", "replay"), ("state_block_size", 16))
    ),
    "experts": Setting("moe", 1, "mtp", "align", (("dtype", "bfloat16"),)),
    "crowded": CROWDED,
    "host memory": HOST_MEMORY,
}


@dataclass
class Simulated:
    """One setting on both devices."""

    setting: Setting
    model_dir: Path
    gpu: SimulatedGpu
    engine: Engine
    _cpu: Engine
    _expected: dict[Ask, Answer] = field(default_factory=dict)

    @classmethod
    def make(cls, setting: Setting, model_dir: Path, pace: Pace | None = None) -> Simulated:
        gpu = SimulatedGpu(pace)
        with gpu:
            engine = setting.engine(model_dir, "cuda")
        return cls(setting, model_dir, gpu, engine, setting.engine(model_dir, "cpu"))

    @property
    def num_steps(self) -> int:
        """Steps of the simulated GPU's engine so far."""
        return self.engine.stats().num_steps

    def expected(self, asks: Sequence[Ask]) -> list[Answer]:
        """Return the answers of the CPU."""
        new = [ask for ask in dict.fromkeys(asks) if ask not in self._expected]
        self._expected |= zip(new, serve(self._cpu, new, 4), strict=True)
        return [self._expected[ask] for ask in asks]

    @contextmanager
    def running(self, seed: int | None) -> Iterator[None]:
        """Let the device run at once, or with a seed late and at random. Waits of the host are counted."""
        self.gpu.streams.pace = AtOnce() if seed is None else Late(seed)
        with self.gpu, self.gpu.watching():
            yield

    def differences(self, asks: Sequence[Ask], seed: int | None = None) -> list[str]:
        """Serve requests that join and leave in a random order; say which answers differ from the CPU's."""
        choose = random.Random(seed or 0)
        cancels = {i: choose.randrange(6) for i in range(len(asks)) if choose.random() < 0.2}
        expected = self.expected(asks)
        with self.running(seed):
            answers = serve(
                self.engine,
                asks,
                choose.randint(1, 4),
                per_step=choose.randint(1, 3),
                cancels=cancels,
            )
        return [
            f"request {i}: {ours.said}, expected {theirs.said}"
            for i, (ours, theirs) in enumerate(zip(answers, expected, strict=True))
            if not _is_same(ours, theirs)
        ]


def _is_same(ours: Answer, theirs: Answer) -> bool:
    if ours.cancelled:
        return ours.tokens == theirs.tokens[: len(ours.tokens)]
    reported = [(one.token_id, one.rank) for one in ours.logprobs]
    return ours.said == theirs.said and reported == [(one.token_id, one.rank) for one in theirs.logprobs]


def all_kinds_of_asks(count: int, seed: int) -> list[Ask]:
    """Return requests of every kind: greedy and sampled in all ways, with log-probabilities of prompts, with
    grammars, also behind thinking."""
    words = LLMatcher.grammar_from_regex("([a-z]{1,5} ){2,3}")
    asks = [*greedy_asks(count, seed), *sampled_asks(count, seed)]
    for ask in greedy_asks(4, seed + 1)[2:]:
        asks.append(replace(ask, params=replace(ask.params, logprobs=2), prompt_logprobs=1))
        params = replace(ask.params, grammar=words, min_tokens=0)
        thinking = Thinking((50,), (51, 52), is_open=True, budget=3)
        for one in (params, replace(params, thinking=thinking)):
            asks.append(replace(ask, params=one, stop=frozenset([EOS_TOKEN_ID])))
    random.Random(seed).shuffle(asks)
    return asks


def asks_for(setting: Setting, count: int, seed: int) -> list[Ask]:
    """Return the requests for a setting. Where memory is short they are short, and outgrow it together. Where
    there is host memory, prompts come twice."""
    if setting is SETTINGS["crowded"]:
        return short_asks(count, seed)
    asks = all_kinds_of_asks(count, seed)
    return asks + asks if setting is SETTINGS["host memory"] else asks
