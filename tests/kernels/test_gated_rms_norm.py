import pytest
import torch

from kernels import gated_rms_norm as module
from kernels.gated_rms_norm import gated_group_rms_norm, gated_group_rms_norm_reference

EPS = 1e-5
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 2e-4},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
}


def gated_norm(target, y, z, weight, group_size):
    if target.name == "triton":
        return module._launch(y, z, weight, group_size, EPS)
    return gated_group_rms_norm(y, z, weight, group_size=group_size, eps=EPS)


def reference(y, z, weight, group_size):
    return gated_group_rms_norm_reference(
        y.double(), z.double(), weight.double(), group_size=group_size, eps=EPS
    )


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
    [(1, 256, 256), (5, 256, 64), (3, 160, 80), (7, 96, 16), (2, 6, 1), (0, 32, 16)],
)
def test_gated_norm_equals_the_reference(target, num_tokens, width, group_size, dtype):
    y, z, weight = operands(num_tokens, width, dtype, target.device)
    out = gated_norm(target, y, z, weight, group_size)
    assert out.dtype == dtype
    assert out.shape == y.shape
    expected = reference(y, z, weight, group_size).cpu()
    torch.testing.assert_close(out.cpu().double(), expected, **TOLERANCE[dtype])


def test_large_gates_open_and_shut(target):
    """silu is z above and 0 below; no overflow on the way."""
    y, _, weight = operands(6, 32, device=target.device)
    z = torch.tensor([-1000.0, -100, -88, 88, 100, 1000], device=target.device)[:, None].expand(6, 32)
    out = gated_norm(target, y, z.contiguous(), weight, 16)
    expected = reference(y, z, weight, 16).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_nan_stays_in_its_group(target):
    y, z, weight = operands(2, 64, device=target.device)
    z[0, 3] = torch.nan
    out = gated_norm(target, y, z, weight, 32)
    assert out[0, :32].isnan().all()
    assert out[0, 32:].isfinite().all()
    assert out[1].isfinite().all()


def test_threads_share_a_large_input(monkeypatch):
    monkeypatch.setattr(module, "_GRAIN_ELEMENTS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    y, z, weight = operands(100, 32)
    out = gated_group_rms_norm(y, z, weight, group_size=16, eps=EPS)
    torch.testing.assert_close(out.double(), reference(y, z, weight, 16), rtol=1e-5, atol=2e-6)
