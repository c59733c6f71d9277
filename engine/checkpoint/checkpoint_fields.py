"""What all checkpoints say alike in their ``config.json``, whatever their family."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.config_fields import ConfigFields
from engine.checkpoint.quantization import Quantization, read_quantization
from engine.checkpoint.weights import stored_names
from wire.errors import ConfigError

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CheckpointFields(ConfigFields):
    """The fields of a Hugging Face model directory, and what is settled before its family reads them."""

    architecture: str
    dtype: torch.dtype
    """Of weights and activations."""
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None

    @classmethod
    def of(cls, directory: Path, dtype: str, device: torch.device) -> CheckpointFields:
        """Reads ``config.json`` and ``generation_config.json``.

        ``dtype``: ``float32``, ``bfloat16`` or ``auto``: the checkpoint's own on a GPU, float32 on CPU,
        whose kernels are made for it.

        Raises :class:`ModelLoadError` that names the field, what it holds and what is supported.
        """
        fields = _text_model(ConfigFields.read(directory / "config.json"))
        return cls(
            fields.path,
            fields.raw,
            architecture=_architecture(fields),
            dtype=_resolve_dtype(dtype, fields, device),
            eos_token_ids=_eos_token_ids(directory, fields),
            quantization=read_quantization(fields),
        )

    def stores(self, name: str) -> bool:
        """Whether the checkpoint has a tensor, where ``config.json`` is silent; False without weights."""
        return name in stored_names(self.path.parent)


def _text_model(fields: ConfigFields) -> ConfigFields:
    """The language model's fields in place of those of the whole, where it sees pictures too."""
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
    """``generation_config.json`` wins: instruct releases add their end-of-turn token only there."""
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
    on_disk = fields.choice("dtype", "torch_dtype", choices=(*DTYPES, "float16"), default="float32")
    if device.type == "cpu":
        if on_disk != "float32":
            logger.info("dtype auto: float32 instead of the checkpoint's %s, for CPU kernels", on_disk)
        return torch.float32
    if on_disk not in DTYPES:
        raise fields.error("dtype", on_disk, f"{' or '.join(DTYPES)}; choose one with an explicit dtype")
    return DTYPES[on_disk]
