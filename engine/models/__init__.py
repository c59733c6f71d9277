"""Reads model configurations and loads models. Every architecture that can be served is known here."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.dummy_weights import dummy_weights
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_shard import check_divides
from engine.checkpoint.weight_dtype import WeightDtype
from engine.checkpoint.weights import LoadFormat, WeightFiles, Weights
from engine.models.causal_lm import CausalLM
from engine.models.families import FAMILIES
from engine.models.inherited import LoadedModel, LoadKey, keep, kept
from engine.models.mtp import PREFIX as MTP_PREFIX
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from telemetry.start_up import StartUp

logger = logging.getLogger(__name__)

NAMES_SHOWN = 5


def read_config(
    model_dir: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    weight_dtype: WeightDtype = "auto",
) -> ModelConfig:
    """Read ``config.json`` and ``generation_config.json`` of a Hugging Face model directory.

    ``dtype``: ``float32``, ``bfloat16`` or ``auto``. See :meth:`CheckpointFields.of`, also for errors.
    """
    fields = CheckpointFields.of(Path(model_dir), dtype, torch.device(device), weight_dtype)
    family = FAMILIES.get(fields.architecture)
    if family is None:
        known = f"one of the known: {', '.join(sorted(FAMILIES))}"
        raise fields.error("architectures", [fields.architecture], known)
    return family.configure(fields)


def build_model(
    config: ModelConfig, weights: Weights, *, mtp: bool = False, tp: TensorParallel = ALONE
) -> CausalLM:
    """Build the model from ``weights``; with ``mtp`` also its MTP layer. See :func:`load_model`."""
    return CausalLM(FAMILIES[config.architecture], config, weights, mtp=mtp, tp=tp)


def load_model(
    model_dir: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    mtp: bool = False,
    tp: TensorParallel = ALONE,
    load_format: LoadFormat = "auto",
    batch_invariant: bool = False,
    weight_dtype: WeightDtype = "auto",
    start_up: StartUp | None = None,
) -> CausalLM:
    """Load the model of a Hugging Face directory onto ``device``; with ``mtp`` also its MTP layer.

    Only the part of the weights that ``tp`` gives to this rank is loaded. With ``batch_invariant`` a row has
    the same bits in every batch. ``start_up`` notes the size of the weights in bytes and the end of the
    ``weights`` phase. A model that this process has inherited (:mod:`engine.models.inherited`) is not loaded
    again.

    Raises :class:`wire.errors.ModelLoadError` that names the unknown, missing or misshapen item, and
    :class:`wire.errors.ConfigError` if this number of ranks can't share the model.
    """
    load = partial(
        _load,
        model_dir,
        dtype=dtype,
        device=device,
        mtp=mtp,
        tp=tp,
        load_format=load_format,
        batch_invariant=batch_invariant,
        weight_dtype=weight_dtype,
    )
    key = LoadKey(Path(model_dir), dtype, str(device), load_format, mtp, batch_invariant, weight_dtype)
    is_whole = tp.size == 1 and tp.experts.size == 1
    found = kept(key) if is_whole else None
    loaded = found or load()
    if is_whole:
        keep(key, loaded)
    if start_up is not None:
        start_up.weight_bytes = loaded.weight_bytes
        start_up.weights_are_inherited = found is not None
        start_up.ended("weights")
    return loaded.model


def _load(
    model_dir: str | Path,
    *,
    dtype: str,
    device: torch.device | str,
    mtp: bool,
    tp: TensorParallel,
    load_format: LoadFormat,
    batch_invariant: bool,
    weight_dtype: WeightDtype,
) -> LoadedModel:
    config = read_config(model_dir, dtype, device, weight_dtype)
    check_divides(config, tp.size, shares_experts=tp.experts.size > 1)
    weights = _weights(model_dir, config, device, load_format, batch_invariant)
    model = build_model(config, weights, mtp=mtp, tp=tp)
    if config.weight_dtype != "float32":
        held = "bfloat16 where no number is rounded" if config.weight_dtype == "auto" else config.weight_dtype
        logger.info("weights of linear layers are kept in %s", held)
    unused = [name for name in weights.unused() if mtp or not name.startswith(MTP_PREFIX)]
    if tp.experts.size > 1:  # other ranks hold most of the experts
        unused = [name for name in unused if ".experts." not in name]
    if unused:
        logger.warning(
            "%s: %d tensors are not part of the model: %s",
            model_dir,
            len(unused),
            ", ".join(unused[:NAMES_SHOWN]),
        )
    return LoadedModel(model, weights.bytes_taken)


def _weights(
    model_dir: str | Path,
    config: ModelConfig,
    device: torch.device | str,
    load_format: LoadFormat,
    batch_invariant: bool,
) -> Weights:
    if load_format == "dummy":
        return dummy_weights(model_dir, config, device=device, batch_invariant=batch_invariant)
    return WeightFiles(
        model_dir,
        dtype=config.dtype,
        device=device,
        quantization=config.quantization,
        batch_invariant=batch_invariant,
        weight_dtype=config.weight_dtype,
    )
