"""A step of decode rows can be captured: nothing in it waits for the device, no shape or address moves.

On a CPU torch's own dispatch shows it; where there is a GPU graphs are captured and compared.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine.models.layers.moe as moe
from engine.config import EngineConfig
from engine.engine import Engine
from engine.step.buffers import capture_sizes
from engine.step.passes.recorded_forward import RecordedForward
from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, EOS_TOKEN_ID, MOE_WITH_MTP, make_checkpoint
from testing.engines.speculating import Ask, greedy_asks, make_engine, serve
from wire.messages.sampling_params import SamplingParams, Thinking

KERNELS = str(Path(moe.__file__).parents[3] / "kernels")
KINDS = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.9, "min_p": 0.02},
    "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 30},
    "processed": {
        "temperature": 0.9,
        "frequency_penalty": 0.5,
        "min_tokens": 3,
        "logit_bias": ((7, 1.0),),
        "thinking": Thinking((50,), (51, 52), is_open=True, budget=4),
    },
}
SHAPED_BY_DATA = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "unique",
    "unique2",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
"""aten operators that read values to the host, or that must to know their result's shape."""
READS_ON_HOST = {"item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
"""Methods of tensors; on a CPU not all of them pass the dispatcher."""
MADE_ON_HOST = {"tensor", "as_tensor", "from_numpy"}
"""On a GPU these copy from pageable memory, and wait."""


class NothingWaits(TorchDispatchMode):
    """Raises where an operator reads values, or its shape depends on them; notes all others."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        tensors = [leaf for leaf in tree_leaves(args[1:2]) if isinstance(leaf, torch.Tensor)]
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors
        )
        counts = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in SHAPED_BY_DATA or by_mask or counts or (name == "where" and len(args) == 1):
            raise AssertionError(f"{func} in a step: the host would wait for the device")
        result = func(*args, **(kwargs or {}))
        if _is_called_by_kernel():  # a CPU path may return early where there is nothing to do
            return result
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.trace.append((str(func), *shapes))
        return result


class NothingIsRead(TorchFunctionMode):
    """Raises where a tensor is read, or made of host values, outside of a kernel's own CPU path."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        reads = name in READS_ON_HOST or (name in MADE_ON_HOST and func is getattr(torch, name))
        if reads and not _is_called_by_kernel():
            raise AssertionError(f"{name} in a step: the host would wait for the device")
        return func(*args, **(kwargs or {}))


def _is_called_by_kernel() -> bool:
    frame = sys._getframe(2)
    while frame is not None and ("/torch/" in (name := frame.f_code.co_filename) or name == __file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(KERNELS)


class Guard:
    """Around every step of decode rows alone that an engine runs, from indices to drafts."""

    def __init__(self, engine: Engine) -> None:
        self.traces: dict[tuple[object, ...], list[list[tuple[object, ...]]]] = defaultdict(list)
        self.addresses: dict[str, set[int]] = defaultdict(set)
        self.sizes: set[int] = set()
        self._runner = engine._runner
        self._prepare, self._run = self._runner._buffers.prepare, self._runner._program.run
        self._runner._buffers.prepare = self.prepare
        self._runner._program.run = self.run

    def prepare(self, num_rows, *, max_seq_len):
        with NothingIsRead(), NothingWaits():
            return self._prepare(num_rows, max_seq_len=max_seq_len)

    def run(self, step, prompts=None):
        if step.ends is not None:
            return self._run(step, prompts)
        self._note_addresses(step)
        with NothingIsRead(), NothingWaits() as mode:
            tensors = self._run(step)
        self.traces[step.num_decode, step.needs, step.samples].append(mode.trace)
        return tensors

    def _note_addresses(self, step) -> None:
        self.sizes.add(step.num_decode)
        batch, decode = step.batch, step.batch.decode
        for part in (step, batch, decode, self._runner.state):
            for name, value in vars(part).items():
                if isinstance(value, torch.Tensor):
                    self.addresses[f"{type(part).__name__}.{name}"].add(value.data_ptr())
        self.addresses["stop_ids"].add(self._runner._sampling.stop_ids.data_ptr())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        "dense": make_checkpoint(tmp_path_factory.mktemp("dense"), DENSE_WITH_MTP, seed=5),
        "moe": make_checkpoint(tmp_path_factory.mktemp("moe"), MOE_WITH_MTP, seed=5),
    }


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Experts as a GPU runs them; a CPU groups rows by expert, which it has to read.

    And every step call by call: a CPU replays its own recording.
    """
    monkeypatch.setattr(moe, "GroupedExperts", moe.StackedExperts)
    monkeypatch.setattr(RecordedForward, "obstacle", lambda model: "steps are watched")


def asks_of(kind: str, count: int, num_tokens: int = 12) -> list[Ask]:
    return [
        replace(
            ask,
            params=SamplingParams(max_tokens=ask.params.max_tokens, **KINDS[kind]),
            stop=frozenset(range(40)) if i % 3 == 0 else frozenset(),
            seed=i,
        )
        for i, ask in enumerate(greedy_asks(count, seed=2, num_tokens=num_tokens))
    ]


def guarded_engine(model_dir, drafter, k=3, **settings) -> tuple[Engine, Guard]:
    engine = make_engine(model_dir, "all", k, drafter, 1, sanitize=False, **settings)
    return engine, Guard(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("model", "drafter", "k"), [("dense", None, 0), ("moe", "mtp", 3), ("dense", "ngram", 2)]
)
def test_no_operator_of_a_decode_step_waits_or_has_a_shape_that_depends_on_data(
    models, model, drafter, k, kind
):
    engine, guard = guarded_engine(models[model], drafter, k)
    serve(engine, asks_of(kind, 9), concurrency=5)
    assert sum(len(traces) for traces in guard.traces.values()) > 5
    for traces in guard.traces.values():
        assert len(traces[0]) > 20
        for trace in traces:
            assert trace == traces[0]


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_what_a_step_reads_and_writes_stays_where_it_is_for_every_batch_size(models, model, drafter):
    engine, guard = guarded_engine(models[model], drafter, max_batch_tokens=2048)
    asks = [
        replace(ask, params=SamplingParams(max_tokens=3, temperature=0)) for ask in greedy_asks(32, seed=3)
    ]
    for size in capture_sizes(32):
        serve(engine, asks[:size])
    engine.dummy_step(engine._runner.decode_shape(7))
    assert guard.sizes == set(capture_sizes(32))
    assert len(guard.addresses) > 18
    assert {name: len(found) for name, found in guard.addresses.items() if len(found) > 1} == {}


def _mask(logits):
    return logits[logits > 0]


WAITS = {
    "item": lambda logits: logits.max().item(),
    "bool": lambda logits: bool(logits.max() > 0),
    "int": lambda logits: int(logits.argmax()),
    "tolist": lambda logits: logits[0, 0, :2].tolist(),
    "cpu": lambda logits: logits.cpu(),
    "index": lambda logits: [1, 2, 3][logits.argmax() * 0],
    "nonzero": lambda logits: logits.nonzero(),
    "where": lambda logits: torch.where(logits > 0),
    "mask": _mask,
    "masked assignment": lambda logits: logits.clone().__setitem__(logits > 0, torch.zeros(1)),
    "masked_select": lambda logits: logits.masked_select(logits > 0),
    "unique": lambda logits: logits.unique(),
    "unique_consecutive": lambda logits: logits.unique_consecutive(),
    "repeat_interleave": lambda logits: logits[0, 0].repeat_interleave(logits[0, 0].argsort()),
    "bincount": lambda logits: logits.argmax(-1).flatten().bincount(),
    "equal": lambda logits: torch.equal(logits, logits),
    "from the host": lambda logits: torch.tensor([1, 2, 3]),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_the_guard_sees_every_way_to_wait(models, wait, engine_with_guard):
    """Each put into the sampler of an engine that passes without."""
    sampler = engine_with_guard._runner._program._sampler
    sample = sampler.sample

    def sample_and_wait(logits, *args):
        if logits.shape[1] > 1:  # decode rows
            wait(logits)
        return sample(logits, *args)

    sampler.sample = sample_and_wait
    try:
        with pytest.raises(AssertionError, match="would wait for the device"):
            serve(engine_with_guard, asks_of("greedy", 2))
    finally:
        sampler.sample = sample
        for name in ("0", "1"):
            engine_with_guard.cancel(name)
        engine_with_guard.step()
    serve(engine_with_guard, asks_of("greedy", 2))


@pytest.fixture(scope="module")
def engine_with_guard(models):
    return guarded_engine(models["dense"], "mtp")[0]


# --- with a GPU ------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def cuda_engine(model_dir, drafter, *, captures, ahead=1) -> Engine:
    engine = Engine(
        EngineConfig(
            model_dir,
            "both",
            device="cuda",
            max_num_seqs=32,
            max_batch_tokens=512,
            cache_memory_bytes=256 << 20,
            num_speculative=3,
            drafter=drafter,
            steps_ahead=ahead,
            sanitize=False,
        )
    )
    if captures:
        engine._runner.capture()
        assert engine._runner._graphs._captured
    else:
        engine._runner._graphs._captured.clear()
    return engine


def in_words(ask, grammar):
    params = replace(ask.params, grammar=grammar, min_tokens=0)
    return replace(ask, params=params, stop=frozenset([EOS_TOKEN_ID]))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_graphs_and_eager_steps_give_the_same_tokens_over_a_thousand_steps(models, model, drafter):
    asks = [
        ask for kind in ("greedy", "random", "filtered") for ask in asks_of(kind, 30, num_tokens=80)
    ]  # in batches that change as requests join and leave
    words = LLMatcher.grammar_from_regex("([a-z]{1,5} ){9,12}")
    asks += [in_words(ask, words) for kind in ("greedy", "filtered") for ask in asks_of(kind, 6, 40)]
    eager = cuda_engine(models[model], drafter, captures=False)
    graphs = cuda_engine(models[model], drafter, captures=True)
    num_steps, replays = 0, 0
    replay = graphs._runner._graphs.replay

    def count(*args):
        nonlocal replays
        replayed = replay(*args)
        replays += replayed is not None
        return replayed

    graphs._runner._graphs.replay = count
    for concurrency in (4, 8, 17, 32) * 20:
        expected = serve(eager, asks, concurrency, per_step=1)
        answers = serve(graphs, asks, concurrency, per_step=1)
        assert [answer.said for answer in answers] == [answer.said for answer in expected]
        num_steps = graphs.stats().num_steps
        if num_steps >= 1000:
            break
    assert num_steps >= 1000
    assert replays > num_steps // 3


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_the_steady_loop_synchronizes_nowhere(models, drafter, captures):
    """Whole engine steps of decoding requests: what is read back is waited for by its own event alone."""
    engine = cuda_engine(models["moe"], drafter, captures=captures)
    params = SamplingParams(max_tokens=200, temperature=0)
    for i, ask in enumerate(greedy_asks(16, seed=5)):
        engine.add(replace(ask, params=params).request(str(i)))
    while (
        any(request.num_output < 4 for request in engine.scheduler.running.values())
        or engine.scheduler.waiting
    ):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            assert not engine.step().did_nothing
    finally:
        torch.cuda.set_sync_debug_mode("default")
