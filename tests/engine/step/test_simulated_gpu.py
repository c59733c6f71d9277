"""Whole engine steps on a simulated GPU: nothing waits for the device, and its pace changes no token."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import product

import pytest
import torch

from engine.sampling.sampling_table import SamplingNeeds
from engine.step.graph import CAPTURED
from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from testing.engines.speculating import sampled_asks, serve
from testing.simulated_gpu.engines import SETTINGS, Simulated, asks_for
from testing.simulated_gpu.gpu import SimulatedGpu
from testing.simulated_gpu.handoff import SimulatedHandoff, assert_all_free
from testing.simulated_gpu.removed_waits import REMOVED_WAITS
from testing.simulated_gpu.streams import AtOnce, Late

QUICK = ("mtp", "experts", "crowded", "host memory")
"""Together they have every kind of step; rows that replay have a test of their own."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        "dense": make_checkpoint(tmp_path_factory.mktemp("dense"), DENSE_WITH_MTP, seed=5),
        "moe": make_checkpoint(tmp_path_factory.mktemp("moe"), MOE_WITH_MTP, seed=5),
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in SETTINGS],
)
def simulated(request, models):
    setting = SETTINGS[request.param]
    return Simulated.make(setting, models[setting.model])


def test_no_step_waits_for_the_device(simulated):
    """Neither do joins, leaves, mixed steps, preemptions, grammars and log-probabilities."""
    assert simulated.differences(asks_for(simulated.setting, 6, seed=1)) == []
    assert simulated.gpu.waits == {}
    if simulated.setting is SETTINGS["crowded"]:
        assert simulated.engine.scheduler.num_preemptions > 0
    if simulated.setting is SETTINGS["host memory"]:
        assert simulated.engine.measures.host_cache.promoted > 0


def test_replays_never_wait_and_the_devices_pace_changes_no_token(models):
    """The quick representative of the two tests around it for rows that replay."""
    simulated = Simulated.make(SETTINGS["replay"], models["dense"])
    assert simulated.differences(asks_for(simulated.setting, 3, seed=2), seed=2) == []
    assert simulated.gpu.waits == {}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_when_the_device_runs_changes_no_token(simulated, seed):
    assert simulated.differences(asks_for(simulated.setting, 6, seed), seed) == []


@pytest.mark.parametrize("name", ["mtp", "ngram", pytest.param("replay", marks=pytest.mark.exhaustive)])
def test_a_transfer_that_lands_at_any_moment_changes_no_token(models, name):
    setting, gpu = SETTINGS[name], SimulatedGpu(AtOnce())
    asks = [ask for ask in sampled_asks(16, seed=4) if ask.prompt_logprobs is None and len(ask.prompt) > 1]
    expected = serve(setting.engine(models["dense"], "cpu"), asks, 4)
    handoff = SimulatedHandoff(setting, models["dense"], gpu)
    for seed in range(2):
        gpu.streams.pace = Late(seed)
        for ours, theirs in zip(handoff.serve(asks, seed), expected, strict=True):
            if ours.finish_reason == "cancelled":
                assert ours.tokens == theirs.tokens[: len(ours.tokens)]
            else:
                assert ours.said == theirs.said
    assert gpu.waits == {}
    with gpu:
        assert_all_free(handoff.source)
        assert_all_free(handoff.sink)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wait", REMOVED_WAITS.values(), ids=REMOVED_WAITS.keys())
def test_no_wait_can_be_removed(models, wait):
    """Some schedule shows it, as a wrong token, an error or a leak. With the wait, that schedule is right."""
    seed = next(seed for seed in range(12) if wait.finds(models["dense"], seed))
    assert replace(wait, removal=nullcontext).finds(models["dense"], seed) == ""


def test_every_kind_of_sampling_has_a_graph():
    every = [SamplingNeeds(*flags) for flags in product((False, True), repeat=len(fields(SamplingNeeds)))]
    reachable = [needs for needs in every if needs.random or not needs.filtered]
    for needs in reachable:
        assert any(kind | needs == kind for kind in CAPTURED), needs
    for i, kind in enumerate(CAPTURED):
        assert not any(earlier | kind == earlier for earlier in CAPTURED[:i]), "a graph that nothing replays"


def test_graphs_keep_no_results_of_their_own(simulated):
    """With logits of its own, each of a hundred graphs would keep up to half a gigabyte."""
    assert max(graph.held.num_bytes for graph in simulated.gpu.graphs) < 256


# --- the simulated GPU itself ------------------------------------------------------------------------


def _mask(x):
    return x[x > 0]


def _assign(x):
    x[0] = 1.0


def _assign_at(x):
    x[torch.arange(2, device=x.device)] = 1.0


WAITS = {
    "item": lambda x: x.max().item(),
    "bool": lambda x: bool(x.max() > 0),
    "int": lambda x: int(x.argmax()),
    "tolist": lambda x: x[:2].tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": _mask,
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.argsort()),
    "bincount": lambda x: x.argsort().bincount(),
    "equal": lambda x: torch.equal(x, x),
    "from the host": lambda x: torch.tensor([1, 2, 3], device=x.device),
    "to an element": _assign,
    "to elements": _assign_at,
    "float32 experts": lambda x: torch.nn.functional.grouped_mm(
        x.view(1, 8).expand(4, 8).contiguous(),
        x.view(1, 8, 1).expand(1, 8, 8).contiguous(),
        offs=torch.ones(1, dtype=torch.int32, device=x.device),
    ),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_every_way_to_wait_is_seen(wait):
    with SimulatedGpu() as gpu:
        x = torch.rand(8, device="cuda")
        with gpu.watching():
            wait(x)
        assert sum(gpu.waits.values()) > 0


def test_what_a_gpu_does_without_waiting_is_not_seen_as_waiting():
    with SimulatedGpu() as gpu:
        x, host = torch.rand(8, device="cuda"), torch.rand(8).pin_memory()
        with gpu.watching():
            x.copy_(host, non_blocking=True)
            host.copy_(x, non_blocking=True)
            x[2:4] = 0.0
            x.index_fill_(0, torch.arange(2, device="cuda"), 1.0)
            torch.where(x > 0, x, 1.0).sort(stable=True)
        assert gpu.waits == {}


def test_operations_run_after_the_host_has_gone_on():
    with SimulatedGpu(Late(seed=0, often=0)) as gpu:
        staged, copied = torch.ones(4).pin_memory(), torch.zeros(4, pin_memory=True)
        x = staged.to("cuda", non_blocking=True)
        y = x + 1
        copied.copy_(y, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        assert copied.isnan().all(), "the host reads before the event"
        staged.fill_(5.0)  # too early: the copy has not run
        done.synchronize()
        assert copied.tolist() == [6.0] * 4
        assert gpu.streams.current.query()


def test_streams_are_ordered_by_events_alone():
    with SimulatedGpu(Late(seed=0, often=0)):
        x = torch.zeros(1, device="cuda")
        host = torch.zeros(1, pin_memory=True)
        side, before, after = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(side):
            x += 1
            before.record()
        x *= 10
        before.wait()
        x += 5
        host.copy_(x, non_blocking=True)
        after.record()
        after.synchronize()
        assert host.item() == 6.0  # 0 * 10, then + 1 on the other stream, then + 5


def test_a_capture_holds_only_operators_that_were_looked_up():
    with SimulatedGpu():
        x, graph = torch.rand(8, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.softmax(dim=0)
        with pytest.raises(RuntimeError, match="_to_copy of f32 f64 is not among"), torch.cuda.graph(graph):
            x.softmax(dim=0, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="median of f32 is not among"), torch.cuda.graph(graph):
            x.median()


def test_a_replay_overwrites_what_other_graphs_left_in_the_pool():
    with SimulatedGpu() as gpu:
        x, graphs, results = torch.ones(2, device="cuda"), [], []
        for factor in (2.0, 3.0):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                results.append(x * factor)
        for graph in graphs:
            graph.replay()
        assert results[1].tolist() == [3.0, 3.0]
        assert results[0].isnan().tolist() == [True, True]
        with pytest.raises(RuntimeError, match="while a graph is captured"), torch.cuda.graph(graphs[0]):
            x[0].item()
        assert [graph.held.num_bytes for graph in gpu.graphs[:2]] == [8, 8]
