"""The Gated DeltaNet mixer (arXiv:2412.06464).

    (v, q, k), z, b, a = projections of u
    v, q, k            = silu(causal_conv(v, q, k))
    S_t                = exp(g_t) S_{t-1} (1 - beta_t k'_t k'_t^T) + beta_t v_t k'_t^T
    o_t                = S_t q'_t
    out                = out_proj(rms_norm over heads(o) * silu(z))

u is the layer's input, g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b). k' is k scaled to length 1,
and q' is q scaled to length 1 / sqrt(key channels of a head); see
:mod:`kernels.gated_delta.gated_delta_update`. In decode rows the recurrence is computed position by position,
in prefill rows in chunks. Rows of both kinds read their first state from the caches and store new states
there. Decode rows that *replay* repeat the pending tokens first (:mod:`kernels.replay.kept_inputs`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.mixer_config import GatedDeltaNetConfig
from engine.checkpoint.model_shard import GatedDeltaShard
from engine.checkpoint.weights import Weights, of_inputs, of_outputs
from engine.memory.caches import KeptInputs, LayerCaches
from engine.models.batch import Batch, DecodeRows, PrefillRows, joined
from engine.models.layers.gated_delta_projection import published_conv_rows, take_projections
from engine.models.layers.linear import Linear
from engine.parallel.tensor_parallel import TensorParallel
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.gated_delta.gated_delta_chunk import gated_delta_chunk
from kernels.gated_delta.gated_delta_update import gated_delta_update
from kernels.norms.gated_rms_norm import group_rms_norm_then_gate
from kernels.replay.causal_conv1d_replay import causal_conv1d_flush, causal_conv1d_replay
from kernels.replay.gated_delta_flush import KeptDeltaInputs, gated_delta_flush
from kernels.replay.gated_delta_replay import gated_delta_replay
from kernels.replay.kept_inputs import PendingRows, kept_tensor
from kernels.ssm.causal_conv1d import causal_conv1d, causal_conv1d_update


class GatedDeltaNet:
    """One layer's weights and computation. A tensor-parallel rank has a share of the value heads.

    ``index`` selects this layer's state.
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        hidden_size: int,
        norm_eps: float,
        weights: Weights,
        prefix: str,
        tp: TensorParallel,
        index: int,
    ) -> None:
        shard = GatedDeltaShard.of(config, tp)
        self.index = index
        self.by_chance = StateRounding.stochastic(index, first_head=shard.heads.start)
        self.config = local = shard.local
        self.norm_eps = norm_eps
        self.qkvz_split = [local.conv_channels, local.value_size]
        self.conv_split = [local.value_size, local.key_size, local.key_size]
        self.qkvz_proj, self.ba_proj = take_projections(shard, hidden_size, weights, prefix)
        self.out_proj = Linear.take(
            weights,
            f"{prefix}out_proj",
            hidden_size,
            config.value_size,
            part=of_inputs(*shard.value_rows),
        )
        self.conv_weight = weights.take(
            f"{prefix}conv1d.weight",
            (config.conv_channels, 1, config.conv_width),
            part=of_outputs(*published_conv_rows(shard)),
        ).squeeze(1)
        # The recurrence runs in float32 whatever the model's dtype.
        heads, part = (config.num_value_heads,), of_outputs(*shard.head_rows)
        self.A = -torch.exp(weights.take(f"{prefix}A_log", heads, dtype=torch.float32, part=part))
        self.dt_bias = weights.take(f"{prefix}dt_bias", heads, dtype=torch.float32, part=part)
        norm_weight = weights.take(f"{prefix}norm.weight", (config.value_head_dim,))
        self.norm_weight = norm_weight.repeat(local.num_value_heads)

    def forward(self, u: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """See :class:`engine.models.block.Mixer`."""
        o, z = self._updated(u, batch, caches)
        normed = group_rms_norm_then_gate(
            o, z, self.norm_weight, group_size=self.config.value_head_dim, eps=self.norm_eps
        )
        return self.out_proj(normed)

    def store(self, u: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """See :class:`engine.models.block.StoringMixer`."""
        self._updated(u, batch, caches)

    def _updated(self, u: Tensor, batch: Batch, caches: LayerCaches) -> tuple[Tensor, Tensor]:
        """Return o and z, both ``[n, value_size]``, and store the states."""
        states = caches.conv[self.index], caches.ssm[self.index]
        rounding = self._rounding(caches)
        vqk, z = torch.split(self.qkvz_proj(u), self.qkvz_split, dim=-1)
        ba = self.ba_proj(u)
        split = batch.num_decode_tokens
        outputs = []
        if batch.decode is not None:
            kept = caches.kept[self.index] if caches.kept else None
            outputs.append(self._decode(vqk[:split], ba[:split], batch.decode, *states, kept, rounding))
        if batch.prefill is not None:
            outputs.append(self._prefill(vqk[split:], ba[split:], batch.prefill, *states, rounding))
        return joined(outputs), z

    def _heads(self, vqk: Tensor, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split convolved channels into q, k and v, each ``[*shape, heads, head_dim]`` with its own sizes."""
        config = self.config
        v, q, k = torch.split(vqk, self.conv_split, dim=-1)
        key_heads = config.num_key_heads, config.key_head_dim
        return (
            q.view(*shape, *key_heads),
            k.view(*shape, *key_heads),
            v.view(*shape, config.num_value_heads, config.value_head_dim),
        )

    def _decode(
        self,
        vqk: Tensor,
        ba: Tensor,
        rows: DecodeRows,
        conv_state: Tensor,
        state: Tensor,
        kept: KeptInputs | None,
        rounding: StateRounding,
    ) -> Tensor:
        """Run ``1 + k`` positions of each row. Store the state after each of them, or if rows replay, the
        state before them and their inputs.

        Returns ``[R * T, value_size]`` for R rows of T positions.
        """
        shape = rows.num_rows, rows.num_positions
        filtered = vqk.view(*shape, -1), self.conv_weight, None, conv_state, rows.read_slots
        b, a = ba.view(*shape, -1).chunk(2, dim=-1)
        scanned = a, b, self.A, self.dt_bias, state, rows.read_slots
        if kept is None or rows.pending is None:
            vqk = causal_conv1d_update(*filtered, rows.write_slots)
            heads = self._heads(vqk, *shape)
            o = gated_delta_update(
                *heads, *scanned, rows.write_slots, seq_lens=rows.seq_lens, rounding=rounding
            )
        else:
            assert isinstance(kept.scan, KeptDeltaInputs)
            vqk = causal_conv1d_replay(*filtered, rows.read_slots, kept.conv, rows.pending)
            replayed = rows.read_slots, kept.scan, rows.pending
            o = gated_delta_replay(*self._heads(vqk, *shape), *scanned, *replayed, rounding=rounding)
        return o.view(-1, self.config.value_size)

    def kept_inputs(self, num_rows: int, num_positions: int, caches: LayerCaches) -> KeptInputs:
        """Make room for what ``num_rows`` rows keep, to replay steps of ``num_positions``."""
        config, conv_state = self.config, caches.conv[self.index]
        heads = config.num_key_heads, config.key_head_dim, config.num_value_heads, config.value_head_dim
        sizes, format_ = (num_rows, num_positions), (conv_state.dtype, conv_state.device)
        conv = kept_tensor(*sizes, (config.conv_channels,), *format_)
        return KeptInputs(conv, KeptDeltaInputs.empty(*sizes, heads, *format_))

    def flush(self, slots: Tensor, write_slots: Tensor, pending: PendingRows, caches: LayerCaches) -> None:
        """Advance the states in ``slots`` by pending tokens, and store them in ``write_slots``."""
        kept = caches.kept[self.index]
        assert isinstance(kept.scan, KeptDeltaInputs)
        causal_conv1d_flush(caches.conv[self.index], slots, write_slots, kept.conv, pending)
        gated_delta_flush(
            *(caches.ssm[self.index], slots, write_slots, kept.scan, pending),
            rounding=self._rounding(caches),
        )

    def _rounding(self, caches: LayerCaches) -> StateRounding:
        return self.by_chance if caches.stochastic_rounding else NEAREST

    def _prefill(
        self,
        vqk: Tensor,
        ba: Tensor,
        rows: PrefillRows,
        conv_state: Tensor,
        state: Tensor,
        rounding: StateRounding,
    ) -> Tensor:
        """Run rows of different lengths. Store the state after each row's last token and at boundaries.

        Returns ``[num_tokens, value_size]``.
        """
        index = rows.cu_seqlens, rows.read_slots, rows.write_slots, rows.has_initial
        longest, boundaries = rows.max_query_len, rows.boundaries
        vqk = causal_conv1d(
            vqk, self.conv_weight, None, conv_state, *index, max_seq_len=longest, boundaries=boundaries
        )
        b, a = ba.chunk(2, dim=-1)
        gates = a, b, self.A, self.dt_bias
        o = gated_delta_chunk(
            *(*self._heads(vqk, len(vqk)), *gates, state, *index),
            max_seq_len=longest,
            boundaries=boundaries,
            num_before=rows.num_before,
            rounding=rounding,
        )
        return o.view(-1, self.config.value_size)
