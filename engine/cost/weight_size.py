"""Memory that a model's weights take, computed from its configuration alone.

The model is built as for loading, but from tensors without memory (torch's meta device). The sizes of all
tensors that the model asks for are added up. The sum is the memory that loading allocates on a GPU. No weight
file is needed.
"""

from __future__ import annotations

from importlib import import_module
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
    try:
        return _bytes_taken(config, tp, mtp=mtp)
    except NotImplementedError:  # an operation without a meta kernel
        register_meta_kernels()
        return _bytes_taken(config, tp, mtp=mtp)


def register_meta_kernels() -> None:
    """Registers the meta kernels that torch has in Python. A process may have put off their import until
    something in their module is used."""
    assert callable(import_module("torch._meta_registrations").register_meta)


def _bytes_taken(config: ModelConfig, tp: TensorParallel, *, mtp: bool) -> int:
    weights = MadeWeights(Path(), config, "meta", NoValues())
    build_model(config, weights, mtp=mtp, tp=tp)
    return weights.bytes_taken
