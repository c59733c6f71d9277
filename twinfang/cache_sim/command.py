"""``twinfang cache-sim``: which cache policy and which budget pay for a log of prompt hashes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from engine.checkpoint.model_config import ModelConfig
from engine.cost.gpu import GpuSpeed, gpu_costs
from engine.cost.step_size import StepSize
from engine.memory.start_sizes import StartSizes
from engine.models import read_config
from engine.schedule.capacity import size_text
from twinfang.cache_sim.contenders import CONTENDERS, Question
from twinfang.cache_sim.replay import Hardware, Outcome
from twinfang.cache_sim.trace import read_trace
from wire.errors import ConfigError

GIB = 1 << 30
DEFAULT_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Default budgets, as parts of the memory that everything in the log would take."""
LINK_BYTES_PER_S = 20e9
"""Not used: handoffs are not simulated."""
PAYS = 0.9
"""A budget pays if it saves this part of the FLOP that the next larger one saves."""


@dataclass(frozen=True)
class Cell:
    """One cache at one budget."""

    name: str
    num_bytes: int
    outcome: Outcome

    def figures(self) -> dict[str, object]:
        one = self.outcome
        return {
            "cache": self.name,
            "budget_bytes": self.num_bytes,
            "prompt_tokens": one.num_tokens,
            "hit_tokens": one.num_hit,
            "hit_rate": one.hit_rate,
            "saved_flops": one.saved_share,
            "mean_ttft_s": one.mean_ttft_s,
            "p95_ttft_s": one.p95_ttft_s,
            "states_kept": one.num_states,
            "prompts_too_large": one.num_uncached,
        }


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares the command. Raises :class:`ConfigError` for a log or a model that can't be simulated."""
    if values.trace is None:
        raise ConfigError("which log? Give its file: twinfang cache-sim TRACE")
    model = read_config(values.model, values.dtype, "cuda")
    block_tokens = values.trace_block
    requests = read_trace(values.trace, block_tokens)
    if not requests:
        raise ConfigError(f"the trace {values.trace} has no requests; name one that has")
    question = Question(
        requests,
        model_sizes(model, block_tokens),
        Hardware(
            gpu_costs(
                model, GpuSpeed(values.gpu_tflops * 1e12, values.gpu_bandwidth * 1e9, LINK_BYTES_PER_S)
            ).prefill,
            values.max_batch_tokens,
        ),
        -(-values.state_block_size // block_tokens),
    )
    budgets = [int(one * GIB) for one in values.budget]
    if not budgets:
        budgets = [int(share * question.footprint_bytes) for share in DEFAULT_SHARES]
    return partial(run, question, sorted(budgets), values.cache or tuple(CONTENDERS), bool(values.json))


def model_sizes(model: ModelConfig, block_tokens: int) -> StartSizes:
    """Returns the sizes of a model. Raises :class:`ConfigError` if it keeps only KV or only states."""
    size = StepSize.of(model)
    if not size.slot_bytes or not size.token_bytes:
        missing = "recurrent" if not size.slot_bytes else "attention"
        raise ConfigError(
            f"the model has no {missing} layers; the caches that are simulated keep blocks of KV and "
            "recurrent states: name a hybrid model with --model"
        )
    return StartSizes(
        block_tokens,
        size.token_bytes * block_tokens,
        size.slot_bytes,
        size.token_flops,
        float(size.pair_flops),
    )


def run(question: Question, budgets: list[int], names: tuple[str, ...], as_json: bool) -> None:
    """Simulates all cells and prints a table or JSON."""
    if not as_json:
        print("\n".join(_heading(question)), flush=True)
    cells: list[Cell] = []
    for num_bytes in budgets:
        for name in names:
            cell = Cell(name, num_bytes, CONTENDERS[name](question, num_bytes))
            cells.append(cell)
            if not as_json:
                print(_row(cell), flush=True)
    if as_json:
        print(json.dumps({"cells": [cell.figures() for cell in cells]}, indent=2))
    else:
        print(_verdict(cells, budgets))


def _heading(question: Question) -> Iterator[str]:
    sizes = question.sizes
    num_tokens = sum(one.num_prompt for one in question.requests)
    yield f"{len(question.requests)} requests, {num_tokens / len(question.requests):.0f} tokens a prompt"
    yield (
        f"a state: {size_text(sizes.slot_bytes)}, as much as the KV of "
        f"{sizes.slot_bytes * sizes.block_tokens // sizes.block_bytes} tokens; "
        f"everything: {size_text(question.footprint_bytes)}"
    )
    yield ""
    yield f"{'budget':>10}  {'cache':<16}{'tokens hit':>11}{'FLOP saved':>12}{'TTFT mean':>12}{'P95':>10}"


def _row(cell: Cell) -> str:
    one = cell.outcome
    return (
        f"{size_text(cell.num_bytes):>10}  {cell.name:<16}{one.hit_rate:>11.1%}{one.saved_share:>12.1%}"
        f"{one.mean_ttft_s * 1000:>9.2f} ms{one.p95_ttft_s * 1000:>7.1f} ms"
    )


def _verdict(cells: list[Cell], budgets: list[int]) -> str:
    """Says which budget pays, for the best cache that does not know the future."""
    known = [cell for cell in cells if cell.name != "clairvoyant"]
    if not known:
        return ""
    best = {
        num_bytes: max(
            (cell for cell in known if cell.num_bytes == num_bytes), key=lambda cell: cell.outcome.saved_share
        )
        for num_bytes in budgets
    }
    for smaller, larger in pairwise(budgets):
        few, many = best[smaller].outcome.saved_share, best[larger].outcome.saved_share
        if few and few >= PAYS * many:
            return (
                f"\n{size_text(smaller)} with {best[smaller].name} pays: {size_text(larger)} saves only "
                f"{many - few:.1%} of the FLOP more"
            )
    largest = best[budgets[-1]]
    if not largest.outcome.saved_share:
        return (
            f"\nno budget up to {size_text(largest.num_bytes)} saves anything; try larger ones with --budget"
        )
    return (
        f"\neach budget up to {size_text(largest.num_bytes)} ({largest.name}) pays more than the one before; "
        "try larger ones with --budget"
    )
