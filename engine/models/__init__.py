"""The models that can be served: their configurations read, their weights loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.dummy_weights import dummy_weights
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_shard import check_divides
from engine.checkpoint.weights import LoadFormat, WeightFiles, Weights
from engine.models.causal_lm import CausalLM
from engine.models.families import FAMILIES
from engine.models.mtp import PREFIX as MTP_PREFIX
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from telemetry.start_up import StartUp

logger = logging.getLogger(__name__)

NAMES_SHOWN = 5


def read_config(
    model_dir: str | Path, dtype: str = "auto", device: torch.device | str = "cpu"
) -> ModelConfig:
    """What ``config.json`` and ``generation_config.json`` of a Hugging Face model directory say.

    ``dtype``: ``float32``, ``bfloat16`` or ``auto``; see :meth:`CheckpointFields.of`.

    Raises :class:`ModelLoadError` that names the field, what it holds and what is supported.
    """
    fields = CheckpointFields.of(Path(model_dir), dtype, torch.device(device))
    family = FAMILIES.get(fields.architecture)
    if family is None:
        known = f"one of the known: {', '.join(sorted(FAMILIES))}"
        raise fields.error("architectures", [fields.architecture], known)
    return family.configure(fields)


def build_model(
    config: ModelConfig, weights: Weights, *, mtp: bool = False, tp: TensorParallel = ALONE
) -> CausalLM:
    """The model of ``config`` out of ``weights``; with ``mtp`` its MTP layer too. See :func:`load_model`."""
    return CausalLM(FAMILIES[config.architecture], config, weights, mtp=mtp, tp=tp)


def load_model(
    model_dir: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    mtp: bool = False,
    tp: TensorParallel = ALONE,
    load_format: LoadFormat = "auto",
    start_up: StartUp | None = None,
) -> CausalLM:
    """The model of a Hugging Face directory, ready to run on ``device``; with ``mtp`` its MTP layer too.

    Of the weights only what ``tp`` says is this rank's. ``start_up`` is told how many they are and that they
    are there.

    Raises :class:`wire.errors.ModelLoadError` that names what is unknown, missing or misshapen, and
    :class:`wire.errors.ConfigError` for a number of ranks that can't share the model.
    """
    config = read_config(model_dir, dtype, device)
    check_divides(config, tp.size, shares_experts=tp.experts.size > 1)
    weights = _weights(model_dir, config, device, load_format)
    model = build_model(config, weights, mtp=mtp, tp=tp)
    unused = [name for name in weights.unused() if mtp or not name.startswith(MTP_PREFIX)]
    if tp.experts.size > 1:  # most are other ranks'
        unused = [name for name in unused if ".experts." not in name]
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
        return dummy_weights(model_dir, config, device=device)
    return WeightFiles(model_dir, dtype=config.dtype, device=device, quantization=config.quantization)
