"""The parts of ``config.json`` that are the same for all families."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.config_fields import ConfigFields
from engine.checkpoint.quantization import Quantization, read_quantization
from engine.checkpoint.weight_dtype import WeightDtype, resolve
from engine.checkpoint.weights import stored_names
from wire.errors import ConfigError

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CheckpointFields(ConfigFields):
    """The fields of a Hugging Face model directory, and values that all families read in the same way."""

    architecture: str
    dtype: torch.dtype
    """Dtype of weights and activations."""
    weight_dtype: WeightDtype
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None

    @classmethod
    def of(
        cls, directory: Path, dtype: str, device: torch.device, weight_dtype: WeightDtype = "auto"
    ) -> CheckpointFields:
        """Read ``config.json`` and ``generation_config.json``.

        ``dtype``: ``float32``, ``bfloat16`` or ``auto``. ``auto`` is the checkpoint's dtype on a GPU, and
        float32 on CPU, because the CPU kernels are made for float32.

        Raises :class:`ModelLoadError` that names the field, its value and the supported values, and
        :class:`ConfigError` for any other ``dtype``, and as :func:`weight_dtype.resolve` does.
        """
        fields = _text_model(ConfigFields.read(directory / "config.json"))
        resolved, on_disk = _resolve_dtype(dtype, fields, device), _dtype_on_disk(fields)
        return cls(
            fields.path,
            fields.raw,
            architecture=_architecture(fields),
            dtype=resolved,
            weight_dtype=resolve(weight_dtype, resolved, device, is_stored_in_bfloat16=on_disk == "bfloat16"),
            eos_token_ids=_eos_token_ids(directory, fields),
            quantization=read_quantization(fields),
        )

    def stores(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor; False without weights.

        Families ask this where ``config.json`` leaves a question open.
        """
        return name in stored_names(self.path.parent)


def _text_model(fields: ConfigFields) -> ConfigFields:
    """Let a multimodal model's ``text_config`` replace the fields of the whole model."""
    text = fields.raw.get("text_config")
    if not isinstance(text, dict):
        return fields
    return ConfigFields(fields.path, fields.raw | text | {"architectures": fields.raw.get("architectures")})


def _architecture(fields: ConfigFields) -> str:
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", names, "a list of one name, as in ['NemotronHForCausalLM']")
    return names[0]


def _eos_token_ids(directory: Path, fields: ConfigFields) -> tuple[int, ...]:
    """Read the end tokens.

    If ``generation_config.json`` has any, they are used, because instruct releases add their end-of-turn
    token only there.
    """
    generation = directory / "generation_config.json"
    if generation.exists():
        ids = ConfigFields.read(generation).token_ids("eos_token_id")
        if ids:
            return ids
    return fields.token_ids("eos_token_id")


def _resolve_dtype(wanted: str, fields: ConfigFields, device: torch.device) -> torch.dtype:
    if wanted in DTYPES:
        return DTYPES[wanted]
    if wanted != "auto":
        raise ConfigError(f"dtype is {wanted!r}; supported are auto, {', '.join(DTYPES)}")
    on_disk = _dtype_on_disk(fields)
    if device.type == "cpu":
        if on_disk != "float32":
            logger.info("dtype auto: computes in float32, the checkpoint is in %s", on_disk)
        return torch.float32
    if on_disk not in DTYPES:
        raise fields.error("dtype", on_disk, f"{' or '.join(DTYPES)}; choose one with an explicit dtype")
    return DTYPES[on_disk]


def _dtype_on_disk(fields: ConfigFields) -> str:
    return fields.choice("dtype", "torch_dtype", choices=(*DTYPES, "float16"), default="float32")
