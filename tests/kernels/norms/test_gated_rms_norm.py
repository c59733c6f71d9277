import pytest
import torch

from kernels.norms import gated_rms_norm as module
from kernels.norms.gated_rms_norm import (
    gated_group_rms_norm,
    gated_group_rms_norm_reference,
    group_rms_norm_then_gate,
    group_rms_norm_then_gate_reference,
)
from testing.kernels.target import Target

EPS = 1e-5
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 2e-4},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
}


@pytest.fixture(params=["gate first", "norm first"])
def order(request):
    return request.param


def gated_norm(target, order, y, z, weight, group_size):
    if target.name == "triton":
        return module._launch(y, z, weight, group_size, EPS, gate_first=order == "gate first")
    op = gated_group_rms_norm if order == "gate first" else group_rms_norm_then_gate
    return op(y, z, weight, group_size=group_size, eps=EPS)


def reference(order, y, z, weight, group_size):
    gate_first = order == "gate first"
    op = gated_group_rms_norm_reference if gate_first else group_rms_norm_then_gate_reference
    return op(y.double(), z.double(), weight.double(), group_size=group_size, eps=EPS)


def operands(num_tokens, width, dtype=torch.float32, device="cpu"):
    """y, z as columns of a wider projection, weight."""
    y, projection, weight = (
        torch.randn(num_tokens, width),
        torch.randn(num_tokens, 3 * width),
        torch.randn(width),
    )
    y, projection, weight = (t.to(dtype).to(device) for t in (y, 4 * projection, weight))
    return y, projection[:, width : 2 * width], weight


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_tokens", "width", "group_size"),
    [(1, 256, 256), (5, 256, 64), (3, 160, 80), (7, 96, 16), (2, 1280, 20), (2, 6, 1), (0, 32, 16)],
)
def test_gated_norm_equals_the_reference(target, order, num_tokens, width, group_size, dtype):
    y, z, weight = operands(num_tokens, width, dtype, target.device)
    out = gated_norm(target, order, y, z, weight, group_size)
    assert out.dtype == dtype
    assert out.shape == y.shape
    expected = reference(order, y, z, weight, group_size).cpu()
    torch.testing.assert_close(out.cpu().double(), expected, **TOLERANCE[dtype])


def test_large_gates_open_and_shut(target, order):
    """silu is z above and 0 below; no overflow on the way."""
    y, _, weight = operands(6, 32, device=target.device)
    z = torch.tensor([-1000.0, -100, -88, 88, 100, 1000], device=target.device)[:, None].expand(6, 32)
    out = gated_norm(target, order, y, z.contiguous(), weight, 16)
    expected = reference(order, y, z, weight, 16).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_nan_stays_in_its_group(target, order):
    y, z, weight = operands(2, 64, device=target.device)
    y[0, 3] = torch.nan
    out = gated_norm(target, order, y, z, weight, 32)
    assert out[0, :32].isnan().all()
    assert out[0, 32:].isfinite().all()
    assert out[1].isfinite().all()


def test_threads_share_a_large_input(order, monkeypatch):
    monkeypatch.setattr(module, "_GRAIN_ELEMENTS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    y, z, weight = operands(100, 32)
    out = gated_norm(Target("cpu", "cpu"), order, y, z, weight, 16)
    torch.testing.assert_close(out.double(), reference(order, y, z, weight, 16), rtol=1e-5, atol=2e-6)


@torch.inference_mode()
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_the_norm_agrees_with_transformers(norm_before_gate):
    falcon_h1 = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1")
    y, z, weight = operands(3, 96)
    norm = falcon_h1.FalconH1RMSNormGated(96, EPS, n_groups=4, norm_before_gate=norm_before_gate)
    norm.weight.copy_(weight)
    order = "norm first" if norm_before_gate else "gate first"
    out = gated_norm(Target("cpu", "cpu"), order, y, z, weight, 24)
    torch.testing.assert_close(out, norm(y, z), rtol=1e-5, atol=2e-6)


@torch.inference_mode()
def test_the_norm_over_heads_agrees_with_transformers():
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    y, z, weight = operands(3, 4 * 24)
    norm = qwen3_next.Qwen3NextRMSNormGated(24, EPS)
    norm.weight.copy_(weight[:24])
    expected = norm(y.view(-1, 24), z.reshape(-1, 24)).view(3, -1)
    out = group_rms_norm_then_gate(y, z, weight[:24].repeat(4), group_size=24, eps=EPS)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
