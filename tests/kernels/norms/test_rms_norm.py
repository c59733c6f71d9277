import pytest
import torch

from kernels.norms import rms_norm as module
from kernels.norms.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

EPS = 1e-5
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 1e-4},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
}
SHAPES = [(1, 256), (3, 80), (2, 5, 64), (1, 1), (700, 48), (0, 32)]


def norm(target, x, weight):
    return module._launch(x, None, weight, EPS)[0] if target.name == "triton" else rms_norm(x, weight, EPS)


def add_norm(target, x, residual, weight, scale=1.0):
    operands = (x, residual, weight, EPS)
    if target.name == "triton":
        return module._launch(*operands, scale)
    return add_rms_norm(*operands, scale=scale)


def assert_close(actual, expected):
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), **TOLERANCE[actual.dtype])


def random(shape, dtype, device):
    return (3 * torch.randn(shape)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_equals_the_reference(target, shape, dtype):
    shape = (min(shape[0], 40), *shape[1:]) if target.device == "cpu" and target.name == "triton" else shape
    x, weight = random(shape, dtype, target.device), random(shape[-1:], dtype, target.device)
    y = norm(target, x, weight)
    assert y.dtype == dtype
    assert y.shape == shape
    assert_close(y, rms_norm_reference(x.double(), weight.double(), EPS))


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("shape", [(4, 96), (2, 3, 65), (0, 32)])
def test_sum_and_its_norm_equal_the_reference(target, shape, dtype, residual_dtype, scale):
    x, residual = random(shape, dtype, target.device), random(shape, residual_dtype, target.device)
    weight = random(shape[-1:], dtype, target.device)
    kept = x.clone(), residual.clone()
    y, total = add_norm(target, x, residual, weight, scale)
    assert (y.dtype, total.dtype) == (dtype, residual_dtype)
    assert_close(total, residual.double() + scale * x.double())
    assert_close(y, rms_norm_reference(total.double(), weight.double(), EPS))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_rows_may_be_strided(target):
    x = torch.randn(6, 3, 40, device=target.device)[:, 1]
    residual = torch.randn(6, 60, device=target.device)[:, 10:50]
    weight = torch.randn(40, device=target.device)
    assert_close(norm(target, x, weight), rms_norm_reference(x.double(), weight.double(), EPS))
    y, total = add_norm(target, x, residual, weight)
    assert_close(y, add_rms_norm_reference(x.double(), residual.double(), weight.double(), EPS)[0])
    assert torch.equal(total, x + residual)


def test_nan_stays_in_its_row(target):
    x = torch.ones(3, 64, device=target.device)
    x[1, 7] = torch.nan
    y = norm(target, x, torch.ones(64, device=target.device))
    assert y[1].isnan().all()
    assert y[::2].isfinite().all()


def test_rows_of_zeros_stay_zero(target):
    assert not norm(
        target, torch.zeros(2, 64, device=target.device), torch.ones(64, device=target.device)
    ).any()


def test_threads_share_a_large_input(monkeypatch):
    monkeypatch.setattr(module, "_GRAIN_ELEMENTS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x, residual, weight = torch.randn(100, 32), torch.randn(100, 32), torch.randn(32)
    y, total = add_rms_norm(x, residual, weight, EPS)
    assert_close(y, rms_norm_reference(total.double(), weight.double(), EPS))
    assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x.double(), weight.double(), EPS))
