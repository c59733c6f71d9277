"""What a checkpoint's ``config.json`` says, checked once and in one shape for all families.

Behind :class:`ModelConfig` each thing has one name. A value that this implementation can't honour is refused
by name, never ignored. Which fields a family has, and what they mean there, its file in
:mod:`engine.models.families` knows.
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
from engine.memory.cache_formats import AS_THE_MODEL, CacheFormats
from engine.memory.caches import CacheSpec
from wire.errors import ModelLoadError

LayerType = Literal["mamba", "gated_delta", "attention", "mlp", "moe"]
RECURRENT: frozenset[LayerType] = frozenset({"mamba", "gated_delta"})
"""Layers that keep a state of fixed size a sequence."""

UNLIMITED = 1 << 20
"""Tokens of a context where the checkpoint names no limit, as purely recurrent ones don't."""


@dataclass(frozen=True)
class MtpConfig:
    """One set of multi-token prediction layers, looped for as many drafts as are wanted."""

    num_predictions: int
    """Loops that the layers were trained for."""
    layer_types: tuple[LayerType, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Everything of a checkpoint's configuration that the model needs."""

    architecture: str
    dtype: torch.dtype
    """Of weights and activations."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layer_types: tuple[LayerType, ...]
    """Every mixer of the model in order; which of them share a norm is the family's business."""
    norm_eps: float
    tie_word_embeddings: bool
    mamba: MambaConfig | None = None
    """None where no layer is of that type, like the next four."""
    gated_delta: GatedDeltaNetConfig | None = None
    attention: AttentionConfig | None = None
    mlp: MlpConfig | None = None
    moe: MoeConfig | None = None
    mtp: MtpConfig | None = None
    residual_in_fp32: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what each block adds to the residual stream."""
    logit_scale: float = 1.0
    quantization: Quantization | None = None
    """Of the linear layers' weights."""
    norm_offset: float = 0.0
    """Added to stored weights of norms over the hidden state: 1 where the checkpoint keeps them around 0."""
    cache_formats: CacheFormats = AS_THE_MODEL
    """The operator's choice, which no checkpoint knows."""

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
        """With what all families spell alike, from ``fields``. Raises :class:`ModelLoadError`."""
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
        )

    @property
    def recurrent(self) -> MambaConfig | GatedDeltaNetConfig | None:
        """Of the layers that keep a state; a model has one kind of them at most."""
        return self.mamba or self.gated_delta

    @property
    def ssm_dtype(self) -> torch.dtype:
        """Of recurrent layers' states in the pool; float32 where there are none."""
        if self.recurrent is None:
            return torch.float32
        return self.cache_formats.ssm or self.recurrent.ssm_dtype

    def require_mtp(self) -> MtpConfig:
        """The MTP layer, for whoever is about to use it.

        Raises :class:`ModelLoadError` where the checkpoint has none, or one that can't be run.
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
        """What the pools keep for this model; with ``mtp`` for its MTP layer too, whose KV comes last.

        Raises :class:`ModelLoadError` as :meth:`require_mtp`.
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
