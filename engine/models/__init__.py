"""The models that can be served, by the architecture name in their ``config.json``."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.model_config import ModelConfig
from engine.models.mtp import PREFIX as MTP_PREFIX
from engine.models.nemotron_h import NemotronH
from engine.weights import WeightFiles

logger = logging.getLogger(__name__)

MODELS = {"NemotronHForCausalLM": NemotronH}
NAMES_SHOWN = 5


def load_model(
    model_dir: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    mtp: bool = False,
) -> NemotronH:
    """The model of a Hugging Face directory, ready to run on ``device``; with ``mtp`` its MTP layer too.

    Raises :class:`wire.errors.ModelLoadError` that names what is unknown, missing or misshapen.
    """
    config = ModelConfig.from_directory(model_dir, dtype, device)
    weights = WeightFiles(model_dir, dtype=config.dtype, device=device)
    model = MODELS[config.architecture](config, weights, mtp=mtp)
    unused = [name for name in weights.unused() if mtp or not name.startswith(MTP_PREFIX)]
    if unused:
        logger.warning(
            "%s: %d tensors are not part of the model: %s",
            model_dir,
            len(unused),
            ", ".join(unused[:NAMES_SHOWN]),
        )
    return model
