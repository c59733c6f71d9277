"""Counts what one captured decode step launches and how many bytes it moves. It needs no GPU.

    python -m benchmarks.steps.traffic --publish

The engine runs on the simulated GPU with memory on torch's meta device. So a model of any size captures its
graphs, and every torch operator and Triton kernel is noted with its operands. A launch reads and writes each
operand once, with these exceptions:

| operand | counted |
|---|---|
| KV pool | attention: the context's keys or values; else: those of the step's tokens |
| state pool | of the operand's layer, for each row: one state read and ``T`` written, or one if rows replay |
| inputs that rows keep to replay them | those of the step's rows |
| weights of all experts | the share that tokens are sent to, on average, and shared experts |
| a table in which rows are looked up or written | these rows |

So logits of filtered rows count twice: with top-p they are read as often, or once more for each further race
and its sums; with top-k four times more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when a kernel's module is imported

from benchmarks.json_file import write_json
from benchmarks.steps.model_shape import TITLES, write_configuration
from benchmarks.steps.step_bytes import DecodeBytes, decode_bytes
from engine.config import EngineConfig
from engine.cost.speculative_state import StateBytes
from engine.cost.step_cost import share_used
from engine.cost.step_size import StepSize
from engine.sampling.sampling_table import SamplingNeeds
from engine.step.graph import CAPTURED
from testing.marked_section import replace_between
from testing.simulated_gpu.without_memory import make_engine

MODELS, DRAFTS, ROWS, CONTEXT = ("8b", "nano"), (0, 3), (1, 8, 64), 1024
SAMPLING = {
    "greedy": SamplingNeeds(),
    "temperature 1": SamplingNeeds(random=True),
    "top-p": SamplingNeeds(random=True, filtered=True),
    "all": CAPTURED[-1],
}
RESULT = Path("benchmarks/results/step-traffic.json")
DOCUMENT = Path("docs/performance.md")
BEGIN = "<!-- written by: python -m benchmarks.steps.traffic --publish -->"
END = "<!-- end of what benchmarks.steps.traffic writes -->"
CONV_NDIM = 3
"""Dimensions of the convolution's kept inputs; the scan's have four."""
ATTENTION = "_decode_kernel"
"""The kernel that reads the KV of whole contexts."""
LOOKED_UP = ("embedding", "gather", "index", "index_select")
"""Operators that read rows of their first operand and return them."""
WRITTEN_AT = ("index_copy_", "index_fill_", "index_put_", "scatter_", "scatter_add_")
"""Operators that write to places in their first operand."""


@dataclass(frozen=True)
class Traffic:
    """One step: launches, and bytes by what they are read from or written to."""

    launches: int
    weights: float
    states: float
    kv: float
    rest: float
    """Logits, activations, indices and tables."""

    @property
    def total(self) -> float:
        return self.weights + self.states + self.kv + self.rest


class CapturedSteps:
    """All graphs of one model and number of drafts, of the batch sizes in :data:`ROWS`."""

    def __init__(self, model: str, num_drafts: int, folder: Path) -> None:
        directory = write_configuration(model, folder, max_model_len=2 * CONTEXT)
        config = EngineConfig(
            directory,
            "both",
            load_format="dummy",
            device="cuda",
            max_num_seqs=max(ROWS),
            max_model_len=2 * CONTEXT,
            cache_memory_bytes=48 << 30,
            num_speculative=num_drafts,
            drafter="ngram" if num_drafts else None,
        )
        gpu, engine = make_engine(config, ROWS)
        kinds = list(itertools.product(reversed(ROWS), reversed(CAPTURED)))
        self._graphs = dict(zip(kinds, gpu.graphs[: len(kinds)], strict=True))  # prompts' graphs follow
        self._num_positions = 1 + num_drafts
        self._size = StepSize.of(engine.model.config)
        self._pools = {"kv": _places(engine.caches.layers.k), "states": _places(engine.caches.layers.ssm)}
        self._pools["kept"] = _places(
            tensor
            for one in engine._runner._states.layers.kept
            for tensor in (one.conv, *vars(one.scan).values())
        )
        self._weights = _places(_tensors(engine.model))
        self._num_experts = engine.model.config.moe and engine.model.config.moe.num_experts
        self._block_size = engine.caches.block_size
        self._replayed: int | None = None
        """Bytes of a row's states and kept inputs, if it replays and all drafts were accepted."""
        if engine.capacity.replays:
            states = StateBytes.of(engine.model.config, "cuda")
            assert states is not None
            self._replayed = round(states.moved_by_replay(self._num_positions, self._num_positions))

    def traffic(self, num_rows: int, needs: SamplingNeeds) -> Traffic:
        """Returns what one step of rows with :data:`CONTEXT` tokens before them launches and moves."""
        found: Counter[str] = Counter()
        launched = self._graphs[num_rows, needs].launched
        for name, operands in launched:
            for what, num_bytes in self._moved(name, operands, num_rows):
                found[what] += num_bytes
        moved = {what: found[what] for what in ("weights", "states", "kv", "rest")}
        return Traffic(len(launched), **moved)

    def least(self, num_rows: int) -> DecodeBytes:
        """Returns the bytes that any implementation moves, from ``config.json``."""
        moved = decode_bytes(self._size, num_rows, num_rows * CONTEXT, self._num_positions)
        return moved if self._replayed is None else replace(moved, states=num_rows * self._replayed)

    def _moved(self, name: str, operands: list[Tensor], num_rows: int) -> Iterator[tuple[str, float]]:
        num_tokens = num_rows * self._num_positions
        if name in LOOKED_UP:
            yield self._kind(operands[0]), _bytes(operands[-1])  # read; the result is written
            operands = operands[1:]
        elif name in WRITTEN_AT:
            operands = operands[1:]
        for one in operands:
            kind, num_bytes = self._kind(one), float(_bytes(one))
            if kind == "kv":
                num_used = num_tokens + num_rows * CONTEXT * (name == ATTENTION)
                num_bytes = num_used * _bytes(one[0]) / self._block_size
            elif kind == "states":
                num_written = self._num_positions if self._replayed is None else 1
                num_bytes = num_rows * (1 + num_written) * _bytes(one[0])
            elif kind == "kept":  # two steps' inputs; of the convolution's only the last few of the older one
                kind, num_bytes = "states", num_rows * _bytes(one[0]) / (2 if one.ndim == CONV_NDIM else 1)
            elif kind == "weights" and self._num_experts and one.ndim == 3 and len(one) >= self._num_experts:
                num_shared = len(one) - self._num_experts
                used = self._num_experts * share_used(self._size.expert_share, num_tokens)
                num_bytes *= (used + num_shared) / len(one)
            yield kind, num_bytes

    def _kind(self, operand: Tensor) -> str:
        place = _place(operand)
        pool = next((name for name, places in self._pools.items() if place in places), None)
        return pool or ("weights" if place in self._weights else "rest")


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a view; an expanded axis has those of one element."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * tensor.element_size() if tensor.numel() else 0


def _place(tensor: Tensor) -> int:
    return getattr(tensor, "plain", tensor).untyped_storage()._cdata


def _places(tensors: Any) -> set[int]:
    return set(map(_place, tensors))


def _tensors(part: Any) -> Iterator[Tensor]:
    """Yields the tensors of an object of the model and of all its parts."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (list, tuple)):
        for one in part:
            yield from _tensors(one)
    elif type(part).__module__.startswith(("engine.models", "kernels")):
        slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
        for one in (*getattr(part, "__dict__", {}).values(), *(getattr(part, name) for name in slots)):
            yield from _tensors(one)


def measure(models: tuple[str, ...] = MODELS, drafts: tuple[int, ...] = DRAFTS) -> list[dict[str, Any]]:
    """Returns a row for each model, number of drafts and kind of sampling."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, num_drafts in itertools.product(models, drafts):
            steps = CapturedSteps(model, num_drafts, Path(folder))
            for sampling, needs in SAMPLING.items():
                found = {batch: steps.traffic(batch, needs) for batch in ROWS}
                rows.append(
                    {
                        "model": model,
                        "k": num_drafts,
                        "sampling": sampling,
                        "launches": found[ROWS[0]].launches,
                        "bytes": {batch: round(one.total) for batch, one in found.items()},
                        "least": {batch: round(steps.least(batch).total) for batch in ROWS},
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["model", "k", "sampling", "launches", *(f"batch {batch}" for batch in ROWS)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    moved = [f"{row['bytes'][n] / 1e9:.2f} GB ({row['bytes'][n] / row['least'][n]:.3f})" for n in ROWS]
    return [TITLES[row["model"]], str(row["k"]), row["sampling"], str(row["launches"]), *moved]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publish", action="store_true", help=f"write {RESULT} and the table in {DOCUMENT}")
    options = parser.parse_args()
    rows = measure()
    print(table(rows))
    if options.publish:
        write_json(RESULT, {"context": CONTEXT, "torch": torch.__version__, "rows": rows})
        replace_between(DOCUMENT, BEGIN, END, table(rows))


if __name__ == "__main__":
    main()
