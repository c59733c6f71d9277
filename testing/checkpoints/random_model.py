"""The models that all arrangements serve: NemotronH of two sizes with random weights in float32.

What is written depends on nothing but the shape. Weights are scaled so that logits lie apart (see
:mod:`testing.checkpoints.random_checkpoint`): arrangements that compute the same model give the same greedy
answer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from testing.checkpoints.random_checkpoint import CheckpointShape, make_checkpoint

MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class BenchmarkModel:
    """One size, and how much of it is measured."""

    name: str
    """What clients call it, and its directory."""
    title: str
    shape: CheckpointShape
    requests: dict[int, int]
    """Of a measurement, by how many are in flight."""
    starts_s: float
    """What starting and stopping all arrangements once takes on two quiet cores."""
    load_s: float
    """What measuring all of them once takes there."""


SMALL = BenchmarkModel(
    name="nemotron-h-2m",
    title="2 M parameters",
    shape=CheckpointShape(
        pattern="M-M*M-",
        vocab_size=512,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=384,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=2,
        ssm_state_size=64,
        chunk_size=128,
        max_position_embeddings=MAX_MODEL_LEN,
    ),
    requests={1: 8, 8: 32, 32: 64},
    starts_s=155.0,
    load_s=120.0,
)

LARGE = BenchmarkModel(
    name="nemotron-h-120m",
    title="120 M parameters",
    shape=CheckpointShape(
        pattern="M-M-M-M*-M-M-M*-M-M-M*-M-M*",
        vocab_size=8192,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2304,
        mamba_num_heads=24,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        chunk_size=128,
        max_position_embeddings=MAX_MODEL_LEN,
    ),
    requests={1: 2, 8: 16},
    starts_s=95.0,
    load_s=285.0,
)

MODELS = {model.name.rpartition("-")[2]: model for model in (SMALL, LARGE)}
"""By what ``--models`` calls them."""


def checkpoint(model: BenchmarkModel, folder: Path) -> Path:
    """The model's directory in ``folder``, written unless it is there whole already."""
    directory = folder / model.name
    shape = repr(model.shape)
    stamp = directory / "shape.txt"  # written last: a directory without it was cut short
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != shape:
        make_checkpoint(directory, model.shape)
        stamp.write_text(shape, encoding="utf-8")
    return directory


def num_parameters(directory: Path) -> int:
    """Counted in the headers of the directory's safetensors files."""
    total = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total
