import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.norms import silu_gate as module
from kernels.norms.silu_gate import silu_gate, silu_gate_reference

TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 2e-4},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
}


def gate(target, y, z):
    return module._launch(y, z) if target.name == "triton" else silu_gate(y, z)


def operands(num_tokens, width, dtype=torch.float32, device="cpu"):
    """Columns of one wide projection, z before y."""
    z, _, y = (4 * torch.randn(num_tokens, 3 * width)).to(dtype).to(device).chunk(3, dim=-1)
    return y, z


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 256), (5, 1100), (3, 7), (0, 16)])
def test_gate_equals_the_reference(target, num_tokens, width, dtype):
    y, z = operands(num_tokens, width, dtype, target.device)
    out = gate(target, y, z)
    assert (out.dtype, out.shape) == (dtype, y.shape)
    expected = silu_gate_reference(y.double(), z.double())
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[dtype])


def test_large_gates_open_and_shut_and_nan_stays(target):
    """silu is z above and 0 below; no overflow on the way."""
    z = torch.tensor([[-1000.0, -100, -88, 88, 100, 1000, torch.nan]], device=target.device)
    out = gate(target, torch.full_like(z, 2.0), z)
    expected = torch.tensor([[0, 0, 0, 176, 200, 2000, torch.nan]], device=target.device)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@torch.inference_mode()
def test_the_gate_can_be_recorded(monkeypatch):
    monkeypatch.setattr(module, "_GRAIN_ELEMENTS", 64)
    wide = torch.randn(40, 96)
    graph = CpuGraph()
    with graph.record():
        out = silu_gate(wide[:, :48], wide[:, 48:])
    wide.copy_(torch.randn(40, 96))
    graph.replay()
    torch.testing.assert_close(out, silu_gate_reference(wide[:, :48], wide[:, 48:]))
