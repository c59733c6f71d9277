"""Operands of the gated delta rule for the kernel tests, in a model's memory layout."""

from __future__ import annotations

import torch

HEADS = [  # key heads, key dim, value heads, value dim
    (2, 32, 4, 16),
    (4, 16, 4, 32),
    (1, 128, 2, 64),
    (2, 64, 6, 24),
    (3, 20, 3, 7),
]


def operands(shape, heads, dtype=torch.float32, device="cpu"):
    """Returns q, k, v, a, b of ``shape`` tokens, A, dt_bias. q, k, v are slices of one wide tensor; b and a
    are slices of another."""
    num_key_heads, key_dim, num_heads, value_dim = heads
    torch.manual_seed(sum(shape))
    sizes = [num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim]
    q, k, v = torch.randn(*shape, sum(sizes)).to(dtype).to(device).split(sizes, dim=-1)
    _, b, a = torch.randn(*shape, 3 * num_heads).to(dtype).to(device).chunk(3, dim=-1)
    A, dt_bias = (torch.randn(num_heads, device=device) for _ in range(2))
    q, k = (t.view(*shape, num_key_heads, key_dim) for t in (q, k))
    return q, k, v.view(*shape, num_heads, value_dim), a, b, -torch.exp(A), dt_bias


def state_shape(heads):
    _, key_dim, num_heads, value_dim = heads
    return num_heads, value_dim, key_dim


def double(tensors):
    return [t.double() for t in tensors]


def transformers_operands(q, k, v, a, b, A, dt_bias):
    """Returns the arguments of transformers' functions for the same tokens, R rows of T: ``[R, T, …]``."""
    heads_per_key_head = v.shape[-2] // k.shape[-2]
    q, k = (t.repeat_interleave(heads_per_key_head, dim=-2) for t in (q, k))
    g = A * torch.nn.functional.softplus(a + dt_bias)
    return q, k, v, g, b.sigmoid()
