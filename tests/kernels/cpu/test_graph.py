"""Recorded kernel calls: what a replay computes, what can't be recorded, and threads that share it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.cpu.jit import cpu_jit
from kernels.cpu.threads import Repeats
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


@cpu_jit
def _count_runs(runs, stop_after, stop, sleep, begin, end):
    runs[0] += 1
    if runs[0] == stop_after:
        stop[0] = 1
    total = 0.0
    for i in range(sleep):
        total += np.sqrt(np.float64(i))
    runs[1] = int(total)


def counting_graph(stop_after, *, sleep=0):
    """A graph of one call, the number of its runs, and the word that stops it after so many."""
    runs, stop = np.zeros(2, np.int64), np.zeros(1, np.int64)
    graph = CpuGraph()
    with graph.record():
        _count_runs.parallel_for(1, 1, runs, stop_after, stop, sleep)
    runs[0] = 0
    return graph, runs, stop


FAR_NS = 2**62


def test_a_graph_is_replayed_as_often_as_asked():
    graph, runs, stop = counting_graph(0)
    assert graph.replay(Repeats(5, stop.ctypes.data, FAR_NS)) == 5
    assert runs[0] == 5
    assert graph.replay() == 1
    assert runs[0] == 6


def test_a_word_ends_the_replays():
    graph, runs, stop = counting_graph(3)
    assert graph.replay(Repeats(8, stop.ctypes.data, FAR_NS)) == 3
    assert runs[0] == 3
    assert graph.replay(Repeats(8, stop.ctypes.data, FAR_NS)) == 1, "it was set before"


def test_replays_end_before_their_time_has_passed():
    graph, _, stop = counting_graph(0, sleep=1_000_000)
    began_ns = time.monotonic_ns()
    graph.replay()
    each_ns = time.monotonic_ns() - began_ns
    assert graph.replay(Repeats(1000, stop.ctypes.data, time.monotonic_ns() + 8 * each_ns)) < 100
    assert graph.replay(Repeats(1000, stop.ctypes.data, 0)) == 1


def test_joined_graphs_run_one_after_the_other():
    x = torch.zeros(4)
    first, second = CpuGraph(), CpuGraph()
    with first.record():
        _add_then_double.parallel_for(4, 1, x, np.float32(1), np.float32(1))
    with second.record():
        _add_then_double.parallel_for(4, 1, x, np.float32(0), np.float32(2))
    joined = CpuGraph.joined(first, second)
    assert x.tolist() == [2] * 4
    joined.replay()
    assert x.tolist() == [6] * 4
    assert len(joined) == 2


@cpu_jit
def _add_then_double(x, addend, factor, begin, end):
    for i in range(begin, end):
        x[i] = (x[i] + addend) * factor
