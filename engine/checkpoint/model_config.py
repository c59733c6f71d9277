"""A checkpoint's configuration files, checked once and in one form for all families.

In :class:`ModelConfig` each value has one name. An unsupported value raises an error that names it; no value
is silently ignored. A family's file in :mod:`engine.models.families` knows which fields the family has and
what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.mixer_config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    MambaConfig,
    MlpConfig,
    MoeConfig,
)
from engine.checkpoint.quantization import Quantization
from engine.checkpoint.weight_dtype import WeightDtype
from engine.memory.cache_formats import AS_THE_MODEL, CacheFormats
from engine.memory.caches import CacheSpec
from wire.errors import ModelLoadError

LayerType = Literal["mamba", "gated_delta", "attention", "mlp", "moe"]
RECURRENT: frozenset[LayerType] = frozenset({"mamba", "gated_delta"})
"""Layers that keep a state of fixed size for each sequence."""

UNLIMITED = 1 << 20
"""Context length in tokens if the checkpoint names no limit, as with purely recurrent models."""


@dataclass(frozen=True)
class MtpConfig:
    """One set of multi-token prediction layers. It runs once for each wanted draft."""

    num_predictions: int
    """How many times in a row the layers were trained to run."""
    layer_types: tuple[LayerType, ...]


@dataclass(frozen=True)
class ModelConfig:
    """All parts of a checkpoint's configuration that the model needs."""

    architecture: str
    dtype: torch.dtype
    """Dtype of weights and activations."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layer_types: tuple[LayerType, ...]
    """Every mixer of the model in order. The family decides which mixers share a norm."""
    norm_eps: float
    tie_word_embeddings: bool
    mamba: MambaConfig | None = None
    """None if no layer has this type; the same holds for the next four fields."""
    gated_delta: GatedDeltaNetConfig | None = None
    attention: AttentionConfig | None = None
    mlp: MlpConfig | None = None
    moe: MoeConfig | None = None
    mtp: MtpConfig | None = None
    residual_in_fp32: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what each block adds to the residual stream."""
    logit_scale: float = 1.0
    quantization: Quantization | None = None
    """How the linear layers' weights are quantised."""
    norm_offset: float = 0.0
    """Added to stored weights of norms over the hidden state: 1 if the checkpoint stores them around 0."""
    weight_dtype: WeightDtype = "float32"
    """How a CPU keeps the weights of linear layers."""
    cache_formats: CacheFormats = AS_THE_MODEL
    """The operator's choice; no checkpoint contains it."""

    @classmethod
    def of(
        cls,
        fields: CheckpointFields,
        *,
        layer_types: tuple[LayerType, ...],
        mamba: MambaConfig | None = None,
        gated_delta: GatedDeltaNetConfig | None = None,
        attention: AttentionConfig | None = None,
        mlp: MlpConfig | None = None,
        moe: MoeConfig | None = None,
        mtp: MtpConfig | None = None,
        default_norm_eps: float = 1e-5,
    ) -> ModelConfig:
        """Make a configuration. Fields that have the same name in all families are read from ``fields``.

        Raises :class:`ModelLoadError` if such a field is missing or has a wrong value.
        """
        return cls(
            architecture=fields.architecture,
            dtype=fields.dtype,
            eos_token_ids=fields.eos_token_ids,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            max_position_embeddings=fields.integer("max_position_embeddings", default=UNLIMITED),
            layer_types=layer_types,
            norm_eps=fields.number("layer_norm_epsilon", "rms_norm_eps", default=default_norm_eps),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            mamba=mamba,
            gated_delta=gated_delta,
            attention=attention,
            mlp=mlp,
            moe=moe,
            mtp=mtp,
            residual_in_fp32=fields.boolean("residual_in_fp32", default=False),
            quantization=fields.quantization,
            weight_dtype=fields.weight_dtype,
        )

    @property
    def recurrent(self) -> MambaConfig | GatedDeltaNetConfig | None:
        """The layers that keep a state. A model has at most one kind of them."""
        return self.mamba or self.gated_delta

    @property
    def ssm_dtype(self) -> torch.dtype:
        """Dtype of recurrent layers' states in the pool; float32 if there are no recurrent layers."""
        if self.recurrent is None:
            return torch.float32
        return self.cache_formats.ssm or self.recurrent.ssm_dtype

    def require_mtp(self) -> MtpConfig:
        """Return the MTP layers' configuration.

        Raises :class:`ModelLoadError` if the checkpoint has no MTP layers, or has layers that can't be run.
        """
        if self.mtp is None:
            raise ModelLoadError(
                "the checkpoint has no MTP layers (num_nextn_predict_layers is 0 or missing); "
                "use `drafter` ngram"
            )
        if RECURRENT & set(self.mtp.layer_types):
            raise ModelLoadError(
                f"the MTP layers are {', '.join(self.mtp.layer_types)}; a recurrent layer among them is not "
                "supported: its state would have to be kept beside the model's. Use `drafter` ngram"
            )
        return self.mtp

    def cache_spec(self, *, mtp: bool = False) -> CacheSpec:
        """Return what the pools keep for this model. With ``mtp`` the MTP layer's KV is added at the end.

        Raises :class:`ModelLoadError` as :meth:`require_mtp` does.
        """
        layer_types = self.layer_types + (self.require_mtp().layer_types if mtp else ())
        attention, recurrent = self.attention, self.recurrent
        heads, head_dim, state_size = (0, 0, 0) if recurrent is None else recurrent.state_shape
        return CacheSpec(
            attn_layers=layer_types.count("attention"),
            kv_heads=0 if attention is None else attention.num_kv_heads,
            head_dim=0 if attention is None else attention.head_dim,
            kv_dtype=self.cache_formats.kv or self.dtype,
            mamba_layers=sum(self.layer_types.count(kind) for kind in RECURRENT),
            conv_channels=0 if recurrent is None else recurrent.conv_channels,
            conv_width=1 if recurrent is None else recurrent.conv_width,
            mamba_heads=heads,
            mamba_head_dim=head_dim,
            state_size=state_size,
            conv_dtype=self.dtype,
            ssm_dtype=self.ssm_dtype,
            stochastic_rounding=self.cache_formats.stochastic_rounding,
        )
