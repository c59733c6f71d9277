"""Rotary embedding, alone and behind the norms of heads; transformers is the oracle of both."""

import pytest
import torch

from kernels.attention import rotary as module
from kernels.attention import rotary_cpu
from kernels.attention.rotary import (
    HeadNorms,
    Rotary,
    norm_and_rotate,
    norm_and_rotate_reference,
    rotate,
    rotate_reference,
)
from kernels.cpu.graph import CpuGraph

EPS = 1e-6
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
}
POSITIONS = [0, 1, 7, 4095, 131_071, 1_000_003]


def frequencies(rotary_dim, device="cpu", theta=10_000.0):
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return (1.0 / theta**exponents).to(device)


def projected(num_tokens, q_heads, k_heads, head_dim, dtype=torch.float32, device="cpu"):
    """q and k as columns of one projection's output that go on behind them."""
    size = (q_heads + 2 * k_heads) * head_dim
    joined = torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(size))
    joined = joined.to(dtype).to(device)
    q, k, v = torch.split(joined, [q_heads * head_dim, k_heads * head_dim, k_heads * head_dim], dim=1)
    return q.unflatten(1, (q_heads, head_dim)), k.unflatten(1, (k_heads, head_dim)), v


def turn(target, q, k, positions, rotary, norms=None):
    if target.name == "triton":
        module._launch(q, k, norms, positions, rotary)
    elif norms is None:
        rotate(q, k, positions, rotary)
    else:
        norm_and_rotate(q, k, norms, positions, rotary)


def assert_close(actual, expected):
    torch.testing.assert_close(actual.double().cpu(), expected.cpu(), **TOLERANCE[actual.dtype])


SHAPES = [  # q heads, k heads, head_dim, rotary_dim
    (4, 2, 64, 64),
    (6, 1, 80, 80),  # half of a head is no power of two
    (16, 2, 256, 64),
    (3, 3, 12, 6),  # less than a vector
    (5, 5, 96, 48),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("q_heads", "k_heads", "head_dim", "rotary_dim"), SHAPES)
def test_heads_turn_as_the_reference_says_and_nothing_else_changes(
    target, q_heads, k_heads, head_dim, rotary_dim, dtype
):
    q, k, v = projected(len(POSITIONS), q_heads, k_heads, head_dim, dtype, target.device)
    kept = v.clone()
    positions = torch.tensor(POSITIONS, device=target.device)
    rotary = Rotary(frequencies(rotary_dim, target.device), 1.25)
    expected = [rotate_reference(x.double(), positions, rotary) for x in (q, k)]
    turn(target, q, k, positions, rotary)
    assert_close(q, expected[0])
    assert_close(k, expected[1])
    assert torch.equal(v, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "k_heads", "head_dim", "rotary_dim"), SHAPES)
def test_heads_are_normed_before_they_turn(target, q_heads, k_heads, head_dim, rotary_dim, dtype):
    q, k, v = projected(len(POSITIONS), q_heads, k_heads, head_dim, dtype, target.device)
    kept = v.clone()
    positions = torch.tensor(POSITIONS, device=target.device)
    rotary = Rotary(frequencies(rotary_dim, target.device))
    weights = (1 + torch.randn(2, head_dim) / 4).to(dtype).to(target.device)
    norms = HeadNorms(weights[0], weights[1], EPS)
    expected = [
        norm_and_rotate_reference(x.double(), weight.double(), EPS, positions, rotary)
        for x, weight in ((q, weights[0]), (k, weights[1]))
    ]
    turn(target, q, k, positions, rotary, norms)
    assert_close(q, expected[0])
    assert_close(k, expected[1])
    assert torch.equal(v, kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_references_do_as_transformers(dtype):
    bamba = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, _ = projected(6, 4, 2, 32, dtype)
    positions, rotary = torch.tensor(POSITIONS), Rotary(frequencies(16))
    angles = positions.float()[:, None] * rotary.inv_freq
    cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.to(dtype).cos(), angles.to(dtype).sin()))
    expected = bamba.apply_rotary_pos_emb(q, k, cos, sin)
    assert_close(rotate_reference(q, positions, rotary), expected[0].double())
    assert_close(rotate_reference(k, positions, rotary), expected[1].double())
    norm = qwen3_next.Qwen3NextRMSNorm(32, EPS)
    torch.nn.init.normal_(norm.weight)
    weight = 1 + norm.weight.detach()
    x = q.float()
    expected = rotate_reference(norm(x).detach().double(), positions, rotary)
    assert_close(norm_and_rotate_reference(x, weight, EPS, positions, rotary), expected)


def test_angles_are_exact_at_any_position(target):
    positions = torch.cat((torch.arange(2000), torch.randint(0, 2**20, (40,)))).to(target.device)
    if target.name == "triton" and target.device == "cpu":
        positions = positions[-100:]
    q = torch.zeros(len(positions), 1, 64, device=target.device)
    q[:, :, :32] = 1.0  # turns into (cos, sin)
    rotary = Rotary(frequencies(64, target.device))
    turn(target, q, torch.zeros_like(q), positions, rotary)
    angles = (positions.float()[:, None] * rotary.inv_freq).double()
    expected = torch.cat((angles.cos(), angles.sin()), dim=1)
    torch.testing.assert_close(q[:, 0].double(), expected, rtol=0, atol=1.2e-7)


def test_padding_may_have_any_position_and_no_tokens_are_fine(target):
    q, k, _ = projected(3, 2, 1, 16, device=target.device)
    rotary = Rotary(frequencies(16, target.device))
    expected = rotate_reference(q.double(), torch.tensor([5, 0, 6], device=target.device), rotary)
    turn(target, q, k, torch.tensor([5, -(2**31), 6], device=target.device), rotary)
    assert_close(q[::2], expected[::2])
    turn(target, q[:0], k[:0], torch.empty(0, dtype=torch.int64, device=target.device), rotary)


def test_nan_stays_in_its_head(target):
    q, k, _ = projected(2, 2, 1, 16, device=target.device)
    q[1, 0, 3] = torch.nan
    weight = torch.ones(16, device=target.device)
    positions = torch.tensor([3, 4], device=target.device)
    turn(target, q, k, positions, Rotary(frequencies(16, target.device)), HeadNorms(weight, weight, EPS))
    assert q[1, 0].isnan().all()
    assert q[1, 1].isfinite().all()
    assert q[0].isfinite().all()
    assert k.isfinite().all()


def test_float64_goes_to_the_reference():
    q, k, _ = projected(4, 2, 1, 16, torch.float64)
    rotary, positions = Rotary(frequencies(16)), torch.arange(4)
    norms = HeadNorms(torch.ones(16, dtype=torch.float64), torch.ones(16, dtype=torch.float64), EPS)
    expected = rotate_reference(q, positions, rotary)
    again = norm_and_rotate_reference(expected, norms.q_weight, EPS, positions, rotary)
    rotate(q, k, positions, rotary)
    assert torch.equal(q, expected)
    norm_and_rotate(q, k, norms, positions, rotary)
    assert torch.equal(q, again)


@torch.inference_mode()
def test_a_recorded_call_follows_the_positions(monkeypatch):
    monkeypatch.setattr(rotary_cpu, "_GRAIN_ELEMENTS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    q, k, _ = projected(40, 2, 1, 32)
    fresh = q.clone()
    rotary, positions = Rotary(frequencies(32)), torch.zeros(40, dtype=torch.int64)
    graph = CpuGraph()
    with graph.record():
        rotate(q, k, positions, rotary)
    q.copy_(fresh)
    positions.copy_(torch.arange(40))
    graph.replay()
    assert_close(q, rotate_reference(fresh.double(), positions, rotary))
