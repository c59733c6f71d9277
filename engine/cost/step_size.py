"""The parts of a step's bytes and FLOP, from ``config.json``: weights, states, KV, logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.checkpoint.mixer_config import GatedDeltaNetConfig, MambaConfig
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_shard import shard_config, shard_spec
from engine.checkpoint.weight_dtype import item_bytes
from engine.cost.step_cost import share_used
from engine.cost.weight_size import weight_bytes
from engine.parallel.expert_parallel import NO_EXPERT_PARALLEL
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from kernels.gated_delta.gated_delta_chunk import CHUNK_TOKENS


@dataclass(frozen=True)
class StepSize:
    """Bytes and FLOP of one rank. The weights have several fields, since not every step reads all of them."""

    body: int
    """Bytes of all layers without routed experts."""
    experts: int
    """Bytes of this rank's routed experts."""
    head: int
    """Bytes of the output head."""
    used: int
    """Bytes of body and experts that one token uses."""
    num_used: float
    """Weights of body and experts that one token uses."""
    num_head: int
    """Weights of the output head."""
    expert_share: float
    """Share of the routed experts that are used if each server that shares them computes one token."""
    logit_bytes: int
    """Bytes of one position's logits, of all ranks together."""
    slot_bytes: int
    token_bytes: int
    """Bytes of one token's KV."""
    scan_flops: float
    """FLOP of one token in all recurrent layers."""
    pair_flops: int
    """FLOP for one pair of a token and a token that it attends to, in all attention layers."""

    @classmethod
    def of(cls, config: ModelConfig, tp: TensorParallel = ALONE) -> StepSize:
        """Computes bytes and FLOP without MTP layers.

        Experts that several servers share are read for the tokens of all these servers.
        """
        num_servers = max(1, tp.experts.size // tp.size)
        tp = replace(tp, experts=NO_EXPERT_PARALLEL)
        layers, experts, used = _layers(config, tp)
        _, _, used_in_dtype = _layers(replace(config, weight_dtype="float32"), tp)
        spec = shard_spec(config, tp, mtp=False)
        share = config.moe.experts_per_token / config.moe.num_experts if config.moe and experts else 0.0
        return cls(
            body=layers - experts,
            experts=experts // num_servers,
            head=_head_bytes(config, tp),
            used=used,
            num_used=used_in_dtype / config.dtype.itemsize,
            num_head=_head_weights(config, tp),
            expert_share=share_used(share, num_servers),
            logit_bytes=config.vocab_size * config.dtype.itemsize,
            slot_bytes=spec.slot_bytes,
            token_bytes=spec.block_bytes(1),
            scan_flops=_scan_flops(config, tp),
            pair_flops=_pair_flops(config, tp),
        )

    @property
    def token_flops(self) -> float:
        """FLOP of one token in all layers, without the pairs of attention and without the output head."""
        return 2 * self.num_used + self.scan_flops

    @property
    def head_flops(self) -> float:
        """FLOP of one position's logits."""
        return 2 * self.num_head

    def row_state_bytes(self, num_positions: int) -> int:
        """Returns the state bytes of one decode row: it reads one state and writes one for each position."""
        return (1 + num_positions) * self.slot_bytes


def _head_weights(config: ModelConfig, tp: TensorParallel) -> int:
    return -(-config.vocab_size // tp.size) * config.hidden_size


def _head_bytes(config: ModelConfig, tp: TensorParallel) -> int:
    return _head_weights(config, tp) * item_bytes(config.weight_dtype, config.dtype)


def _layers(config: ModelConfig, tp: TensorParallel) -> tuple[int, int, int]:
    """Returns the bytes of all layers, of their routed experts, and of what one token uses of them."""
    outside = config.vocab_size * config.hidden_size * config.dtype.itemsize  # steps read few of these rows
    if not config.tie_word_embeddings:
        outside += _head_bytes(config, tp)
    layers = weight_bytes(config, tp) - outside
    return layers, *_experts(config, tp, layers, outside)


def _experts(config: ModelConfig, tp: TensorParallel, layers: int, outside: int) -> tuple[int, int]:
    """Returns the bytes of all routed experts, and the bytes of ``layers`` that one token uses."""
    if config.moe is None:
        return 0, layers
    used_alone = replace(config.moe, num_experts=config.moe.experts_per_token)
    used = weight_bytes(replace(config, moe=used_alone), tp) - outside
    num_unused = config.moe.num_experts - config.moe.experts_per_token
    if num_unused == 0:
        return 0, layers
    return (layers - used) * config.moe.num_experts // num_unused, used


def _pair_flops(config: ModelConfig, tp: TensorParallel) -> int:
    """Returns the FLOP for one pair of a token and a token that it attends to, in all attention layers."""
    if config.attention is None:
        return 0
    heads = len(tp.share(config.attention.num_heads))
    return 4 * heads * config.attention.head_dim * config.layer_types.count("attention")


def _scan_flops(config: ModelConfig, tp: TensorParallel) -> float:
    """Returns the FLOP of one token in all recurrent layers."""
    share = shard_config(config, tp)
    flops = 0
    if share.mamba is not None:
        flops += _mamba_flops(share.mamba) * config.layer_types.count("mamba")
    if share.gated_delta is not None:
        flops += _gated_delta_flops(share.gated_delta) * config.layer_types.count("gated_delta")
    return float(flops)


def _mamba_flops(mamba: MambaConfig) -> int:
    """Returns the FLOP of a token in one layer: C B^T and its product with x within the chunk, then the
    states being made and read (Dao and Gu, "Transformers are SSMs", 2024, section 6)."""
    within = 2 * mamba.chunk_size * (mamba.num_groups * mamba.state_size + mamba.d_inner)
    return within + 4 * mamba.d_inner * mamba.state_size


def _gated_delta_flops(delta: GatedDeltaNetConfig) -> int:
    """Returns the FLOP of a token in one layer: K K^T, Q K^T and their products with values within the chunk,
    then the states being made, and read twice, by keys and by queries (Yang, Kautz and Hatamizadeh, "Gated
    Delta Networks", 2024, section 3)."""
    within = 4 * CHUNK_TOKENS * (delta.num_value_heads * delta.key_head_dim + delta.value_size)
    return within + 6 * delta.value_size * delta.key_head_dim
