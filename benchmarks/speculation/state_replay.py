"""Compares speculation's two ways to keep a Mamba state: a slot for every position, or one slot and a replay.

    python -m benchmarks.speculation.state_replay --json benchmarks/results/state_replay.json
    python -m benchmarks.speculation.state_replay --device cuda --shapes "Nemotron-H 8B" --batches 1 8 64

A step runs T = 1 + k positions. The first ``accepted`` of them count, and the next step starts after these.

| name | conv and SSM step of a layer |
|---|---|
| slots | read the accepted position's slot, write a slot after every position |
| replay | advance one state by the last step's accepted inputs, store it, run T positions unstored |

Both are the kernels of kernels/. On a CPU they run in float32 in a recorded graph on one thread, on a GPU in
bfloat16 with float32 states in a CUDA graph. They take turns, so that disturbances affect both, and medians
count. Layers are used in turn, as in a model. The bytes of real models are counted.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.clock import gpu_turn, replayed_turn, take_turns
from kernels.replay.causal_conv1d_replay import causal_conv1d_replay
from kernels.replay.kept_inputs import PendingRows, kept_tensor
from kernels.replay.selective_state_flush import KeptSsmInputs
from kernels.replay.selective_state_replay import selective_state_replay
from kernels.ssm.causal_conv1d import causal_conv1d_update
from kernels.ssm.selective_state_update import selective_state_update
from twinfang.bench.machine import machine

NO_LIMIT = (0.0, float("inf"))
POSITIONS = (2, 4, 6)
BATCHES = (1, 32)


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
SHAPES = {shape.name: shape for shape in (BUNDLED, NANO_30B, NEMOTRON_8B)}


def slots_bytes(shape: Shape, num_positions: int) -> int:
    """Returns a row's traffic in one layer: one state read, and one written per position."""
    return (1 + num_positions) * (shape.ssm_bytes + shape.conv_bytes)


def replay_bytes(shape: Shape, num_positions: int, accepted: int) -> int:
    """Returns a row's traffic in one layer: the state read and written once, plus the inputs."""
    inputs = (accepted + num_positions) * shape.input_bytes
    raw = (2 * (shape.num_taps - 1) + num_positions) * shape.num_channels * shape.element_bytes
    return 2 * shape.ssm_bytes + inputs + raw


def slots_held(shape: Shape, num_positions: int) -> int:
    """Returns the bytes that a running row holds in one layer."""
    return num_positions * (shape.ssm_bytes + shape.conv_bytes)


def replay_held(shape: Shape, num_positions: int) -> int:
    """Returns the bytes of one state and of the inputs of two steps: a step reads the last step's while it
    writes its own."""
    raw = shape.num_channels * shape.element_bytes
    return shape.ssm_bytes + shape.conv_bytes + 2 * num_positions * (shape.input_bytes + raw)


class Layer:
    """One Mamba layer's weights and step inputs, and what each form keeps for every row."""

    def __init__(self, shape: Shape, num_rows: int, num_positions: int, seed: int, device: str) -> None:
        H, P, N, C = shape.num_heads, shape.head_dim, shape.state_dim, shape.num_channels
        G, window, T = shape.num_groups, shape.num_taps - 1, num_positions
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        generator = torch.Generator(device).manual_seed(seed)
        normal = functools.partial(torch.randn, generator=generator, device=device)
        zeros = functools.partial(torch.zeros, device=device)
        self.shape = shape
        self.xbc, self.dt = normal(num_rows, T, C).to(dtype), normal(num_rows, T, H).to(dtype)
        self.weight, self.bias = normal(C, shape.num_taps).to(dtype) / 4, zeros(C, dtype=dtype)
        self.A, self.D, self.dt_bias = -normal(H).abs(), normal(H), normal(H)
        count = 1 + num_rows * T
        self.slots = torch.arange(1, count, dtype=torch.int32, device=device).view(num_rows, T)
        self.read_slots = self.slots[:, 0].clone()
        self.conv, self.ssm = zeros(count, C, window, dtype=dtype), zeros(count, H, P, N)
        self.slot = torch.arange(1, num_rows + 1, dtype=torch.int32, device=device)
        self.one_conv = zeros(num_rows + 1, C, window, dtype=dtype)
        self.one_ssm = zeros(num_rows + 1, H, P, N)
        self.kept = KeptSsmInputs.empty(num_rows, T, (H, P, G, N), dtype, device)
        self.kept_conv = kept_tensor(num_rows, T, (C,), dtype, device)
        counts = zeros(num_rows, dtype=torch.int32)
        rows = torch.arange(num_rows, device=device)
        self.pending = PendingRows(rows, counts, torch.full_like(counts, 2 * T))

    def accept(self, accepted: int) -> None:
        """Let the next steps start after so many positions of the step before."""
        self.read_slots.copy_(self.slots[:, accepted - 1])
        self.pending.counts.fill_(accepted)

    def slots_step(self) -> torch.Tensor:
        rows = self.read_slots, self.slots
        xbc = causal_conv1d_update(self.xbc, self.weight, self.bias, self.conv, *rows)
        return selective_state_update(*self._split(xbc), self.ssm, *rows, dt_limit=NO_LIMIT)

    def replay_step(self) -> torch.Tensor:
        slots = self.slot, self.slot
        xbc = causal_conv1d_replay(
            self.xbc, self.weight, self.bias, self.one_conv, *slots, self.kept_conv, self.pending
        )
        rows = *slots, self.kept, self.pending
        return selective_state_replay(*self._split(xbc), self.one_ssm, *rows, dt_limit=NO_LIMIT)

    def _split(self, xbc: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s, lead = self.shape, xbc.shape[:2]
        x, B, C = torch.split(xbc, [s.num_heads * s.head_dim, *[s.num_groups * s.state_dim] * 2], dim=-1)
        groups = (*lead, s.num_groups, s.state_dim)
        operands = (x.view(*lead, s.num_heads, s.head_dim), self.dt, self.A, B.view(groups), C.view(groups))
        return (*operands, self.D, self.dt_bias)


FORMS: dict[str, Callable[[Layer], torch.Tensor]] = {"slots": Layer.slots_step, "replay": Layer.replay_step}


def measure(
    shape: Shape, num_rows: int, num_positions: int, num_layers: int, device: str, seconds: float
) -> list[dict[str, Any]]:
    """Returns one result for each accepted count: the medians of both forms' turns over all layers."""
    layers = [Layer(shape, num_rows, num_positions, seed, device) for seed in range(num_layers)]
    calls = {name: [functools.partial(step, layer) for layer in layers] for name, step in FORMS.items()}
    if device == "cpu":
        turns = {name: replayed_turn(steps) for name, steps in calls.items()}
    else:
        turns = {name: gpu_turn(steps)[0] for name, steps in calls.items()}
    results: list[dict[str, Any]] = []
    for accepted in sorted({1, num_positions // 2, num_positions}):
        for layer in layers:
            layer.accept(accepted)
        medians = take_turns(turns, seconds)
        moved = {
            "slots": num_rows * slots_bytes(shape, num_positions),
            "replay": num_rows * replay_bytes(shape, num_positions, accepted),
        }
        results.append(
            {
                "shape": shape.name,
                "batch": num_rows,
                "positions": num_positions,
                "accepted": accepted,
                "layers": num_layers,
                "us_a_layer": {name: time * 1e6 for name, time in medians.items()},
                "gb_a_second": {name: moved[name] / time / 1e9 for name, time in medians.items()},
                "replay_speedup": medians["slots"] / medians["replay"],
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


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    print("| shape | batch | T | accepted | slots, µs a layer | replay, µs | replay is faster by |")
    print("|---" * 7 + "|")
    measured = []
    cells = itertools.product(options.shapes, options.batches, options.positions)
    for name, num_rows, num_positions in cells:
        # Two layers of 32 of Nano's states are beyond any CPU's cache already.
        shape = SHAPES[name]
        is_small = num_rows == 1 or shape is BUNDLED or options.device != "cpu"
        num_layers = min(shape.num_layers, options.layers) if is_small else 2
        for result in measure(shape, num_rows, num_positions, num_layers, options.device, options.seconds):
            measured.append(result)
            times = result["us_a_layer"]
            cell = f"{name} | {num_rows} | {num_positions} | {result['accepted']}"
            faster = f"{times['slots']:,.0f} | {times['replay']:,.0f} | {result['replay_speedup']:.2f}"
            print(f"| {cell} | {faster} |", flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time a form has in each cell")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[BUNDLED.name, NANO_30B.name])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--positions", nargs="+", type=int, default=POSITIONS, help="1 + k")
    parser.add_argument("--layers", type=int, default=24, help="at most so many of a model's layers")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted = [row for shape in (NEMOTRON_8B, NANO_30B) for row in traffic(shape)]
    print_counted(counted)
    print()
    with torch.inference_mode():
        measured = measure_all(options)
    if options.json:
        report = {"machine": machine(), "shapes": [asdict(shape) for shape in SHAPES.values()]}
        report |= {"device": options.device, "measured": measured, "counted_bytes": counted}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
