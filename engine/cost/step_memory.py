"""GPU memory that steps take beside weights and pools, computed from ``config.json``.

| part | bytes |
|---|---|
| tables | penalties, grammar masks and n-gram history of all rows |
| logits | float32 logits that all graphs share |
| graphs | the most that one graph's step has at a time; all graphs share one pool of this size |
| eager | the same for steps that are not graphs, such as those of prompts |
| libraries | workspaces of cuBLAS and NCCL, kernels, nodes of graphs |

A step has activations first, and then logits with what sampling makes of them. Both are upper bounds:
tests compare them with what steps on the simulated GPU hold. In shapes, ``N`` is the maximum number of
requests, ``T`` the number of positions in a row, ``V`` the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_shard import shard_config
from engine.parallel.tensor_parallel import TensorParallel
from engine.schedule.capacity import Demand
from kernels.gated_delta.gated_delta_chunk import CHUNK_TOKENS
from kernels.sampling.token_mask import num_words
from wire.messages.handoff import Role

SAMPLING_BYTES = 33
"""Bytes that sampling holds at a time for each logit: processed logits, counts of tokens and penalties.
Filters and draws hold nothing."""
PROMPT_SIZES = (*range(64, 513, 64), 640, 768, 896, 1024)
"""Tokens of a prompt's steps that are captured as graphs. Longer ones keep a GPU busy while Python launches
their kernels."""
LIBRARIES_BYTES = 512 << 20
"""Assumed; nothing has measured it yet."""
GPU_CACHE_FRACTION = 0.85
"""The pools' greatest share of the GPU memory that is free once the weights are loaded. Steps get the rest,
and more if they need more."""
_TOKEN_TABLE_BYTES = 9
"""A token's count (int32), bias (float32) and whether the prompt has it (bool)."""
_FLOAT = 4


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank."""

    tables: int
    logits: int
    graphs: int
    eager: int

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        demand: Demand,
        tp: TensorParallel,
        *,
        max_batch_tokens: int,
        prompt_graphs: Sequence[int] = (),
    ) -> StepMemory:
        """Returns the memory of a server's steps, each of at most ``max_batch_tokens`` tokens, and of its
        ``prompt_graphs``."""
        token_bytes = activation_bytes(model, tp)
        longest = max(prompt_graphs, default=0)
        if demand.role == "prefill":
            prompts = token_bytes * longest
            return cls(tables=0, logits=0, graphs=prompts, eager=token_bytes * max_batch_tokens)
        vocab_size, num_positions = model.vocab_size, 1 + demand.num_speculative
        num_tokens = demand.max_num_seqs * num_positions
        logits = num_tokens * vocab_size * _FLOAT
        sampling = num_tokens * vocab_size * SAMPLING_BYTES
        history = 0 if num_positions == 1 else 8 * demand.max_model_len
        row = vocab_size * _TOKEN_TABLE_BYTES + num_positions * num_words(vocab_size) * 4 + history
        return cls(
            tables=(demand.max_num_seqs + 1) * row,
            logits=logits,
            graphs=max(token_bytes * max(num_tokens, longest), sampling),
            eager=max(token_bytes * max_batch_tokens, logits + sampling),
        )

    @property
    def total(self) -> int:
        return self.tables + self.logits + self.graphs + self.eager + LIBRARIES_BYTES


class PromptSettings(Protocol):
    """The settings that decide, of :class:`engine.config.EngineConfig`."""

    @property
    def role(self) -> Role: ...
    @property
    def max_batch_tokens(self) -> int: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def is_lockstep(self) -> bool: ...
    @property
    def sanitize(self) -> bool: ...


def captured_prompts(settings: PromptSettings) -> list[int]:
    """Returns the numbers of tokens for which a server captures a prompt's step, in ascending order.

    Ranks exchange tokens in every step, and the sanitizer looks at each: such steps are not captured.
    """
    has_ranks = settings.tensor_parallel > 1 or settings.is_lockstep
    if settings.role == "decode" or has_ranks or settings.sanitize:
        return []
    return [size for size in PROMPT_SIZES if size <= settings.max_batch_tokens]


def activation_bytes(model: ModelConfig, tp: TensorParallel) -> int:
    """Returns the most bytes of activations for each token that a forward pass holds at a time."""
    share, itemsize, hidden = shard_config(model, tp), model.dtype.itemsize, model.hidden_size
    widths = [0]
    if (mamba := share.mamba) is not None:
        states = mamba.num_heads * mamba.head_dim * mamba.state_size * _FLOAT // mamba.chunk_size
        widths.append(itemsize * (mamba.proj_size + mamba.conv_channels + 2 * mamba.d_inner) + states)
    if (delta := share.gated_delta) is not None:
        states = delta.value_size * delta.key_head_dim * _FLOAT // CHUNK_TOKENS
        widths.append(itemsize * (3 * delta.conv_channels + 4 * delta.value_size) + states)
    if (attention := share.attention) is not None:
        heads = 3 * attention.num_heads + 2 * attention.num_kv_heads
        widths.append(itemsize * heads * attention.head_dim)
    if (mlp := share.mlp) is not None:
        widths.append(itemsize * (3 if mlp.is_gated else 2) * mlp.intermediate_size)
    if (moe := share.moe) is not None:
        size, inner = moe.latent_size or hidden, moe.intermediate_size
        # Inputs, with gates, values and their products, or with activated channels and outputs.
        routed = size + max(3 * inner if moe.activation == "silu_gated" else 0, inner + size)
        # An upper bound: shared experts that are no further experts are computed behind the others.
        taken = moe.experts_per_token + moe.shared_intermediate_size // moe.intermediate_size
        widths.append(itemsize * (taken * routed + hidden) + _FLOAT * moe.num_experts)
    residual = _FLOAT if model.residual_in_fp32 else itemsize
    return max(widths) + 2 * hidden * (itemsize + residual)


def gpu_cache_bytes(free_bytes: int, step_bytes: int) -> int:
    """Returns the pools' part of the GPU memory that is free once the weights are loaded."""
    return max(0, min(int(free_bytes * GPU_CACHE_FRACTION), free_bytes - step_bytes))
