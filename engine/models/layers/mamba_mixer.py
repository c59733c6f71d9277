"""The Mamba-2 mixer (arXiv:2405.21060, section 7).

    z, xBC, dt = in_proj(u)
    x, B, C    = silu(causal_conv(xBC))
    h_t        = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T          A = -exp(A_log); dt passes softplus
    y_t        = h_t C_t + D x_t
    out        = out_proj(group_rms_norm(y * silu(z)))        or another order of norm and gate: gated_norm.py

In decode rows the recurrence is computed position by position, in prefill rows in chunks. Rows of both kinds
read their first state from the caches and store new states there. Decode rows that *replay* repeat the
pending tokens first (:mod:`kernels.replay.kept_inputs`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.mixer_config import MambaConfig
from engine.checkpoint.model_shard import MambaShard
from engine.checkpoint.weights import Weights, of_inputs, of_outputs
from engine.memory.caches import KeptInputs, LayerCaches
from engine.models.batch import Batch, DecodeRows, PrefillRows, joined
from engine.models.layers.gated_norm import GatedNorm
from engine.models.layers.linear import Linear
from engine.parallel.tensor_parallel import TensorParallel
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.replay.causal_conv1d_replay import causal_conv1d_flush, causal_conv1d_replay
from kernels.replay.kept_inputs import PendingRows, kept_tensor
from kernels.replay.selective_state_flush import KeptSsmInputs, selective_state_flush
from kernels.replay.selective_state_replay import selective_state_replay
from kernels.ssm.causal_conv1d import causal_conv1d, causal_conv1d_update
from kernels.ssm.selective_state_update import selective_state_update
from kernels.ssm.ssd_chunk_scan import ssd_chunk_scan
from wire.messages.layout import Ranges


class MambaMixer:
    """One layer's weights and computation. A tensor-parallel rank has a share of the heads.

    ``index`` selects this layer's state.
    """

    def __init__(
        self,
        config: MambaConfig,
        hidden_size: int,
        norm_eps: float,
        weights: Weights,
        prefix: str,
        tp: TensorParallel,
        index: int,
    ) -> None:
        shard = MambaShard.of(config, tp)
        self.index = index
        self.by_chance = StateRounding.stochastic(index, first_head=shard.heads.start)
        self.config = shard.local
        self.norm = GatedNorm(config, norm_eps, weights, f"{prefix}norm", tp)
        self.proj_split = [self.config.d_inner, self.config.conv_channels, self.config.num_heads]
        bc_size = self.config.num_groups * config.state_size
        self.conv_split = [self.config.d_inner, bc_size, bc_size]

        def take(
            name: str, shape: tuple[int, ...], ranges: Ranges, dtype: torch.dtype | None = None
        ) -> Tensor:
            return weights.take(prefix + name, shape, dtype=dtype, part=of_outputs(*ranges))

        self.in_proj = Linear.take(
            weights,
            f"{prefix}in_proj",
            config.proj_size,
            hidden_size,
            bias=config.proj_bias,
            part=of_outputs(*shard.proj_rows),
            scale=_proj_scale(self.config, weights.device),
        )
        self.out_proj = Linear.take(
            weights,
            f"{prefix}out_proj",
            hidden_size,
            config.d_inner,
            bias=config.proj_bias and tp.rank == 0,
            part=of_inputs(*shard.inner_rows),
            scale=config.out_scale,
        )
        conv_shape = (config.conv_channels, 1, config.conv_width)
        self.conv_weight = take("conv1d.weight", conv_shape, shard.conv_rows).squeeze(1)
        self.conv_bias = None
        if config.conv_bias:
            self.conv_bias = take("conv1d.bias", (config.conv_channels,), shard.conv_rows)
        # The recurrence runs in float32 whatever the model's dtype.
        heads = (config.num_heads,)
        self.A = -torch.exp(take("A_log", heads, shard.head_rows, torch.float32))
        self.D = take("D", heads, shard.head_rows, torch.float32)
        self.dt_bias = take("dt_bias", heads, shard.head_rows, torch.float32)

    def forward(self, u: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """See :class:`engine.models.block.Mixer`."""
        y, z = self._scanned(u, batch, caches)
        return self.out_proj(self.norm(y, z))

    def store(self, u: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """See :class:`engine.models.block.StoringMixer`."""
        self._scanned(u, batch, caches)

    def _scanned(self, u: Tensor, batch: Batch, caches: LayerCaches) -> tuple[Tensor, Tensor]:
        """Return y and z, both ``[n, d_inner]``, and store the states."""
        states = caches.conv[self.index], caches.ssm[self.index]
        rounding = self._rounding(caches)
        z, xbc, dt = torch.split(self.in_proj(u), self.proj_split, dim=-1)
        split = batch.num_decode_tokens
        outputs = []
        if batch.decode is not None:
            kept = caches.kept[self.index] if caches.kept else None
            outputs.append(self._decode(xbc[:split], dt[:split], batch.decode, *states, kept, rounding))
        if batch.prefill is not None:
            outputs.append(self._prefill(xbc[split:], dt[split:], batch.prefill, *states, rounding))
        return joined(outputs), z

    def _decode(
        self,
        xbc: Tensor,
        dt: Tensor,
        rows: DecodeRows,
        conv_state: Tensor,
        ssm_state: Tensor,
        kept: KeptInputs | None,
        rounding: StateRounding,
    ) -> Tensor:
        """Run ``1 + k`` positions of each row. Store the state after each of them, or if rows replay, the
        state before them and their inputs.

        Returns ``[R * T, d_inner]`` for R rows of T positions.
        """
        config = self.config
        shape = (rows.num_rows, rows.num_positions)
        filtered = xbc.view(*shape, -1), self.conv_weight, self.conv_bias, conv_state, rows.read_slots
        if rows.pending is None or kept is None:
            xbc = causal_conv1d_update(*filtered, rows.write_slots)
        else:
            xbc = causal_conv1d_replay(*filtered, rows.read_slots, kept.conv, rows.pending)
        x, B, C = torch.split(xbc, self.conv_split, dim=-1)
        scanned = (
            x.view(*shape, config.num_heads, config.head_dim),
            dt.view(*shape, -1),
            self.A,
            B.view(*shape, config.num_groups, config.state_size),
            C.view(*shape, config.num_groups, config.state_size),
            self.D,
            self.dt_bias,
            ssm_state,
            rows.read_slots,
        )
        if rows.pending is None or kept is None:
            y = selective_state_update(
                *scanned,
                rows.write_slots,
                dt_limit=config.dt_limit,
                seq_lens=rows.seq_lens,
                rounding=rounding,
            )
        else:
            assert isinstance(kept.scan, KeptSsmInputs)
            replayed = rows.read_slots, kept.scan, rows.pending
            y = selective_state_replay(*scanned, *replayed, dt_limit=config.dt_limit, rounding=rounding)
        return y.view(-1, config.d_inner)

    def kept_inputs(self, num_rows: int, num_positions: int, caches: LayerCaches) -> KeptInputs:
        """Make room for what ``num_rows`` rows keep, to replay steps of ``num_positions``."""
        config, conv_state = self.config, caches.conv[self.index]
        heads = config.num_heads, config.head_dim, config.num_groups, config.state_size
        sizes, format_ = (num_rows, num_positions), (conv_state.dtype, conv_state.device)
        conv = kept_tensor(*sizes, (config.conv_channels,), *format_)
        return KeptInputs(conv, KeptSsmInputs.empty(*sizes, heads, *format_))

    def flush(self, slots: Tensor, write_slots: Tensor, pending: PendingRows, caches: LayerCaches) -> None:
        """Advance the states in ``slots`` by pending tokens, and store them in ``write_slots``."""
        kept = caches.kept[self.index]
        assert isinstance(kept.scan, KeptSsmInputs)
        causal_conv1d_flush(caches.conv[self.index], slots, write_slots, kept.conv, pending)
        selective_state_flush(
            *(caches.ssm[self.index], slots, write_slots, kept.scan, pending),
            rounding=self._rounding(caches),
        )

    def _rounding(self, caches: LayerCaches) -> StateRounding:
        return self.by_chance if caches.stochastic_rounding else NEAREST

    def _prefill(
        self,
        xbc: Tensor,
        dt: Tensor,
        rows: PrefillRows,
        conv_state: Tensor,
        ssm_state: Tensor,
        rounding: StateRounding,
    ) -> Tensor:
        """Run rows of different lengths. Store the state after each row's last token and at boundaries.

        Returns ``[num_tokens, d_inner]``.
        """
        config = self.config
        xbc = causal_conv1d(
            xbc,
            self.conv_weight,
            self.conv_bias,
            conv_state,
            rows.cu_seqlens,
            rows.read_slots,
            rows.write_slots,
            rows.has_initial,
            max_seq_len=rows.max_query_len,
            boundaries=rows.boundaries,
        )
        x, B, C = torch.split(xbc, self.conv_split, dim=-1)
        y = ssd_chunk_scan(
            x.view(-1, config.num_heads, config.head_dim),
            dt,
            self.A,
            B.view(-1, config.num_groups, config.state_size),
            C.view(-1, config.num_groups, config.state_size),
            self.D,
            self.dt_bias,
            ssm_state,
            rows.cu_seqlens,
            rows.read_slots,
            rows.write_slots,
            rows.has_initial,
            chunk_size=config.chunk_size,
            dt_limit=config.dt_limit,
            max_seq_len=rows.max_query_len,
            boundaries=rows.boundaries,
            num_before=rows.num_before,
            rounding=rounding,
        )
        return y.view(-1, config.d_inner)


def _proj_scale(config: MambaConfig, device: torch.device) -> float | Tensor:
    """Return the factor of ``in_proj``'s outputs: one number, or one number per channel ``[proj_size]``."""
    if len(set(config.in_scales)) == 1:
        return config.in_scales[0]
    return torch.tensor(config.in_scales).repeat_interleave(torch.tensor(config.proj_sizes)).to(device)
