"""Compares speculation's two ways to keep a Mamba state: a slot for every position, or one slot and a replay.

    python -m benchmarks.speculation.state_replay --json benchmarks/results/state_replay.json

A step runs T = 1 + k positions. The first ``accepted`` of them count, and the next step starts after these.

| name | conv and SSM step of a layer |
|---|---|
| slots | the kernels of kernels/: read the accepted position's slot, write a slot after every position |
| slots, tiled | the same writes, but few rows of a head pass all positions before the next ones start |
| replay | one slot: advance it by the last step's accepted inputs, store it, run T positions on a copy |
| replay, direct | the same, but outputs from the stored state and the T inputs, without the states between |

Prototypes, one thread, float32. All variants run in turn, round by round, so that disturbances affect all.
Figures are medians of CPU time, and of the ratio to ``slots`` within a round. Layers are used in turn, as in
a model. The bytes of real models are counted, not measured: nothing here runs on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.speculation.state_replay_kernels import replay, replay_conv, replay_direct, slots_tiled
from kernels.cpu.jit import as_array, as_flat_array
from kernels.ssm.causal_conv1d import causal_conv1d_update
from kernels.ssm.selective_state_update import selective_state_update
from twinfang.bench.machine import machine

NO_LIMIT = (0.0, float("inf"))
POSITIONS = (2, 4, 6)
BATCHES = (1, 32)
BASELINE = "slots"


@dataclass(frozen=True)
class Shape:
    """A model's Mamba layers. ``num_layers`` of them are measured if memory allows."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    element_bytes: int = 2  # of activations and conv inputs; states are float32
    num_taps: int = 4

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim

    @property
    def ssm_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.state_dim * 4

    @property
    def conv_bytes(self) -> int:
        return self.num_channels * (self.num_taps - 1) * self.element_bytes

    @property
    def input_bytes(self) -> int:
        """Bytes of x, B (as activations), decay and step (float32) of one position: what a replay needs."""
        inputs = self.num_heads * self.head_dim + self.num_groups * self.state_dim
        return inputs * self.element_bytes + 2 * self.num_heads * 4


BUNDLED = Shape("bundled", 3, 8, 32, 32, 2, element_bytes=4)
NANO_30B = Shape("Nano 30B-A3B", 23, 64, 64, 128, 8)
NEMOTRON_8B = Shape("Nemotron-H 8B", 24, 128, 64, 128, 8)


def slots_bytes(shape: Shape, num_positions: int) -> int:
    """Returns a row's traffic in one layer: one state read, and one written per position."""
    return (1 + num_positions) * (shape.ssm_bytes + shape.conv_bytes)


def replay_bytes(shape: Shape, num_positions: int, accepted: int) -> int:
    """Returns a row's traffic in one layer: the state read and written once, plus the inputs."""
    inputs = (accepted + num_positions) * shape.input_bytes
    raw = (shape.num_taps - 1 + shape.num_taps - 1 + num_positions) * shape.num_channels * shape.element_bytes
    return 2 * shape.ssm_bytes + inputs + raw


def slots_held(shape: Shape, num_positions: int) -> int:
    """Returns the bytes that a running row holds in one layer."""
    return num_positions * (shape.ssm_bytes + shape.conv_bytes)


def replay_held(shape: Shape, num_positions: int) -> int:
    """Returns the bytes of one state and two sets of inputs: a step reads the last step's while it writes its
    own."""
    raw = (shape.num_taps - 1 + num_positions) * shape.num_channels * shape.element_bytes
    return shape.ssm_bytes + 2 * (num_positions * shape.input_bytes + raw)


# Prototypes. ``inputs`` of a slot: x [2, T, H, P], B [2, T, G, N], scales [2, T, H, 2] (decay, step) and the
# raw conv inputs [2, K - 1 + T, C], the last step's on one side, this step's on the other.


class Layer:
    """One Mamba layer's weights and step inputs, and the data that each variant keeps for every row."""

    def __init__(self, shape: Shape, num_rows: int, num_positions: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.num_rows, self.num_positions, self.side = shape, num_rows, num_positions, 0
        H, P, N, C = shape.num_heads, shape.head_dim, shape.state_dim, shape.num_channels
        self.xbc = torch.randn(num_rows, num_positions, C, generator=generator)
        self.dt = torch.randn(num_rows, num_positions, H, generator=generator)
        self.weight, self.bias = torch.randn(C, shape.num_taps, generator=generator) / 4, torch.zeros(C)
        self.A, self.D, self.dt_bias = -torch.rand(H, generator=generator), torch.ones(H), torch.zeros(H)
        count = 1 + num_rows * num_positions
        self.slots = torch.arange(1, count, dtype=torch.int32).view(num_rows, num_positions)
        self.conv, self.ssm = torch.zeros(count, C, shape.num_taps - 1), torch.zeros(count, H, P, N)
        self.slot = torch.arange(1, num_rows + 1, dtype=torch.int32)
        self.state = torch.zeros(num_rows + 1, H, P, N)
        sides = (num_rows + 1, 2, num_positions)
        self.x_in, self.scales_in = torch.zeros(*sides, H, P), torch.zeros(*sides, H, 2)
        self.B_in = torch.zeros(*sides, shape.num_groups, N)
        self.raw = torch.zeros(num_rows + 1, 2, shape.num_taps - 1 + num_positions, C)

    def _split(self, xbc: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s, lead = self.shape, xbc.shape[:2]
        x, B, C = torch.split(xbc, [s.num_heads * s.head_dim, *[s.num_groups * s.state_dim] * 2], dim=-1)
        groups = (*lead, s.num_groups, s.state_dim)
        operands = (x.view(*lead, s.num_heads, s.head_dim), self.dt, self.A, B.view(groups), C.view(groups))
        return (*operands, self.D, self.dt_bias)

    def slots_step(self, accepted: int) -> torch.Tensor:
        read = self.slots[:, accepted - 1]
        xbc = causal_conv1d_update(self.xbc, self.weight, self.bias, self.conv, read, self.slots)
        return selective_state_update(*self._split(xbc), self.ssm, read, self.slots, dt_limit=NO_LIMIT)

    def slots_tiled_step(self, accepted: int) -> torch.Tensor:
        read = self.slots[:, accepted - 1]
        xbc = causal_conv1d_update(self.xbc, self.weight, self.bias, self.conv, read, self.slots)
        rows = (self.ssm.view(-1), read.contiguous(), self.slots)
        return self._call(slots_tiled, self._split(xbc), rows)

    def replay_step(self, accepted: int) -> torch.Tensor:
        return self._replay(replay, accepted)

    def replay_direct_step(self, accepted: int) -> torch.Tensor:
        return self._replay(replay_direct, accepted)

    def _replay(self, kernel: Callable[..., None], accepted: int) -> torch.Tensor:
        self.side = 1 - self.side
        xbc = torch.empty(self.xbc.shape)
        flat = as_flat_array(self.xbc), as_array(self.weight.view(-1)), as_array(self.bias)
        rows = as_array(self.raw), as_array(self.slot), accepted, self.side
        replay_conv(*flat, *rows, as_array(xbc))
        kept = (self.state.view(-1), self.slot, self.x_in, self.B_in, self.scales_in)
        return self._call(kernel, self._split(F.silu(xbc, inplace=True)), kept, accepted, self.side)

    def _call(self, kernel, operands, tensors, *numbers: int) -> torch.Tensor:
        y = torch.empty(operands[0].shape)
        arrays = (as_array(t.contiguous()) for t in (*operands, *tensors))
        kernel(*arrays, *numbers, as_array(y))
        return y


VARIANTS: dict[str, Callable[[Layer, int], torch.Tensor]] = {
    BASELINE: Layer.slots_step,
    "slots, tiled": Layer.slots_tiled_step,
    "replay": Layer.replay_step,
    "replay, direct": Layer.replay_direct_step,
}


def check_that_all_agree() -> dict[str, float]:
    """Returns the largest difference from ``slots`` over steps of changing acceptance, relative to the
    largest output."""
    worst = dict.fromkeys(VARIANTS, 0.0)
    for shape, num_positions in itertools.product((BUNDLED, NANO_30B), POSITIONS):
        layers = {name: Layer(shape, 2, num_positions, seed=0) for name in VARIANTS}
        # Zero states absorb zero inputs: the first step may name any number of accepted positions.
        for step in range(8):
            accepted = 1 + step % num_positions
            fresh = torch.randn(layers[BASELINE].xbc.shape, generator=torch.Generator().manual_seed(step))
            outputs = {}
            for name, layer in layers.items():
                layer.xbc = fresh
                outputs[name] = VARIANTS[name](layer, accepted)
            expected = outputs[BASELINE]
            for name, y in outputs.items():
                worst[name] = max(worst[name], float((y - expected).abs().max() / expected.abs().max()))
    if max(worst.values()) > 1e-5:
        raise SystemExit(f"the variants compute different things: {worst}")
    return worst


def measure(
    shape: Shape, num_rows: int, num_positions: int, num_layers: int, seconds: float
) -> list[dict[str, Any]]:
    """Returns one result for each accepted count: medians over rounds, in each of which every variant runs
    all layers."""
    layers = [Layer(shape, num_rows, num_positions, seed) for seed in range(num_layers)]
    results: list[dict[str, Any]] = []
    for accepted in sorted({1, num_positions // 2, num_positions}):
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[BASELINE]) < 13:
            for name, step in VARIANTS.items():
                start = time.process_time()
                for layer in layers:
                    step(layer, accepted)
                times[name].append((time.process_time() - start) / num_layers)
        rounds = {name: values[1:] for name, values in times.items()}  # the first fills caches
        ratios = {
            name: statistics.median(a / b for a, b in zip(rounds[BASELINE], values, strict=True))
            for name, values in rounds.items()
        }
        results.append(
            {
                "shape": shape.name,
                "batch": num_rows,
                "positions": num_positions,
                "accepted": accepted,
                "layers": num_layers,
                "rounds": len(rounds[BASELINE]),
                "us_a_layer": {name: statistics.median(v) * 1e6 for name, v in rounds.items()},
                "speedup_over_slots": ratios,
            }
        )
    return results


def traffic(shape: Shape) -> list[dict[str, Any]]:
    """Returns the bytes of whole models with every draft accepted, which is a replay's most expensive
    case."""
    rows: list[dict[str, Any]] = []
    for k, batch in itertools.product((1, 3, 5), (1, 8, 64)):
        count, T = batch * shape.num_layers, 1 + k
        row = {
            "slots_step_gb": count * slots_bytes(shape, T) / 1e9,
            "replay_step_gb": count * replay_bytes(shape, T, T) / 1e9,
            "slots_held_gb": count * slots_held(shape, T) / 1e9,
            "replay_held_gb": count * replay_held(shape, T) / 1e9,
        }
        rows.append({"model": shape.name, "k": k, "batch": batch, "running_slots": batch * T, **row})
    return rows


def print_counted(rows: list[dict[str, Any]]) -> None:
    print("| model | k | batch | running slots | GB a step, slots | replay | GB held, slots | replay |")
    print("|---" * 8 + "|")
    for row in rows:
        print("| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()) + " |")


def measure_all(seconds: float) -> list[dict[str, Any]]:
    others = [name for name in VARIANTS if name != BASELINE]
    print("| shape | batch | T | accepted | slots, µs a layer | " + " | ".join(others) + " |")
    print("|---" * (5 + len(others)) + "|")
    measured = []
    for shape, num_rows, num_positions in itertools.product((BUNDLED, NANO_30B), BATCHES, POSITIONS):
        # Two layers of 32 of Nano's states are beyond any cache already.
        num_layers = shape.num_layers if num_rows == 1 or shape is BUNDLED else 2
        for result in measure(shape, num_rows, num_positions, num_layers, seconds):
            measured.append(result)
            ratios = " | ".join(f"{result['speedup_over_slots'][name]:.2f}x" for name in others)
            cells = f"{shape.name} | {num_rows} | {num_positions} | {result['accepted']}"
            print(f"| {cells} | {result['us_a_layer'][BASELINE]:,.0f} | {ratios} |", flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time a cell")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted = [row for shape in (NEMOTRON_8B, NANO_30B) for row in traffic(shape)]
    print_counted(counted)
    with torch.inference_mode():
        differences = check_that_all_agree()
        print(f"\nlargest relative difference from slots: {differences}\n")
        measured = measure_all(options.seconds)
    if options.json:
        shapes = [asdict(shape) for shape in (BUNDLED, NANO_30B, NEMOTRON_8B)]
        report = {"machine": machine(), "shapes": shapes, "largest_relative_difference": differences}
        report |= {"measured_on_cpu": measured, "counted_bytes": counted}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
