"""What speculation brings: drafts accepted by position, and output tokens/s with drafts and without.

    python -m benchmarks.speculation.drafts --json benchmarks/results/speculation.json

One process has one engine for each (drafter, k). They take turns, so that other processes disturb all alike.
On a CPU, seconds are CPU time on one thread: on cores of its own the engine would need as many. Only decode
steps are timed, from the moment when all requests of a batch have their first token until the first request
ends. Requests sample what the model writes, to the same length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.speculation.draft_coupling import first_draft_shares
from benchmarks.speculation.prompts import make_prompts
from engine.config import DrafterName, EngineConfig
from engine.engine import Engine
from engine.models import read_config
from engine.request import Request
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL
from wire.messages.generation import RequestOutput
from wire.messages.sampling_params import SamplingParams

DRAFTERS: tuple[DrafterName, ...] = ("mtp", "ngram")
COUNTED_DRAFTS = (1, 2, 3, 5)
TIMED_DRAFTS = (1, 2, 3)
BATCH_SIZES = (1, 8, 32)
MAX_ROWS = 32
ANSWER_TOKENS = 96
MAX_MODEL_LEN = 1024
CACHE_BYTES = 1 << 28
ENDLESS = 600
"""Length of an answer that is cancelled before it ends."""


@dataclass(frozen=True)
class Acceptance:
    """Drafts of one drafter with ``k`` drafts a step on one kind of prompts."""

    drafter: str
    k: int
    prompts: str
    temperature: float
    by_position: tuple[float, ...]
    """Share of the steps with a draft at this position in which it, and so all earlier ones, was accepted."""
    drafted_by_position: tuple[int, ...]
    accepted_length: float
    """Tokens a row gains in a step, the target's own included."""
    num_answers: int
    answers_changed: int
    """Answers that differ from those of k = 0: near-ties of two logits, or a fault."""


@dataclass(frozen=True)
class Speed:
    """Decode throughput of one (drafter, k) at one batch size: medians over rounds."""

    drafter: str
    k: int
    prompts: str
    batch: int
    tokens_per_s: float
    ratio: float
    """Ratio to k = 0 on the same prompts in the same round."""
    ratio_wall: float
    """The same ratio by wall time."""
    ms_per_step: float
    tokens_per_row_step: float


def make_engine(model_dir: Path, k: int, drafter: DrafterName | None) -> Engine:
    """Makes an engine without a prefix cache, so that a repeated prompt is computed again."""
    return Engine(
        EngineConfig(
            model_dir,
            "both",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_ROWS,
            cache_mode="none",
            cache_memory_bytes=CACHE_BYTES,
            num_speculative=k,
            drafter=drafter,
            num_threads=1,
        )
    )


def add_all(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Adds requests whose names and seeds are their indices, without a stop token."""
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), list(prompt), params, seed=1000 + i))


def answer_all(engine: Engine, prompts: Sequence[list[int]], temperature: float) -> list[list[int]]:
    """Answers all prompts; returns the answers' tokens."""
    add_all(engine, prompts, SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature))
    answers: list[list[int]] = [[] for _ in prompts]
    while not (result := engine.step()).did_nothing:
        for output in result.outputs:
            answers[int(output.request_id)] += output.token_ids
    return answers


def draft_counts(engine: Engine) -> tuple[list[int], list[int]]:
    """Returns drafted and accepted tokens by position, since the start."""
    stats = engine.stats()
    return list(stats.drafted_by_position), list(stats.accepted_by_position)


def acceptance(
    engine: Engine,
    name: str,
    prompts: Sequence[list[int]],
    temperature: float,
    expected: list[list[int]],
) -> Acceptance:
    """Counts while the engine answers ``prompts``; ``expected`` are the answers without drafts."""
    drafted, accepted = draft_counts(engine)
    answers = answer_all(engine, prompts, temperature)
    drafted_now, accepted_now = draft_counts(engine)
    drafted = [after - before for before, after in zip(drafted, drafted_now, strict=True)]
    accepted = [after - before for before, after in zip(accepted, accepted_now, strict=True)]
    num_tokens = len(prompts) * (ANSWER_TOKENS - 1)  # the first comes from the prompt's step
    config = engine.config
    return Acceptance(
        drafter=str(config.drafter),
        k=config.num_speculative,
        prompts=name,
        temperature=temperature,
        by_position=tuple(a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)),
        drafted_by_position=tuple(drafted),
        accepted_length=num_tokens / (num_tokens - sum(accepted)),
        num_answers=len(prompts),
        answers_changed=sum(a != b for a, b in zip(answers, expected, strict=True)),
    )


def measure_acceptance(
    model_dir: Path, prompts: dict[str, list[list[int]]]
) -> tuple[list[Acceptance], list[list[int]]]:
    """Returns all acceptances, and the sampled texts (prompts included) of the answers at temperature 1."""
    cases = [("text", 0.0), ("text", 1.0), ("recall", 0.0), ("repetitive", 0.0)]
    plain = make_engine(model_dir, 0, None)
    expected = {case: answer_all(plain, prompts[case[0]], case[1]) for case in cases}
    found = []
    for drafter, k in itertools.product(DRAFTERS, COUNTED_DRAFTS):
        engine = make_engine(model_dir, k, drafter)
        for name, temperature in cases:
            found.append(acceptance(engine, name, prompts[name], temperature, expected[name, temperature]))
            print(acceptance_row(found[-1]), flush=True)
    sampled = [a + b for a, b in zip(prompts["text"], expected["text", 1.0], strict=True)]
    return found, sampled


ACCEPTANCE_HEADER = (
    "\n| prompts | drafter | k | accepted at draft 1, 2, … | tokens a step | answers changed |\n"
    "|---|---|---|---|---|---|"
)


def acceptance_row(found: Acceptance) -> str:
    shares = ", ".join(f"{share:.0%}" for share in found.by_position)
    name = f"{found.prompts}, temperature {found.temperature:g}"
    changed = f"{found.answers_changed} of {found.num_answers}"
    return f"| {name} | {found.drafter} | {found.k} | {shares} | {found.accepted_length:.2f} | {changed} |"


@dataclass
class Stretch:
    """Decode steps of one batch: tokens gained, steps, seconds of CPU and wall."""

    num_tokens: int = 0
    num_steps: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def step(self, engine: Engine) -> list[RequestOutput]:
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = engine.step().outputs
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        self.cpu_s += time.process_time() - cpu
        self.wall_s += time.perf_counter() - wall
        self.num_steps += 1
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs


def decode(engine: Engine, prompts: Sequence[list[int]]) -> Stretch:
    """Decodes until the first of the batch's requests has ``ANSWER_TOKENS``; then cancels all."""
    add_all(engine, prompts, SamplingParams(max_tokens=ENDLESS, temperature=0))
    lengths = [0] * len(prompts)
    while min(lengths) == 0:
        for output in engine.step().outputs:
            lengths[int(output.request_id)] += len(output.token_ids)
    stretch = Stretch()
    while max(lengths) < ANSWER_TOKENS:
        for output in stretch.step(engine):
            lengths[int(output.request_id)] += len(output.token_ids)
    for i in range(len(prompts)):
        engine.cancel(str(i))
    engine.step()  # clears the rows
    return stretch


def measure_speed(model_dir: Path, prompts: dict[str, list[list[int]]], num_rounds: int) -> list[Speed]:
    """Measures engines in turns on the same batch; each round begins with a different engine."""
    engines: dict[tuple[str, int], Engine] = {("none", 0): make_engine(model_dir, 0, None)}
    for drafter, k in itertools.product(DRAFTERS, TIMED_DRAFTS):
        engines[drafter, k] = make_engine(model_dir, k, drafter)
    found = []
    for name, batch in itertools.product(prompts, BATCH_SIZES):
        taken: dict[tuple[str, int], list[Stretch]] = {key: [] for key in engines}
        for turn in range(num_rounds):
            chosen = [prompts[name][(turn * batch + i) % len(prompts[name])] for i in range(batch)]
            keys = list(engines)
            for key in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
                taken[key].append(decode(engines[key], chosen))
        on_gpu = engines["none", 0].device.type == "cuda"
        for key in engines:
            found.append(speed(key, name, batch, taken[key], taken["none", 0], on_gpu=on_gpu))
            print(speed_row(found[-1]), flush=True)
    return found


def speed(
    key: tuple[str, int],
    name: str,
    batch: int,
    taken: list[Stretch],
    plain: list[Stretch],
    *,
    on_gpu: bool,
) -> Speed:
    def rates(stretches: list[Stretch], *, wall: bool) -> list[float]:
        return [s.num_tokens / (s.wall_s if wall else s.cpu_s) for s in stretches]

    def ratio(*, wall: bool) -> float:
        mine, base = rates(taken, wall=wall), rates(plain, wall=wall)
        return statistics.median(a / b for a, b in zip(mine, base, strict=True))

    seconds = [(s.wall_s if on_gpu else s.cpu_s) / s.num_steps for s in taken]
    return Speed(
        drafter=key[0],
        k=key[1],
        prompts=name,
        batch=batch,
        tokens_per_s=statistics.median(rates(taken, wall=on_gpu)),
        ratio=ratio(wall=on_gpu),
        ratio_wall=ratio(wall=True),
        ms_per_step=1000 * statistics.median(seconds),
        tokens_per_row_step=sum(s.num_tokens for s in taken) / sum(s.num_steps for s in taken) / batch,
    )


SPEED_HEADER = (
    "\n| prompts | batch | drafter | k | tokens/s | times k = 0 | by the wall clock | ms a step "
    "| tokens a row and step |\n|---|---|---|---|---|---|---|---|---|"
)


def speed_row(found: Speed) -> str:
    return (
        f"| {found.prompts} | {found.batch} | {found.drafter} | {found.k} | {found.tokens_per_s:.0f} "
        f"| {found.ratio:.2f} | {found.ratio_wall:.2f} | {found.ms_per_step:.2f} "
        f"| {found.tokens_per_row_step:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--prompts", type=int, default=48, help="prompts of each kind to count drafts on")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns that each engine takes at each batch size; 0: no timings"
    )
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    print(json.dumps(before))
    prompts = make_prompts(options.model, max(options.prompts, MAX_ROWS))
    print(ACCEPTANCE_HEADER, flush=True)
    counted, sampled = measure_acceptance(options.model, prompts)
    vocab_size = read_config(options.model, "float32", torch.device("cpu")).vocab_size
    shares = first_draft_shares(options.model, vocab_size, sampled, len(prompts["text"][0]))
    print("\nfirst draft at temperature 1:", json.dumps(shares), flush=True)
    speeds = []
    if options.rounds:
        print(SPEED_HEADER, flush=True)
        speeds = measure_speed(options.model, prompts, options.rounds)
    if options.json:
        report = {
            "machine": before,
            "answer_tokens": ANSWER_TOKENS,
            "rounds": options.rounds,
            "acceptance": [asdict(one) for one in counted],
            "first_draft_at_temperature_1": shares,
            "speed": [asdict(one) for one in speeds],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
