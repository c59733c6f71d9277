"""Shared code for tests of speculation: reusable engines, requests and answers, and a drafter that knows the
answers."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models import read_config
from engine.ranks.lead import LeadEngine
from engine.request import Request
from engine.step.program import Step
from testing.engines.leading import own
from testing.engines.sanitizing import SANITIZE
from testing.engines.shared_prefixes import prompts_with_shared_prefixes
from wire.messages.generation import RequestStats, TokenLogprobs
from wire.messages.sampling_params import SamplingParams, Thinking

LOGPROB_TOLERANCE = 5e-5
"""Room for float32 rounding with random weights, whose logits are large: without speculation, a request that
runs alone and the same request in a batch differ by 2e-5. For a trained model the tolerance is 1e-5."""
MOST_STEPS = 3000
"""A run with more steps than this counts as hanging."""
MOST_ENGINES = 40
"""Maximum number of engines kept at a time; each has pools of 64 MiB."""


@dataclass(frozen=True)
class Ask:
    """One request of a test."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    stop: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None
    keeps_state: bool = False

    def request(self, name: str) -> Request:
        return Request(
            name,
            list(self.prompt),
            self.params,
            prompt_logprobs_wanted=self.prompt_logprobs,
            stop_token_ids=self.stop,
            seed=self.seed,
            keeps_state=self.keeps_state,
        )


@dataclass
class Answer:
    """The outputs of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    stats: RequestStats | None = None
    num_outputs: int = 0
    cancelled: bool = False

    @property
    def said(self) -> tuple[list[int], str | None, int | None]:
        return self.tokens, self.finish_reason, self.stop_token_id

    def add(self, output) -> None:
        assert self.finish_reason is None, "an output after the last one"
        self.num_outputs += 1
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_token_id = output.finish_reason, output.stop_token_id
        self.stats = output.stats


def serve(engine, asks, concurrency=32, *, per_step=32, cancels=None, on_step=None) -> list[Answer]:
    """Return the answers in order. At most ``per_step`` requests join before a step, as long as there is
    room.

    ``cancels``: by request index, the number of tokens after which the request is cancelled; its answer ends
    as ``cancelled``.
    """
    answers = [Answer(ask.request(str(i))) for i, ask in enumerate(asks)]
    waiting, active, cancels = list(reversed(answers)), set(), dict(cancels or {})
    masks_came = threading.Event()
    engine.grammars.on_news(masks_came.set)
    for _ in range(MOST_STEPS):
        for _ in range(per_step):
            if waiting and len(active) < concurrency:
                answer = waiting.pop()
                engine.add(answer.request)
                active.add(answer.request.request_id)
        masks_came.clear()
        result = engine.step()
        if result.did_nothing and active:
            assert masks_came.wait(60), "there is nothing to compute, and no mask comes"
        for output in result.outputs:
            answers[int(output.request_id)].add(output)
            if output.finish_reason is not None:
                active.discard(output.request_id)
        for name in sorted(active):
            if len(answers[int(name)].tokens) >= cancels.get(int(name), math.inf):
                del cancels[int(name)]
                if engine.cancel(name) is not None:
                    answers[int(name)].cancelled = True
                    active.discard(name)
        if on_step is not None:
            on_step(answers)
        if not waiting and not active:
            while not engine.step().did_nothing:
                pass
            return answers
    raise AssertionError(f"{len(active)} requests never ended")


def assert_same(
    answers: Sequence[Answer], expected: Sequence[Answer], tolerance: float = LOGPROB_TOLERANCE
) -> None:
    """Assert equal tokens, equal ends of answers, and log-probabilities equal up to rounding."""
    for i, (ours, theirs) in enumerate(zip(answers, expected, strict=True)):
        assert ours.said == theirs.said, f"request {i}: {ours.request.params}, {ours.request.num_prompt}"
        assert ours.tokens == ours.request.tokens[ours.request.num_prompt :]
        _assert_same_logprobs(ours.logprobs, theirs.logprobs, tolerance)
        _assert_same_logprobs(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), tolerance)


def _assert_same_logprobs(ours, theirs, tolerance) -> None:
    assert [(one.token_id, one.rank) for one in ours] == [(one.token_id, one.rank) for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one.logprob - other.logprob) <= tolerance
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
        for (_, a), (_, b) in zip(one.top, other.top, strict=True):
            assert abs(a - b) <= tolerance


class Engines:
    """Engines by their configuration, for tests to share. Between tests an engine owns nothing."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Engine] = {}
        self._plain: dict[tuple[Path, Ask], Answer] = {}

    def get(self, model_dir: Path, mode: str, k: int, drafter: str | None, ahead: int, **settings) -> Engine:
        key = (model_dir, mode, k, drafter, ahead, *sorted(settings.items()))
        engine = self._made.pop(key, None) or make_engine(model_dir, mode, k, drafter, ahead, **settings)
        self._made[key] = engine
        if len(self._made) > MOST_ENGINES:
            del self._made[next(iter(self._made))]
        return engine

    def plain(self, model_dir: Path, asks: Sequence[Ask]) -> list[Answer]:
        """Return the answers without speculation and without a prefix cache."""
        new = [ask for ask in dict.fromkeys(asks) if (model_dir, ask) not in self._plain]
        if new:
            engine = self.get(model_dir, "none", 0, None, 0)
            for ask, answer in zip(new, serve(engine, new), strict=True):
                self._plain[model_dir, ask] = answer
        return [self._plain[model_dir, ask] for ask in asks]


def make_engine(model_dir, mode, k, drafter, ahead, **settings) -> Engine:
    """Return an engine. It is not sanitized if it launches steps ahead, because such steps can't be."""
    settings = {"max_num_seqs": 32, "cache_memory_bytes": 64 << 20, "max_batch_tokens": 256, **settings}
    if mode == "all" and read_config(model_dir).recurrent is not None:
        settings.setdefault("state_block_size", settings.get("block_size", 16))
    settings.setdefault("sanitize", SANITIZE and not ahead)
    return Engine(
        EngineConfig(
            model_dir,
            "both",
            device="cpu",
            cache_mode=mode,
            num_speculative=k,
            drafter=drafter,
            steps_ahead=ahead,
            **settings,
        )
    )


def assert_nothing_is_owned(engine: Engine | LeadEngine, num_blocks: int | None = None) -> None:
    """Assert that requests own nothing. What only the prefix cache owns can be evicted. ``num_blocks``: the
    number of free blocks, if a test took some."""
    assert engine.step().did_nothing
    engine = own(engine)
    owned = engine.scheduler.owned
    assert owned.cache.num_available_blocks == (num_blocks or owned.blocks.capacity)
    assert owned.cache.num_available_slots == owned.slots.capacity
    assert len(owned.free_rows) == engine.config.max_num_seqs
    assert not engine._runner.state.active.any()


class ScriptedDrafter:
    """Knows each request's answer, and drafts it or something else.

    | style | drafts |
    |---|---|
    | right | the answer |
    | wrong | something else, from the first draft on |
    | mixed | any number of right drafts, a wrong one, then any; sometimes fewer drafts than allowed |
    """

    is_recorded = False

    def __init__(
        self, engine: Engine, texts: Sequence[Sequence[int]], style: str, wrong_id: int | None
    ) -> None:
        self._state = engine._runner.state
        self._vocab_size = engine.model.config.vocab_size
        self._texts = [list(text) for text in texts]
        self._style = style
        self._wrong_id = wrong_id
        self._choose = random.Random(len(texts))
        self._by_row: dict[int, list[int]] = {}

    def fill(self, request: Request) -> None:
        self._by_row[request.row] = self._texts[int(request.request_id)]

    def draft(self, step: Step, hidden: Tensor | None) -> None:
        state = self._state
        for row in step.rows.tolist():
            budget = int(state.num_drafts[row])
            if budget == 0 or not state.active[row]:
                continue
            known = int(state.num_computed[row]) + 1
            right = self._by_row[row][known : known + budget]
            drafts = self._drafts(right + [0] * (budget - len(right)))
            state.num_drafts[row] = len(drafts)
            for i, token_id in enumerate(drafts, 1):
                state.tokens[row, i] = token_id

    def _drafts(self, right: list[int]) -> list[int]:
        if self._style == "right":
            return right
        num_right = 0 if self._style == "wrong" else self._choose.randint(0, len(right))
        drafts = right[:num_right]
        for token_id in right[num_right:]:
            is_first = len(drafts) == num_right
            other = (token_id + 1) % self._vocab_size if self._wrong_id is None else self._wrong_id
            drafts.append(other if is_first or self._wrong_id is not None else self._any())
        if self._style == "mixed" and self._choose.random() < 0.2:
            return drafts[: self._choose.randint(0, len(drafts))]
        return drafts

    def _any(self) -> int:
        return self._choose.randrange(self._vocab_size)


@contextmanager
def scripted(engine: Engine, texts, style: str, *, wrong_id: int | None = None) -> Iterator[None]:
    """Replace the engine's drafter by one that knows ``texts``, prompt and answer of each request."""
    runner = engine._runner
    own = runner._drafter
    runner._drafter = runner._program._drafter = ScriptedDrafter(engine, texts, style, wrong_id)
    try:
        yield
    finally:
        runner._drafter = runner._program._drafter = own


def texts_of(asks: Sequence[Ask], answers: Sequence[Answer]) -> list[list[int]]:
    return [[*ask.prompt, *answer.tokens] for ask, answer in zip(asks, answers, strict=True)]


def gained_counts(engine: Engine) -> list[int]:
    """Return how many rows with drafts gained 1, 2, … 1 + k tokens."""
    counts = [engine.stats().drafted_by_position[0], *engine.stats().accepted_by_position, 0]
    return [at_least - more for at_least, more in pairwise(counts)]


def greedy_asks(count: int, seed: int, num_tokens: int = 16) -> list[Ask]:
    """Return prompts of one and of two tokens, then prompts with shared beginnings, some of them repeating
    themselves."""
    choose = random.Random(seed)
    prompts = [[choose.randrange(6, 150)], [choose.randrange(6, 150) for _ in range(2)]]
    prompts += [prompt[-70:] for prompt in prompts_with_shared_prefixes(count - 2, seed)]
    for prompt in prompts[2::2]:
        phrase = [choose.randrange(6, 150) for _ in range(choose.randint(3, 9))]
        prompt += phrase * choose.randint(2, 4)
    return [
        Ask(
            tuple(prompt),
            SamplingParams(max_tokens=choose.randint(num_tokens // 2, num_tokens), temperature=0),
        )
        for prompt in prompts
    ]


def short_asks(count: int, seed: int) -> list[Ask]:
    """Return requests with short prompts and long answers, which outgrow a small pool after admission."""
    params = SamplingParams(max_tokens=36, temperature=0)
    return [replace(ask, prompt=ask.prompt[-24:], params=params) for ask in greedy_asks(count, seed)]


def sampled_asks(count: int, seed: int, num_tokens: int = 16) -> list[Ask]:
    """Return requests that use every way to sample in turn, seeded."""
    choose = random.Random(seed)
    stops = frozenset(choose.sample(range(150), 12))
    kinds: list[tuple[dict[str, object], frozenset[int]]] = [
        ({"temperature": 0.0, "logprobs": 2}, frozenset()),
        ({"temperature": 0.8, "logprobs": 0}, frozenset()),
        ({"temperature": 1.0, "top_p": 0.9}, frozenset()),
        ({"temperature": 0.7, "top_k": 20, "logprobs": 3}, frozenset()),
        (
            {
                "temperature": 0.0,
                "repetition_penalty": 1.3,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.4,
            },
            frozenset(),
        ),
        (
            {
                "temperature": 0.9,
                "frequency_penalty": 0.8,
                "logit_bias": ((7, 3.0), (9, -5.0)),
                "logprobs": 1,
            },
            frozenset(),
        ),
        ({"temperature": 1.0, "min_tokens": 6}, stops),
        ({"temperature": 0.0, "logprobs": 4, "min_tokens": 3}, stops),
        ({"temperature": 0.8, "speculate": False, "logprobs": 1}, frozenset()),
        ({"temperature": 1.2, "min_p": 0.05}, stops),
        ({"temperature": 0.9, "thinking": Thinking((5,), (7, 8, 7), is_open=True, budget=4)}, frozenset()),
    ]
    asks = []
    for i, ask in enumerate(greedy_asks(count, seed, num_tokens)):
        params, stop = kinds[i % len(kinds)]
        params = SamplingParams(max_tokens=max(8, ask.params.max_tokens), **params)
        asks.append(
            Ask(ask.prompt, params, seed=seed + i, stop=stop, prompt_logprobs=1 if i % 7 == 3 else None)
        )
    return asks
