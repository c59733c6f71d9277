"""NemotronH for training: plain torch, whole sequences, autograd, quick on CPU.

Module names follow the published checkpoints, so `state_dict()` of `NemotronHForTraining` already has the
published layout (`backbone.layers.0.mixer.in_proj.weight`, `mtp.layers.0.eh_proj.weight`, …).

Shapes: B sequences, T tokens, W hidden width, H Mamba heads of P channels, G groups of state size S,
C chunks of Q tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TrainingConfig:
    """The sizes of a dense NemotronH, named as in its config.json."""

    vocab_size: int
    hidden_size: int = 128
    pattern: str = "M-M*-M*-"
    mtp_pattern: str = "*-"
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    mamba_num_heads: int = 8
    mamba_head_dim: int = 32
    ssm_state_size: int = 32
    n_groups: int = 2
    conv_kernel: int = 4
    chunk_size: int = 64
    layer_norm_epsilon: float = 1e-5
    max_position_embeddings: int = 4096

    @property
    def d_inner(self) -> int:
        """Channels of a Mamba layer, H · P."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that go through the convolution: x, B and C."""
        return self.d_inner + 2 * self.n_groups * self.ssm_state_size


def ssd_chunk_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int) -> Tensor:
    """Mamba-2's scan in chunks (Dao and Gu 2024, listing 1), from a zero state.

        h(t) = exp(dt(t) · a) · h(t-1) + dt(t) · x(t) ⊗ b(t)        y(t) = h(t) · c(t)

    x [B, T, H, P], dt [B, T, H], a [H] (negative), b and c [B, T, G, S] → y [B, T, H, P].
    T has to be a multiple of `chunk_size`.
    """
    num_seqs, num_tokens, num_heads, head_dim = x.shape
    num_groups, state_size = b.shape[2:]
    num_chunks, per_group = num_tokens // chunk_size, num_heads // num_groups
    # Heads come before tokens in all tensors, so that every product below is one batched GEMM.
    x = (x * dt[..., None]).view(num_seqs, num_chunks, chunk_size, num_groups, per_group, head_dim)
    x = x.permute(0, 1, 3, 4, 2, 5)  # [B, C, G, H/G, Q, P]
    b = b.view(num_seqs, num_chunks, chunk_size, num_groups, state_size).transpose(2, 3)  # [B, C, G, Q, S]
    c = c.view(num_seqs, num_chunks, chunk_size, num_groups, state_size).transpose(2, 3)
    log_decay = (dt * a).view(num_seqs, num_chunks, chunk_size, num_groups, per_group).permute(0, 1, 3, 4, 2)
    log_decay = log_decay.cumsum(-1)  # [B, C, G, H/G, Q]

    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    within = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    y = ((c @ b.transpose(-1, -2))[:, :, :, None] * within) @ x  # [B, C, G, H/G, Q, P]

    to_chunk_end = (log_decay[..., -1:] - log_decay).exp()
    states = (x * to_chunk_end[..., None]).transpose(-1, -2) @ b[:, :, :, None]  # [B, C, G, H/G, P, S]
    # What enters chunk i is the sum over earlier chunks j of exp(decay of j + 1 … i - 1) · states j.
    through = log_decay[..., -1].permute(0, 2, 3, 1).cumsum(-1)  # [B, G, H/G, C]
    before_chunk = F.pad(through, (1, -1))
    earlier = torch.ones(num_chunks, num_chunks, dtype=torch.bool, device=x.device).tril(-1)
    across = (before_chunk[..., :, None] - through[..., None, :]).masked_fill(~earlier, -torch.inf).exp()
    before = across @ states.permute(0, 2, 3, 1, 4, 5).flatten(-2)  # [B, G, H/G, C, P · S]
    before = before.unflatten(-1, (head_dim, state_size)).permute(0, 3, 1, 2, 4, 5)
    y = y + (c[:, :, :, None] @ before.transpose(-1, -2)) * log_decay.exp()[..., None]
    return y.permute(0, 1, 4, 2, 3, 5).reshape(num_seqs, num_tokens, num_heads, head_dim)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Depthwise causal convolution as K shifted products; x [B, T, D], weight [D, 1, K], D channels."""
    kernel, num_tokens = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, kernel - 1, 0))
    y = bias + padded[:, :num_tokens] * weight[:, 0, 0]
    for tap in range(1, kernel):
        y = y + padded[:, tap : tap + num_tokens] * weight[:, 0, tap]
    return y


class RMSNorm(nn.Module):
    """Root mean square norm with a weight, over the last axis or over equal groups of it."""

    def __init__(self, width: int, eps: float, num_groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.num_groups = eps, num_groups

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (self.num_groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2) * self.weight


class Mamba(nn.Module):
    """One Mamba-2 mixer."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.mamba_num_heads
        self.in_proj = nn.Linear(config.hidden_size, config.d_inner + config.conv_dim + heads, bias=False)
        self.conv1d = nn.Conv1d(config.conv_dim, config.conv_dim, config.conv_kernel, groups=config.conv_dim)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        dt = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        self.norm = RMSNorm(config.d_inner, config.layer_norm_epsilon, config.n_groups)
        self.out_proj = nn.Linear(config.d_inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        config, lead = self.config, x.shape[:2]
        states = config.n_groups * config.ssm_state_size
        gate, conv_in, dt = self.in_proj(x).split(
            [config.d_inner, config.conv_dim, config.mamba_num_heads], dim=-1
        )
        conv_out = F.silu(causal_conv(conv_in, self.conv1d.weight, self.conv1d.bias))
        values, b, c = conv_out.split([config.d_inner, states, states], dim=-1)
        values = values.view(*lead, config.mamba_num_heads, config.mamba_head_dim)
        b, c = (t.view(*lead, config.n_groups, config.ssm_state_size) for t in (b, c))
        dt = F.softplus(dt + self.dt_bias)
        y = ssd_chunk_scan(values, dt, -self.A_log.exp(), b, c, config.chunk_size)
        y = (y + values * self.D[:, None]).flatten(-2)
        return self.out_proj(self.norm(y * F.silu(gate)))


class Attention(nn.Module):
    """Grouped-query attention without positional encoding."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """relu(x W)² V."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


MIXERS = {"M": Mamba, "*": Attention, "-": Mlp}


class Layer(nn.Module):
    """norm, mixer, residual."""

    def __init__(self, config: TrainingConfig, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MIXERS[kind](config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Backbone(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.pattern)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.embeddings(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


class Mtp(nn.Module):
    """The multi-token prediction layer: from hidden i and token i + 1 to the logits of token i + 2."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.mtp_pattern)
        first, last = self.layers[0], self.layers[-1]
        first.enorm, first.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        first.eh_proj = nn.Linear(2 * width, width, bias=False)
        last.final_layernorm = RMSNorm(width, eps)

    def forward(self, next_embeddings: Tensor, hidden: Tensor) -> Tensor:
        first = self.layers[0]
        x = first.eh_proj(torch.cat([first.enorm(next_embeddings), first.hnorm(hidden)], dim=-1))
        for layer in self.layers:
            x = layer(x)
        return self.layers[-1].final_layernorm(x)


class NemotronHForTraining(nn.Module):
    """The causal language model and its MTP layer."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = Mtp(config)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        """Initialises weights with fan-in scaled normals. Weights that write to the residual are scaled down
        by depth."""
        depth = math.sqrt(len(self.config.pattern))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = 1 / math.sqrt(module.in_features)
                writes_residual = name.rsplit(".", 1)[-1] in ("out_proj", "o_proj", "down_proj")
                nn.init.normal_(module.weight, std=std / depth if writes_residual else std)
        nn.init.normal_(self.backbone.embeddings.weight, std=0.1)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def hidden(self, token_ids: Tensor) -> Tensor:
        """Returns hidden states after the last norm, [B, T] → [B, T, W]. T is padded to whole chunks; this
        changes no result, because everything is causal."""
        num_tokens = token_ids.shape[1]
        padding = -num_tokens % self.config.chunk_size
        return self.backbone(F.pad(token_ids, (0, padding)))[:, :num_tokens]

    def logits(self, token_ids: Tensor) -> Tensor:
        """Returns logits over a vocabulary of V tokens, [B, T] → [B, T, V]."""
        return self.lm_head(self.hidden(token_ids))

    def mtp_logits(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Logits [B, T - 1, V]: entry i predicts token i + 2 from hidden i and token i + 1.

        The gradient of these logits does not reach the target model: the MTP layer learns from the target,
        and the target never adapts to the MTP layer.
        """
        embedded = F.embedding(token_ids[:, 1:], self.backbone.embeddings.weight.detach())
        return F.linear(self.mtp(embedded, hidden[:, :-1].detach()), self.lm_head.weight.detach())
