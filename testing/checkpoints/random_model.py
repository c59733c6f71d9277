"""The models that all arrangements of servers in a benchmark serve: NemotronH of two sizes, random float32.

The weights depend only on the shape. They are scaled so that logits clearly differ (see
:mod:`testing.checkpoints.random_checkpoint`): arrangements that compute the same model give the same greedy
answer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from testing.checkpoints.random_checkpoint import CheckpointShape, make_checkpoint

MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class BenchmarkModel:
    """One model size."""

    name: str
    """The model's name for clients and of its directory."""
    title: str
    shape: CheckpointShape


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
)

MODELS = {model.name.rpartition("-")[2]: model for model in (SMALL, LARGE)}
"""Models by the names that ``--models`` takes."""


def checkpoint(model: BenchmarkModel, folder: Path) -> Path:
    """Return the model's directory in ``folder``; write it unless it is complete already."""
    directory = folder / model.name
    shape = repr(model.shape)
    stamp = directory / "shape.txt"  # written last: a directory without it was cut short
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != shape:
        make_checkpoint(directory, model.shape)
        stamp.write_text(shape, encoding="utf-8")
    return directory


def num_parameters(directory: Path) -> int:
    """Count the parameters in the headers of the directory's safetensors files."""
    total = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total
