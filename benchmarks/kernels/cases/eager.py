"""The ops in plain torch, as torch's documentation would write them; operands as :mod:`kernels` takes
them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def state_update(x, dt, A, B, C, D, dt_bias, pool, read_slots, write_slots) -> Tensor:
    """:func:`kernels.ssm.selective_state_update.selective_state_update`"""
    heads_per_group = x.shape[2] // B.shape[2]
    h, y = pool[read_slots], []
    for i in range(x.shape[1]):
        step = F.softplus(dt[:, i] + dt_bias)
        B_i, C_i = (t[:, i].repeat_interleave(heads_per_group, dim=1) for t in (B, C))
        h = (
            h * torch.exp(step * A)[..., None, None]
            + (step[..., None] * x[:, i])[..., None] * B_i[:, :, None]
        )
        pool[write_slots[:, i]] = h
        y.append((h @ C_i[..., None]).squeeze(-1) + D[:, None] * x[:, i])
    return torch.stack(y, dim=1)


def chunk_scan(x, dt, A, B, C, D, dt_bias, pool, chunk=64) -> Tensor:
    """:func:`kernels.ssm.ssd_chunk_scan.ssd_chunk_scan` of one prompt into slot 1, as GEMMs over whole
    chunks."""
    group = torch.arange(x.shape[1], device=x.device) // (x.shape[1] // B.shape[1])
    step = F.softplus(dt + dt_bias).T.contiguous()
    log_decay, x_heads = step * A[:, None], x.transpose(0, 1)
    B_groups, C_groups = B.transpose(0, 1), C.transpose(0, 1)
    h, y = torch.zeros_like(pool[1]), []
    for t in range(0, len(x), chunk):
        B_t, C_t, x_t = B_groups[:, t : t + chunk], C_groups[:, t : t + chunk], x_heads[:, t : t + chunk]
        step_t, cumulated = step[:, t : t + chunk], log_decay[:, t : t + chunk].cumsum(dim=1)
        decay = (cumulated[:, :, None] - cumulated[:, None, :]).tril().exp().tril()
        scores = decay * step_t[:, None] * (C_t @ B_t.transpose(1, 2))[group]
        before = C_t[group] @ h.transpose(1, 2)
        y.append(torch.baddbmm(before * cumulated.exp()[:, :, None], scores, x_t))
        weighted = x_t * (step_t * (cumulated[:, -1:] - cumulated).exp())[:, :, None]
        h = h * cumulated[:, -1].exp()[:, None, None] + weighted.transpose(1, 2) @ B_t[group]
    pool[1] = h
    return torch.cat(y, dim=1).transpose(0, 1) + D[:, None] * x


def delta_update(q, k, v, a, b, A, dt_bias, pool, read_slots, write_slots) -> Tensor:
    """:func:`kernels.gated_delta.gated_delta_update.gated_delta_update`"""
    q, k = _unit_heads(q, k, v.shape[2])
    decay, beta = torch.exp(A * F.softplus(a + dt_bias))[..., None, None], torch.sigmoid(b)[..., None]
    S, o = pool[read_slots], []
    for i in range(v.shape[1]):
        S = S * decay[:, i]
        error = beta[:, i] * (v[:, i] - (S @ k[:, i, :, :, None]).squeeze(-1))
        S = S + error[..., None] * k[:, i, :, None]
        pool[write_slots[:, i]] = S
        o.append((S @ q[:, i, :, :, None]).squeeze(-1))
    return torch.stack(o, dim=1)


def delta_chunk(q, k, v, a, b, A, dt_bias, pool, chunk=64) -> Tensor:
    """:func:`kernels.gated_delta.gated_delta_chunk.gated_delta_chunk` of one prompt into slot 1, as GEMMs
    over chunks."""
    q, k = (t.transpose(0, 1) for t in _unit_heads(q, k, v.shape[1]))
    v, beta = v.transpose(0, 1), torch.sigmoid(b).T[..., None]
    log_decay = (A * F.softplus(a + dt_bias)).T
    S, o = torch.zeros_like(pool[1]), []
    for t in range(0, v.shape[1], chunk):
        q_t, k_t, v_t, beta_t = (x[:, t : t + chunk] for x in (q, k, v, beta))
        cumulated = log_decay[:, t : t + chunk].cumsum(dim=1)
        decay = (cumulated[:, :, None] - cumulated[:, None, :]).tril().exp().tril()
        before = cumulated.exp()[..., None]
        error = beta_t * (v_t - before * (k_t @ S.mT))
        system = beta_t * (k_t @ k_t.mT) * decay
        U = torch.linalg.solve_triangular(system, error, upper=False, unitriangular=True)
        o.append(before * (q_t @ S.mT) + (q_t @ k_t.mT * decay) @ U)
        weighted = k_t * (cumulated[:, -1:] - cumulated).exp()[..., None]
        S = S * cumulated[:, -1, None, None].exp() + U.mT @ weighted
    pool[1] = S
    return torch.cat(o, dim=1).transpose(0, 1)


def _unit_heads(q, k, num_heads) -> tuple[Tensor, Tensor]:
    """Returns q and k normalised to length one, q then scaled by its heads' size, both repeated for each
    value head."""
    q, k = (t * torch.rsqrt(t.square().sum(dim=-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(num_heads // t.shape[-2], dim=-2) for t in (q * q.shape[-1] ** -0.5, k))
    return q, k


def norm_then_gate(y, z, head_weight, eps) -> Tensor:
    heads = y.unflatten(-1, (-1, len(head_weight)))
    return F.rms_norm(heads, head_weight.shape, head_weight, eps).flatten(-2) * F.silu(z)


def conv_update(x, weight, bias, pool, read_slots, write_slots) -> Tensor:
    """:func:`kernels.ssm.causal_conv1d.causal_conv1d_update`"""
    num_taps, y = weight.shape[1], []
    window = torch.cat([pool[read_slots], x.transpose(1, 2)], dim=2)
    for i in range(x.shape[1]):
        y.append(F.silu((window[:, :, i : i + num_taps] * weight).sum(dim=2) + bias))
        pool[write_slots[:, i]] = window[:, :, i + 1 : i + num_taps]
    return torch.stack(y, dim=1)


def conv(x, weight, bias, pool) -> Tensor:
    """:func:`kernels.ssm.causal_conv1d.causal_conv1d` of one prompt into slot 1."""
    num_past = weight.shape[1] - 1
    inputs = F.pad(x.T, (num_past, 0))
    pool[1] = inputs[:, -num_past:]
    return F.silu(F.conv1d(inputs[None], weight[:, None], bias, groups=len(weight)))[0].T.contiguous()


def store_kv(k, v, k_cache, v_cache, places) -> None:
    """:func:`kernels.attention.kv_cache.store_kv`"""
    block_size = k_cache.shape[2]
    k_cache[places // block_size, :, places % block_size] = k
    v_cache[places // block_size, :, places % block_size] = v


def add_rms_norm(x, residual, weight, eps) -> tuple[Tensor, Tensor]:
    total = residual + x
    return F.rms_norm(total, weight.shape, weight, eps), total


def gated_rms_norm(y, z, weight, group_size, eps) -> Tensor:
    gated = (y * F.silu(z)).unflatten(-1, (-1, group_size))
    return F.rms_norm(gated, (group_size,), None, eps).flatten(-2) * weight


def experts(x, up, down, expert_ids, expert_weights) -> Tensor:
    """Computes the experts that have tokens one after the other; up ``[E, I, H]``, down ``[E, H, I]``."""
    out = torch.zeros_like(x)
    for expert in expert_ids.unique().tolist():
        token, place = torch.where(expert_ids == expert)
        hidden = F.relu(F.linear(x[token], up[expert])).square()
        result = F.linear(hidden, down[expert]) * expert_weights[token, place, None]
        out.index_add_(0, token, result.to(out.dtype))
    return out


def sample(logits, temperature, top_k, top_p) -> Tensor:
    """Top-k and top-p by one sort, then ``torch.multinomial``; ``logits`` ``[R, V]``, parameters ``[R]``."""
    probs, token_ids = torch.softmax(logits / temperature[:, None], dim=-1).sort(dim=-1, descending=True)
    places = torch.arange(probs.shape[1], device=probs.device)
    probs = probs.masked_fill(places >= top_k[:, None], 0.0)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before > top_p[:, None] * probs.sum(dim=-1, keepdim=True), 0.0)
    return token_ids.gather(1, torch.multinomial(probs, 1))[:, 0]


def sample_any(logits, temperature) -> Tensor:
    """Every token may be drawn."""
    return torch.multinomial(torch.softmax(logits / temperature[:, None], dim=-1), 1)[:, 0]
