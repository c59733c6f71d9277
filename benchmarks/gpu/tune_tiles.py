"""Measure tiles of the Triton kernels on this GPU and write ``kernels/gpu/tile_tables/<device name>.json``.

    python -m benchmarks.gpu.tune_tiles                    # a few minutes; GPU idle, machine idle
    python -m benchmarks.gpu.tune_tiles --budget-s 300     # what was not measured by then keeps its default
    python -m benchmarks.gpu.tune_tiles --out results      # the file goes there, to be carried to its place

Starting from the default, each tile is tried at each of its values, one tile after the other, and kept if it
is faster: by the geometric mean over loads from batch 1 to 64, candidate and best so far taking turns. A
candidate that does not compile, does not fit into shared memory or computes a different result is skipped. A
gain of less than 2 % over the default is noise: the default stays. After every op, the file is written with
all measurements so far; with ``--missing`` a run goes on from the file in ``--out``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from benchmarks.gpu.stage import UNFINISHED
from benchmarks.kernels.cases import attention as attention_cases
from benchmarks.kernels.cases import delta as delta_cases
from benchmarks.kernels.cases import dense as dense_cases
from benchmarks.kernels.cases import mamba as mamba_cases
from benchmarks.kernels.cases.case import Case
from benchmarks.kernels.cases.models import Model, eight_b
from benchmarks.kernels.clock import gpu_turn, num_sets, take_turns
from kernels.attention import paged_attention_decode, paged_attention_prefill
from kernels.gated_delta import gated_delta_chunk, gated_delta_update
from kernels.gpu.tiles import DIRECTORY, TileRequest, Tiles, TileTable, file_name, table_of
from kernels.moe import few_token_experts
from kernels.ssm import causal_conv1d, selective_state_update, ssd_chunk_scan

logger = logging.getLogger(__name__)

MODELS = {"8b": eight_b}
POSITIONS = (1, 2, 4)
"""Values of 1 + k of the tuned decode steps."""
TURNS_S = 0.02
"""Time that a candidate gets at each load."""
LEAST_GAIN = 0.02
FAILURES = (triton.runtime.errors.TritonError, RuntimeError)
"""Errors of a launch if a program does not compile, or needs more resources than there are."""


@dataclass(frozen=True)
class Tuning:
    """One entry of the table: the kernel's request, the loads to measure, and the values to try."""

    request: TileRequest
    cases: Sequence[Case]
    values: Mapping[str, Sequence[int]]


def tunings(model: Model) -> Iterator[Tuning]:
    """Yields the tunings of one model, the ops with the most traffic first."""
    dtype, mamba, heads = model.dtype, model.mamba, model.attention
    shape = heads.num_heads // heads.num_kv_heads, heads.head_dim, model.block_size
    yield Tuning(
        selective_state_update.tile_request(dtype, mamba.ssm_dtype, mamba.head_dim, mamba.state_size),
        [mamba_cases.state_update(model, rows, positions) for rows in (1, 64) for positions in POSITIONS],
        {"BLOCK_P": (4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
    )
    yield Tuning(
        ssd_chunk_scan.tile_request(dtype, mamba.head_dim, mamba.state_size),
        [mamba_cases.scan(model, tokens) for tokens in (512, 8192)],
        {"BLOCK_P": (32, 64), "CHUNK": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    )
    delta = model.delta
    yield Tuning(
        gated_delta_update.tile_request(dtype, delta.ssm_dtype, delta.value_head_dim, delta.key_head_dim),
        [delta_cases.state_update(model, rows, positions) for rows in (1, 64) for positions in POSITIONS],
        {"BLOCK_V": (4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
    )
    yield Tuning(
        gated_delta_chunk.tile_request(dtype, delta.value_head_dim, delta.key_head_dim),
        [delta_cases.scan(model, tokens) for tokens in (512, 8192)],
        {"BLOCK_V": (16, 32, 64), "CHUNK": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    )
    for positions in POSITIONS:
        loads = ((1, 8192), (8, 8192), (64, 2048))
        yield Tuning(
            paged_attention_decode.tile_request(dtype, *shape, positions),
            [attention_cases.decode(model, rows, context, positions) for rows, context in loads],
            {
                "BLOCK_N": (32, 64, 128),
                "num_stages": (2, 3, 4),
                "num_warps": (2, 4, 8),
                "PROGRAMS_PER_SM": (1, 2, 3, 4),
            },
        )
    yield Tuning(
        paged_attention_prefill.tile_request(dtype, *shape),
        [attention_cases.prefill(model, tokens) for tokens in (512, 8192)],
        {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    )
    yield Tuning(
        causal_conv1d.prefill_tile_request(dtype, mamba.conv_width),
        [mamba_cases.conv(model, tokens) for tokens in (512, 8192)],
        {"BLOCK_C": (64, 128, 256), "BLOCK_T": (16, 32, 64, 128), "num_warps": (2, 4, 8)},
    )
    experts = model.experts
    sizes = experts.intermediate_size, experts.hidden_size
    for rows, (outputs, inputs) in itertools.product(few_token_experts.TILE_ROWS, (sizes, sizes[::-1])):
        loads = (1, 8) if rows == min(few_token_experts.TILE_ROWS) else (rows,)
        yield Tuning(
            few_token_experts.tile_request(dtype, outputs, inputs, rows),
            [dense_cases.experts(model, tokens) for tokens in loads],
            {
                "BLOCK_N": (16, 32, 64, 128),
                "BLOCK_K": (64, 128, 256),
                "num_stages": (3, 4, 5),
                "num_warps": (2, 4, 8),
            },
        )
    for positions in POSITIONS:
        yield Tuning(
            causal_conv1d.decode_tile_request(dtype, mamba.conv_width, positions),
            [mamba_cases.conv_update(model, rows, positions) for rows in (1, 8, 64)],
            {"BLOCK_C": (32, 64, 128, 256), "num_warps": (1, 2, 4)},
        )


def descend(
    default: Tiles, values: Mapping[str, Sequence[int]], ratio: Callable[[Tiles, Tiles], float | None]
) -> Tiles:
    """Returns the best tiles found by trying each tile's values in turn.

    ``ratio(candidate, best)`` is the candidate's time divided by the best's, or None if the candidate can't
    be used.
    """
    best = default
    for name, choices in values.items():
        for value in choices:
            candidate = {**best, name: value}
            if candidate != best and (found := ratio(candidate, best)) is not None and found < 1.0:
                best = candidate
    return best


class Bench:
    """The loads of one tuning on the device, ready to run with any tiles."""

    def __init__(self, tuning: Tuning, table: TileTable, device: torch.device) -> None:
        self.request, self.first, self.device = tuning.request, tuning.cases[0], device
        self.shapes = table.entries.setdefault(tuning.request.op, {})
        self.shapes.pop(self.request.shape, None)
        self.calls = []
        for case in tuning.cases:
            count = num_sets(case.work.moved, case.weight_bytes)
            self.calls.append([case.ours(case.operands(device)) for _ in range(count)])
        self.expected = self._output(self.request.default)

    def times(self, *contenders: Tiles) -> list[list[float]]:
        """Returns the seconds per call of each contender at each load; they take turns."""
        loads = []
        for calls in self.calls:
            turns = {}
            for index, tiles in enumerate(contenders):
                self._use(tiles)
                turns[str(index)], is_graph = gpu_turn(calls)
                if not is_graph:  # which keeps the tiles that it was captured with
                    raise RuntimeError("can't be captured as a graph")
            loads.append(list(take_turns(turns, TURNS_S).values()))
        return [list(column) for column in zip(*loads, strict=True)]

    def ratio(self, candidate: Tiles, best: Tiles) -> float | None:
        """Returns the ratio of a candidate's times to the best's; None if it can't be launched or computes
        wrong results."""
        try:
            if not torch.allclose(self._output(candidate), self.expected, rtol=2e-2, atol=5e-2):
                logger.warning("%s: %s computes something else", self.request.op, candidate)
                return None
            ours, others = self.times(candidate, best)
        except FAILURES as error:
            logger.info("%s: %s: %s", self.request.op, candidate, str(error).strip().split("\n")[0][:120])
            return None
        found = geometric_mean(ours) / geometric_mean(others)
        logger.info("%s: %s: %.3f of the best", self.request.op, candidate, found)
        return found

    def record(self, best: Tiles) -> None:
        """Enter the best tiles if they are worth it, with their times and the default's."""
        default = self.request.default
        ours, others = (geometric_mean(times) for times in self.times(best, default))
        self.shapes.pop(self.request.shape, None)
        tiles = best if ours < (1.0 - LEAST_GAIN) * others else default
        microseconds = {"microseconds": ours if tiles is best else others, "default_microseconds": others}
        entry = {name: round(seconds * 1e6, 2) for name, seconds in microseconds.items()}
        self.shapes[self.request.shape] = {"tiles": tiles, **entry}
        logger.info("%s, %s: %s %s", self.request.op, self.request.shape, tiles, entry)

    def _use(self, tiles: Tiles) -> None:
        self.shapes[self.request.shape] = {"tiles": tiles}

    def _output(self, tiles: Tiles) -> torch.Tensor:
        self._use(tiles)
        torch.manual_seed(0)
        out = self.first.ours(self.first.operands(self.device))()
        assert isinstance(out, torch.Tensor)
        return out.float()


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def resume(table: TileTable, out: Path) -> None:
    """Add the entries that an earlier run wrote to ``out``; they are newer than the table's own."""
    file = out / file_name(table.device)
    if file.exists():
        for op, shapes in TileTable.read(file).entries.items():
            table.entries.setdefault(op, {}).update(shapes)


def missing(plan: Iterable[Tuning], table: TileTable) -> list[Tuning]:
    """Return the tunings that have no entry in the table."""
    return [one for one in plan if one.request.shape not in table.entries.get(one.request.op, {})]


def tune(plan: Sequence[Tuning], table: TileTable, budget_s: float, out: Path) -> int:
    """Write the table with entries for the plan's shapes; those of other shapes stay. Return the number of
    shapes for which no time was left."""
    device = torch.device("cuda", torch.cuda.current_device())
    table.made_with.update(torch=torch.__version__, triton=triton.__version__)
    deadline = time.monotonic() + budget_s
    for index, tuning in enumerate(plan):
        if time.monotonic() > deadline:
            return len(plan) - index
        try:
            _tune_one(tuning, table, device, deadline)
        except FAILURES as error:  # of the default itself, or of memory: the other ops go on
            table.entries.get(tuning.request.op, {}).pop(tuning.request.shape, None)
            logger.error("%s, %s: %s", tuning.request.op, tuning.request.shape, error)
        logger.info("%s", table.write(out))
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def _tune_one(tuning: Tuning, table: TileTable, device: torch.device, deadline: float) -> None:
    bench = Bench(tuning, table, device)

    def ratio(candidate: Tiles, best: Tiles) -> float | None:
        return bench.ratio(candidate, best) if time.monotonic() < deadline else None

    bench.record(descend(tuning.request.default, tuning.values, ratio))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--missing", action="store_true", help="only shapes that have no entry yet")
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    return parser


def main() -> None:
    options = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not torch.cuda.is_available():
        parser().exit(1, "torch finds no CUDA device: tiles are tuned on the GPU that they are for\n")
    table = table_of(torch.cuda.get_device_name())
    resume(table, options.out)
    plan = [tuning for name in options.model for tuning in tunings(MODELS[name]())]
    plan = missing(plan, table) if options.missing else plan
    if num_left := tune(plan, table, options.budget_s, options.out):
        parser().exit(UNFINISHED, f"no time was left for {num_left} of {len(plan)} shapes\n")


if __name__ == "__main__":
    main()
