"""Memory that a model's weights take, computed from its configuration alone.

The model is built as for loading, but from tensors without memory (torch's meta device). The sizes of all
tensors that the model asks for are added up. The sum is the memory that loading allocates on a GPU. No weight
file is needed.
"""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.made_weights import MadeWeights, NoValues
from engine.checkpoint.model_config import ModelConfig
from engine.models import build_model
from engine.parallel.tensor_parallel import ALONE, TensorParallel


def weight_bytes(config: ModelConfig, tp: TensorParallel = ALONE, *, mtp: bool = False) -> int:
    """Returns the bytes of a rank's weights in the format in which they are kept. With ``weight_dtype`` auto
    that is bfloat16, if ``config.json`` says that the checkpoint is stored so.

    A tied output head counts once. With ``mtp`` the MTP layer counts too; it shares the embedding and the
    output head.
    """
    weights = MadeWeights(Path(), config, "meta", NoValues())
    build_model(config, weights, mtp=mtp, tp=tp)
    return weights.bytes_taken
