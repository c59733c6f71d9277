"""What a checkpoint's ``config.json`` says, checked once and in one shape.

Published checkpoints spell fields in several ways (``hybrid_override_pattern`` or ``layers_block_type``,
``conv_kernel`` or ``mamba_d_conv``). They end here: behind :class:`ModelConfig` each thing has one name.
A value that this implementation can't honour is refused by name, never ignored.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.caches import CacheSpec
from engine.config_fields import ConfigFields
from wire.errors import ConfigError, ModelLoadError

logger = logging.getLogger(__name__)

LayerType = Literal["mamba", "attention", "mlp", "moe"]

ARCHITECTURES = ("NemotronHForCausalLM",)
"""Names in ``architectures`` whose configuration this module understands."""

_LAYER_TYPE_OF_SYMBOL: dict[str, LayerType] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_LAYER_TYPE_OF_NAME: dict[str, LayerType] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-2 mixer. Head ``h`` shares B and C with its group, ``h // (num_heads // num_groups)``."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    chunk_size: int
    dt_limit: tuple[float, float]
    conv_bias: bool
    proj_bias: bool
    ssm_dtype: torch.dtype

    @property
    def d_inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """x, B and C stand side by side and pass the convolution together."""
        return self.d_inner + 2 * self.num_groups * self.state_size

    @property
    def proj_size(self) -> int:
        """Rows of ``in_proj``: gate z, then (x, B, C), then dt."""
        return self.d_inner + self.conv_channels + self.num_heads


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention without positional encoding."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class MlpConfig:
    """``down(relu(up(x))^2)``"""

    intermediate_size: int
    bias: bool


@dataclass(frozen=True)
class MoeConfig:
    """Routed relu^2 experts, optionally inside a latent projection, beside one shared expert."""

    num_experts: int
    experts_per_token: int
    expert_groups: int
    groups_per_token: int
    normalize_weights: bool
    scaling_factor: float
    intermediate_size: int
    shared_intermediate_size: int
    latent_size: int | None
    bias: bool
    """Of the shared expert and the latent projections; routed experts have none."""


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
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layer_types: tuple[LayerType, ...]
    norm_eps: float
    residual_in_fp32: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    mamba: MambaConfig
    attention: AttentionConfig
    mlp: MlpConfig | None
    """None where no layer is of that type, like the next two."""
    moe: MoeConfig | None
    mtp: MtpConfig | None

    @classmethod
    def from_directory(
        cls, path: str | Path, dtype: str = "auto", device: torch.device | str = "cpu"
    ) -> ModelConfig:
        """Reads ``config.json`` and ``generation_config.json`` of a Hugging Face model directory.

        ``dtype``: ``float32``, ``bfloat16`` or ``auto``: the checkpoint's own on a GPU, float32 on CPU,
        whose kernels are made for it.

        Raises :class:`ModelLoadError` that names the field, what it holds and what is supported.
        """
        directory = Path(path)
        fields = ConfigFields.read(directory / "config.json")
        architecture = _architecture(fields)
        _refuse_unsupported(fields)
        layer_types = _layer_types(fields, "layers_block_type", "hybrid_override_pattern")
        if not {"mamba", "attention"} <= set(layer_types):
            raise ModelLoadError(
                f"{fields.path}: the layers are {', '.join(sorted(set(layer_types)))}; expected a hybrid "
                "with at least one Mamba and one attention layer"
            )
        mtp = _mtp(fields)
        used = {*layer_types, *(mtp.layer_types if mtp else ())}
        return cls(
            architecture=architecture,
            dtype=_resolve_dtype(dtype, fields, torch.device(device)),
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            layer_types=layer_types,
            norm_eps=fields.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
            residual_in_fp32=fields.boolean("residual_in_fp32", default=False),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            eos_token_ids=_eos_token_ids(directory, fields),
            mamba=_mamba(fields),
            attention=_attention(fields),
            mlp=_mlp(fields) if "mlp" in used else None,
            moe=_moe(fields) if "moe" in used else None,
            mtp=mtp,
        )

    def require_mtp(self) -> MtpConfig:
        """The MTP layer, for whoever is about to use it.

        Raises :class:`ModelLoadError` where the checkpoint has none, or one that can't be run.
        """
        if self.mtp is None:
            raise ModelLoadError(
                "the checkpoint has no MTP layers (num_nextn_predict_layers is 0 or missing); "
                "use --drafter ngram"
            )
        if "mamba" in self.mtp.layer_types:
            raise ModelLoadError(
                f"the MTP layers are {', '.join(self.mtp.layer_types)}; a Mamba layer among them is not "
                "supported: its state would have to be kept beside the model's. Use --drafter ngram"
            )
        return self.mtp

    def cache_spec(self, *, mtp: bool = False) -> CacheSpec:
        """What the pools keep for this model; with ``mtp`` for its MTP layer too, whose KV comes last.

        Raises :class:`ModelLoadError` as :meth:`require_mtp`.
        """
        layer_types = self.layer_types + (self.require_mtp().layer_types if mtp else ())
        return CacheSpec(
            attn_layers=layer_types.count("attention"),
            kv_heads=self.attention.num_kv_heads,
            head_dim=self.attention.head_dim,
            kv_dtype=self.dtype,
            mamba_layers=self.layer_types.count("mamba"),
            conv_channels=self.mamba.conv_channels,
            conv_width=self.mamba.conv_width,
            mamba_heads=self.mamba.num_heads,
            mamba_head_dim=self.mamba.head_dim,
            state_size=self.mamba.state_size,
            conv_dtype=self.dtype,
            ssm_dtype=self.mamba.ssm_dtype,
        )


def _architecture(fields: ConfigFields) -> str:
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise fields.error("architectures", names, f"one of the known: {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_unsupported(fields: ConfigFields) -> None:
    """Fields whose other values would change the result; the model computes only these."""
    quantization = fields.raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelLoadError(
            f"{fields.path}: the checkpoint is quantised with {method!r}; only unquantised float32 and "
            "bfloat16 checkpoints are supported. Use the model's BF16 release."
        )
    if (fields.path.parent / "hf_quant_config.json").exists():
        raise ModelLoadError(
            f"{fields.path.parent}: hf_quant_config.json marks a quantised checkpoint; only unquantised "
            "float32 and bfloat16 checkpoints are supported. Use the model's BF16 release."
        )
    fields.require("mlp_hidden_act", "relu2", default="relu2")
    fields.require("mamba_hidden_act", "silu", default="silu")
    fields.require("attention_bias", False, default=False)
    fields.require("sliding_window", None, default=None)
    # The published model takes the projections' bias from use_bias; one that differs is undefined.
    fields.require("mamba_proj_bias", False, fields.boolean("use_bias", default=False), default=False)


def _mamba(fields: ConfigFields) -> MambaConfig:
    num_heads = fields.integer("mamba_num_heads")
    num_groups = fields.integer("n_groups", "mamba_n_groups")
    if num_heads % num_groups:
        raise fields.error("n_groups", num_groups, f"a divisor of mamba_num_heads ({num_heads})")
    ssm_dtype = fields.choice("mamba_ssm_cache_dtype", choices=tuple(_DTYPES), default="float32")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=fields.integer("mamba_head_dim"),
        state_size=fields.integer("ssm_state_size"),
        num_groups=num_groups,
        conv_width=fields.integer("conv_kernel", "mamba_d_conv", minimum=2),
        chunk_size=fields.integer("chunk_size", "mamba_chunk_size", default=128),
        dt_limit=fields.interval("time_step_limit", "mamba_dt_limit", default=(0.0, float("inf"))),
        conv_bias=fields.boolean("use_conv_bias", "mamba_conv_bias", default=True),
        proj_bias=fields.boolean("use_bias", default=False),
        ssm_dtype=_DTYPES[ssm_dtype],
    )


def _attention(fields: ConfigFields) -> AttentionConfig:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})"
        )
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", "attention_head_dim"),
    )


def _mlp(fields: ConfigFields) -> MlpConfig:
    return MlpConfig(fields.integer("intermediate_size"), fields.boolean("mlp_bias", default=False))


def _moe(fields: ConfigFields) -> MoeConfig:
    fields.require("n_shared_experts", 1, default=1)
    num_experts = fields.integer("n_routed_experts", "num_local_experts")
    expert_groups = fields.integer("n_group", default=1)
    if num_experts % expert_groups:
        raise fields.error("n_group", expert_groups, f"a divisor of n_routed_experts ({num_experts})")
    experts_per_group = num_experts // expert_groups
    # A group scores the sum of its two best experts (DeepSeek-V3, section 2.1.2).
    if expert_groups > 1 and experts_per_group < 2:
        raise fields.error(
            "n_group", expert_groups, f"at most {num_experts // 2}: two experts or more a group"
        )
    groups_per_token = fields.integer("topk_group", default=1, maximum=expert_groups)
    latent_size = fields.raw.get("moe_latent_size")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", maximum=groups_per_token * experts_per_group),
        expert_groups=expert_groups,
        groups_per_token=groups_per_token,
        normalize_weights=fields.boolean("norm_topk_prob", default=True),
        scaling_factor=fields.number("routed_scaling_factor", default=1.0),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
        latent_size=None if latent_size is None else fields.integer("moe_latent_size"),
        bias=fields.boolean("mlp_bias", default=False),
    )


def _mtp(fields: ConfigFields) -> MtpConfig | None:
    num_predictions = fields.integer("num_nextn_predict_layers", default=0, minimum=0)
    if num_predictions == 0:
        return None
    return MtpConfig(
        num_predictions, _layer_types(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    )


def _layer_types(fields: ConfigFields, list_name: str, pattern_name: str) -> tuple[LayerType, ...]:
    """Layer types from the newer list of names or the older string of symbols."""
    names = fields.raw.get(list_name)
    if names is not None:
        if not isinstance(names, list) or not names or not all(name in _LAYER_TYPE_OF_NAME for name in names):
            raise fields.error(list_name, names, f"a list of {', '.join(_LAYER_TYPE_OF_NAME)}")
        return tuple(_LAYER_TYPE_OF_NAME[name] for name in names)
    pattern = fields.raw.get(pattern_name)
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_LAYER_TYPE_OF_SYMBOL):
        symbols = ", ".join(f"{symbol!r} ({kind})" for symbol, kind in _LAYER_TYPE_OF_SYMBOL.items())
        raise fields.error(pattern_name, pattern, f"a string of {symbols}, or {list_name} as a list")
    return tuple(_LAYER_TYPE_OF_SYMBOL[symbol] for symbol in pattern)


def _eos_token_ids(directory: Path, fields: ConfigFields) -> tuple[int, ...]:
    """``generation_config.json`` wins: instruct releases add their end-of-turn token only there."""
    generation = directory / "generation_config.json"
    if generation.exists():
        ids = ConfigFields.read(generation).token_ids("eos_token_id")
        if ids:
            return ids
    return fields.token_ids("eos_token_id")


def _resolve_dtype(wanted: str, fields: ConfigFields, device: torch.device) -> torch.dtype:
    if wanted in _DTYPES:
        return _DTYPES[wanted]
    if wanted != "auto":
        raise ConfigError(f"dtype is {wanted!r}; supported are auto, {', '.join(_DTYPES)}")
    on_disk = fields.choice("dtype", "torch_dtype", choices=(*_DTYPES, "float16"), default="float32")
    if device.type == "cpu":
        if on_disk != "float32":
            logger.info("dtype auto: float32 instead of the checkpoint's %s, for CPU kernels", on_disk)
        return torch.float32
    if on_disk not in _DTYPES:
        raise fields.error("dtype", on_disk, f"{' or '.join(_DTYPES)}; choose one with an explicit dtype")
    return _DTYPES[on_disk]
