"""Memory that a model's weights take, by its configuration alone.

The model is put together as for loading, out of tensors without memory (torch's meta device), and what it
asks for is added up: what loading allocates on a GPU, whether the files are there or not.
"""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.made_weights import MadeWeights, NoValues
from engine.checkpoint.model_config import ModelConfig
from engine.models import build_model
from engine.parallel.tensor_parallel import ALONE, TensorParallel


def weight_bytes(config: ModelConfig, tp: TensorParallel = ALONE, *, mtp: bool = False) -> int:
    """Bytes of a rank's weights as they are kept; a tied output head counts once.

    With ``mtp`` the MTP layer counts too; it shares embedding and output head.
    """
    weights = MadeWeights(Path(), config, "meta", NoValues())
    build_model(config, weights, mtp=mtp, tp=tp)
    return weights.bytes_taken
