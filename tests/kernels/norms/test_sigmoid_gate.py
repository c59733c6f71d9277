import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.norms import sigmoid_gate as module
from kernels.norms.sigmoid_gate import (
    add_sigmoid_gated,
    add_sigmoid_gated_reference,
    sigmoid_gate,
    sigmoid_gate_reference,
)

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 1e-4},
}


def is_launched(target, x):
    """float64 is the reference's on every device."""
    return target.name == "triton" and x.dtype != torch.float64


def assert_close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, **TOLERANCE[actual.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim"), [(1, 2, 5), (3, 16, 256), (0, 2, 8), (9, 3, 80)]
)
def test_every_element_is_gated_by_its_own(target, num_tokens, heads, head_dim, dtype):
    projection = (3 * torch.randn(num_tokens, heads * 2 * head_dim + 4)).to(dtype).to(target.device)
    # Behind each head's query stands its gate.
    gate = projection[:, : heads * 2 * head_dim].unflatten(1, (heads, 2 * head_dim))[..., head_dim:]
    x = torch.randn(num_tokens, heads, head_dim).to(dtype).to(target.device)
    expected = x.double() * gate.double().sigmoid()
    y = module._launch(x, gate) if is_launched(target, x) else sigmoid_gate(x, gate)
    assert y is x
    assert_close(y, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 7), (3, 1500), (0, 5)])
def test_one_gate_a_token_and_what_it_lets_through_is_added(target, num_tokens, size, dtype):
    total, x, gate = (
        torch.randn(num_tokens, columns).to(dtype).to(target.device) for columns in (size, size, 1)
    )
    expected = total.double() + x.double() * gate.double().sigmoid()
    add = module._launch_add if is_launched(target, x) else add_sigmoid_gated
    assert add(total, x, gate) is total
    assert_close(total, expected)


def test_gates_open_close_and_pass_nan_on(target):
    gate = torch.tensor([[[80.0, -80.0, torch.nan, 0.0]]], device=target.device)
    x = torch.full_like(gate, 3.0)
    y = module._launch(x, gate) if target.name == "triton" else sigmoid_gate(x, gate)
    open_, closed, nan, half = y.flatten().tolist()
    assert (open_, half) == (3.0, 1.5)
    assert closed < 1e-30
    assert nan != nan


@torch.inference_mode()
def test_recorded_calls_follow_their_inputs(monkeypatch):
    monkeypatch.setattr(module, "_GRAIN_ELEMENTS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x, gates = torch.zeros(40, 2, 24), torch.zeros(40, 2, 48)
    total, token_gates = torch.zeros(40, 48), torch.zeros(40, 1)
    graph = CpuGraph()
    with graph.record():
        sigmoid_gate(x, gates[..., 24:])
        add_sigmoid_gated(total, x.view(40, 48), token_gates)
    for tensor in (x, gates, total, token_gates):
        tensor.copy_(torch.randn(tensor.shape))
    gated = sigmoid_gate_reference(x.double(), gates[..., 24:].double())
    added = add_sigmoid_gated_reference(total.double(), gated.view(40, 48), token_gates.double())
    graph.replay()
    assert_close(x, gated)
    assert_close(total, added)
