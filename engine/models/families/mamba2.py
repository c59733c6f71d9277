"""Mamba-2 and Mamba-Codestral: models that have only Mamba-2 layers (arXiv:2405.21060).

    r = r + mamba_i(rms_norm_i(r))        for every layer i

There is no attention and no KV: a request has only its state, at any length. Tensors have the names that
transformers gives them. Checkpoints of the state-spaces repository must be converted to these names first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.checkpoint.checkpoint_fields import DTYPES, CheckpointFields
from engine.checkpoint.mixer_config import MambaConfig
from engine.checkpoint.model_config import LayerType, ModelConfig
from engine.models.block import Block
from engine.models.builder import Builder
from engine.models.family import Family


def configure(fields: CheckpointFields) -> ModelConfig:
    """Read the configuration.

    Raises :class:`ModelLoadError` that names the field, its value and the supported values.
    """
    fields.require("hidden_act", "silu", default="silu")
    fields.require("rms_norm", True, default=True)
    layer: LayerType = "mamba"
    layer_types = (layer,) * fields.integer("num_hidden_layers")
    config = ModelConfig.of(fields, layer_types=layer_types, mamba=_mamba(fields))
    return replace(config, residual_in_fp32=fields.boolean("residual_in_fp32", default=True))


def blocks(build: Builder) -> Iterator[Block]:
    """Yield one block per layer."""
    for layer in range(len(build.config.layer_types)):
        yield build.block(f"layers.{layer}.norm", build.mamba(f"layers.{layer}.mixer."))


def _mamba(fields: CheckpointFields) -> MambaConfig:
    """Read the mixer's fields. ``num_heads`` and ``head_dim`` have no ``mamba_`` prefix in this family."""
    num_heads, head_dim = fields.integer("num_heads"), fields.integer("head_dim")
    num_groups = fields.integer("n_groups", default=8)
    if num_heads % num_groups:
        raise fields.error("n_groups", num_groups, f"a divisor of num_heads ({num_heads})")
    d_inner = int(fields.number("expand", default=2) * fields.integer("hidden_size"))
    if d_inner != num_heads * head_dim:
        raise fields.error(
            "expand",
            fields.raw.get("expand"),
            f"expand x hidden_size ({d_inner}) to be num_heads x head_dim ({num_heads * head_dim})",
        )
    ssm_dtype = fields.choice("mamba_ssm_cache_dtype", choices=tuple(DTYPES), default="float32")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.integer("state_size", default=128),
        num_groups=num_groups,
        conv_width=fields.integer("conv_kernel", default=4, minimum=2),
        chunk_size=fields.integer("chunk_size", default=256),
        dt_limit=fields.interval("time_step_limit", default=(0.0, float("inf"))),
        conv_bias=fields.boolean("use_conv_bias", default=True),
        proj_bias=fields.boolean("use_bias", default=False),
        ssm_dtype=DTYPES[ssm_dtype],
        norm_groups=num_groups,
    )


FAMILY = Family(
    architectures=("Mamba2ForCausalLM",),
    configure=configure,
    prefixes=("backbone.",),
    embedding="embeddings",
    last_norm="norm_f",
    blocks=blocks,
)
