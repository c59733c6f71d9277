"""The models that can be served, by the architecture name in their ``config.json``."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.dummy_weights import DummyWeights
from engine.model_config import ModelConfig
from engine.model_shard import check_divides
from engine.models.mtp import PREFIX as MTP_PREFIX
from engine.models.nemotron_h import NemotronH
from engine.tensor_parallel import ALONE, TensorParallel
from engine.weights import LoadFormat, WeightFiles, Weights
from telemetry.start_up import StartUp

logger = logging.getLogger(__name__)

MODELS = {"NemotronHForCausalLM": NemotronH}
NAMES_SHOWN = 5


def load_model(
    model_dir: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    mtp: bool = False,
    tp: TensorParallel = ALONE,
    load_format: LoadFormat = "auto",
    start_up: StartUp | None = None,
) -> NemotronH:
    """The model of a Hugging Face directory, ready to run on ``device``; with ``mtp`` its MTP layer too.

    Of the weights only what ``tp`` says is this rank's. ``start_up`` is told how many they are and that they
    are there.

    Raises :class:`wire.errors.ModelLoadError` that names what is unknown, missing or misshapen, and
    :class:`wire.errors.ConfigError` for a number of ranks that can't share the model.
    """
    config = ModelConfig.from_directory(model_dir, dtype, device)
    check_divides(config, tp.size)
    weights = _weights(model_dir, config, device, load_format)
    model = MODELS[config.architecture](config, weights, mtp=mtp, tp=tp)
    unused = [name for name in weights.unused() if mtp or not name.startswith(MTP_PREFIX)]
    if unused:
        logger.warning(
            "%s: %d tensors are not part of the model: %s",
            model_dir,
            len(unused),
            ", ".join(unused[:NAMES_SHOWN]),
        )
    if start_up is not None:
        start_up.weight_bytes = weights.bytes_taken
        start_up.ended("weights")
    return model


def _weights(
    model_dir: str | Path, config: ModelConfig, device: torch.device | str, load_format: LoadFormat
) -> Weights:
    if load_format == "dummy":
        return DummyWeights(model_dir, config, device=device)
    return WeightFiles(model_dir, dtype=config.dtype, device=device)
