"""The part of each layer that one tensor-parallel rank holds.

Each weight is divided as the table says. If there are fewer KV heads, groups or key heads than ranks, several
ranks hold copies of the same one.

| weight | divided by | output |
|---|---|---|
| q, k, v | heads and KV heads | complete heads |
| Mamba in_proj, conv, A, D, dt_bias, norm | heads and groups | complete heads |
| Gated DeltaNet projections, conv, A, dt_bias | value heads and key heads | complete heads |
| up | intermediate channels, also of each expert | complete channels |
| o, out_proj, down | inputs: those that the rank has computed | summands of the hidden state |
| output head | vocabulary | complete logits |

With expert parallelism (:mod:`engine.parallel.expert_parallel`) experts are not divided: each expert is whole
on one rank. Embedding, norms, expert router, latent projections and the MTP layer's ``eh_proj`` are whole on
every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.checkpoint.mixer_config import GatedDeltaNetConfig, MambaConfig
from engine.checkpoint.model_config import ModelConfig
from engine.memory.caches import CacheSpec
from engine.parallel.tensor_parallel import TensorParallel
from wire.errors import ConfigError
from wire.messages.layout import Ranges


@dataclass(frozen=True)
class MambaShard:
    """One rank's heads and groups of a Mamba mixer, as ranges of the whole layer's tensors."""

    config: MambaConfig
    """Configuration of the whole layer."""
    heads: range
    groups: range

    @classmethod
    def of(cls, config: MambaConfig, tp: TensorParallel) -> MambaShard:
        return cls(config, tp.share(config.num_heads), tp.share_or_copy(config.num_groups))

    @property
    def local(self) -> MambaConfig:
        """Configuration with the sizes of the share."""
        return replace(self.config, num_heads=len(self.heads), num_groups=len(self.groups))

    @property
    def head_rows(self) -> Ranges:
        """Rows of A, D, dt_bias and the SSM state."""
        return ((self.heads.start, self.heads.stop),)

    @property
    def inner_rows(self) -> Ranges:
        """Channels of x, the gate and the norm."""
        size = self.config.head_dim
        return ((self.heads.start * size, self.heads.stop * size),)

    @property
    def conv_rows(self) -> Ranges:
        """Channels of (x, B, C) and of the convolution's state: three ranges."""
        config = self.config
        first_b = config.d_inner
        first_c = first_b + config.num_groups * config.state_size
        start, stop = self.groups.start * config.state_size, self.groups.stop * config.state_size
        return (*self.inner_rows, (first_b + start, first_b + stop), (first_c + start, first_c + stop))

    @property
    def proj_rows(self) -> Ranges:
        """Rows of in_proj: gate, (x, B, C), dt."""
        config = self.config
        first_dt = config.d_inner + config.conv_channels
        return (
            *self.inner_rows,
            *((config.d_inner + start, config.d_inner + stop) for start, stop in self.conv_rows),
            (first_dt + self.heads.start, first_dt + self.heads.stop),
        )


@dataclass(frozen=True)
class GatedDeltaShard:
    """One rank's value heads of a Gated DeltaNet, and the key heads that they use."""

    config: GatedDeltaNetConfig
    """Configuration of the whole layer."""
    heads: range
    key_heads: range

    @classmethod
    def of(cls, config: GatedDeltaNetConfig, tp: TensorParallel) -> GatedDeltaShard:
        return cls(config, tp.share(config.num_value_heads), tp.share_or_copy(config.num_key_heads))

    @property
    def local(self) -> GatedDeltaNetConfig:
        """Configuration with the sizes of the share."""
        return replace(self.config, num_value_heads=len(self.heads), num_key_heads=len(self.key_heads))

    @property
    def head_rows(self) -> Ranges:
        """Rows of A, dt_bias and the state."""
        return ((self.heads.start, self.heads.stop),)

    @property
    def value_rows(self) -> Ranges:
        """Channels of v, the gate and the output."""
        size = self.config.value_head_dim
        return ((self.heads.start * size, self.heads.stop * size),)

    @property
    def conv_rows(self) -> Ranges:
        """Channels of (v, q, k) and of the convolution's state: three ranges.

        q and k, of which several ranks may hold copies, come last.
        """
        config = self.config
        start, stop = (edge * config.key_head_dim for edge in (self.key_heads.start, self.key_heads.stop))
        first_q, first_k = config.value_size, config.value_size + config.key_size
        return (*self.value_rows, (first_q + start, first_q + stop), (first_k + start, first_k + stop))


def check_divides(config: ModelConfig, size: int, *, shares_experts: bool = False) -> None:
    """Check that ``size`` ranks can share the model.

    With ``shares_experts`` each expert is whole on one rank.

    Raises :class:`ConfigError` that names the size that the ranks can't share.
    """
    attention, mamba, mlp, moe = config.attention, config.mamba, config.mlp, config.moe
    divided, copied = [], []
    if mamba is not None:
        divided.append(("mamba_num_heads", mamba.num_heads))
        copied.append(("n_groups", mamba.num_groups))
    if (delta := config.gated_delta) is not None:
        divided.append(("linear_num_value_heads", delta.num_value_heads))
        copied.append(("linear_num_key_heads", delta.num_key_heads))
    if attention is not None:
        divided.append(("num_attention_heads", attention.num_heads))
        copied.append(("num_key_value_heads", attention.num_kv_heads))
    if mlp is not None:
        divided.append(("intermediate_size", mlp.intermediate_size))
    if moe is not None:
        if not shares_experts:
            divided.append(("moe_intermediate_size", moe.intermediate_size))
        divided.append(("moe_shared_expert_intermediate_size", moe.shared_intermediate_size))
    for name, count in divided:
        if count % size:
            raise ConfigError(
                f"`tensor_parallel` {size} does not divide the checkpoint's {name} of {count}: "
                "choose a divisor"
            )
    for name, count in copied:
        if count % size and size % count:
            raise ConfigError(
                f"`tensor_parallel` {size} and the checkpoint's {name} of {count}: one must divide the other"
            )


def shard_config(config: ModelConfig, tp: TensorParallel) -> ModelConfig:
    """Return the configuration with the sizes of one rank's share. Undivided parts keep their size."""
    attention, mamba, mlp, moe = config.attention, config.mamba, config.mlp, config.moe
    return replace(
        config,
        attention=attention
        and replace(
            attention,
            num_heads=len(tp.share(attention.num_heads)),
            num_kv_heads=len(tp.share_or_copy(attention.num_kv_heads)),
        ),
        mamba=mamba and MambaShard.of(mamba, tp).local,
        gated_delta=config.gated_delta and GatedDeltaShard.of(config.gated_delta, tp).local,
        mlp=mlp and replace(mlp, intermediate_size=len(tp.share(mlp.intermediate_size))),
        moe=moe
        and replace(
            moe,
            intermediate_size=moe.intermediate_size
            if tp.experts.size > 1
            else len(tp.share(moe.intermediate_size)),
            shared_intermediate_size=len(tp.share(moe.shared_intermediate_size)),
        ),
    )


def shard_spec(config: ModelConfig, tp: TensorParallel, *, mtp: bool) -> CacheSpec:
    """Return what one rank's pools keep, with the rank's ranges of the model's heads and channels.

    Raises :class:`ModelLoadError` as :meth:`ModelConfig.require_mtp` does.
    """
    spec = shard_config(config, tp).cache_spec(mtp=mtp)
    if tp.size == 1:
        return spec
    if (attention := config.attention) is not None:
        kv_heads = tp.share_or_copy(attention.num_kv_heads)
        spec = replace(
            spec,
            held_kv_heads=((kv_heads.start, kv_heads.stop),),
            copies_kv_heads=tp.copies(attention.num_kv_heads),
        )
    if config.mamba is not None:
        mamba = MambaShard.of(config.mamba, tp)
        spec = replace(
            spec,
            held_conv_channels=mamba.conv_rows,
            held_mamba_heads=mamba.head_rows,
            copies_groups=tp.copies(config.mamba.num_groups),
        )
    if config.gated_delta is not None:
        delta = GatedDeltaShard.of(config.gated_delta, tp)
        spec = replace(
            spec,
            held_conv_channels=delta.conv_rows,
            held_mamba_heads=delta.head_rows,
            copies_groups=tp.copies(config.gated_delta.num_key_heads),
        )
    return spec
