"""Recorded kernel calls: what a replay computes, what can't be recorded, and threads that share it."""

from __future__ import annotations

import threading

import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.linear.packed_linear import PackedLinear
from kernels.norms.rms_norm import add_rms_norm, rms_norm

SIZE, LAYERS = 160, 6


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Layers:
    """Linear layers and norms with a residual stream."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.layers = [
            PackedLinear.pack(torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5, None)
            for _ in range(LAYERS)
        ]
        self.norm = torch.ones(SIZE)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        residual, x = x, rms_norm(x, self.norm, 1e-5)
        for layer in self.layers:
            x, residual = add_rms_norm(layer(x), residual, self.norm, 1e-5)
        return x


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_a_replay_computes_what_the_calls_do_on_new_inputs(threads, num_threads):
    threads(num_threads)
    model, x = Layers(), torch.zeros(150, SIZE)
    graph = CpuGraph()
    with graph.record():
        y = model(x)
    assert len(graph) == 1 + 2 * LAYERS
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        x.copy_(torch.randn(150, SIZE, generator=generator))
        graph.replay()
        replayed = y.clone()
        assert torch.equal(replayed, model(x))


@torch.inference_mode()
def test_engines_in_several_threads_share_the_helpers(threads):
    threads(3)
    model = Layers()
    wrong: list[int] = []

    def work(seed: int) -> None:
        with torch.inference_mode():
            x = torch.randn(100, SIZE, generator=torch.Generator().manual_seed(seed))
            graph = CpuGraph()
            with graph.record():
                y = model(x)
            expected = y.clone()
            for _ in range(100):
                graph.replay()
                if not torch.equal(y, expected):
                    wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@torch.inference_mode()
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x[:, ::2].contiguous(),
        lambda x: x.tolist(),
        lambda x: bool(x[0, 0]),
        lambda x: torch.zeros(3),
        lambda x: torch.nn.functional.silu(x, inplace=True),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: torch.cat([x, x]),
    ],
)
def test_what_torch_computes_copies_or_hands_over_is_refused_while_recording(compute):
    x = torch.ones(4, SIZE)
    with pytest.raises(RuntimeError, match="a recorded step would leave it out"), CpuGraph().record():
        compute(x)


@torch.inference_mode()
def test_views_and_what_costs_nothing_are_not_refused():
    x, weight = torch.ones(4, SIZE), torch.ones(SIZE)
    graph = CpuGraph()
    with graph.record():
        first, _ = torch.split(x.view(2, 2, SIZE)[:, 1:].reshape(2, SIZE), [SIZE - 8, 8], dim=-1)
        assert first.float().stride(0) == 2 * SIZE
        rms_norm(x.contiguous().to(torch.float32), weight, 1e-5)
    assert len(graph) == 1


@torch.inference_mode()
def test_nothing_is_recorded_behind_the_end():
    x, weight = torch.ones(1, 8), torch.ones(8)
    graph = CpuGraph()
    with graph.record():
        rms_norm(x, weight, 1e-5)
    rms_norm(x, weight, 1e-5)
    assert len(graph) == 1
