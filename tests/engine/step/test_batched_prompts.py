"""Prompts whose kernel calls two threads make in batches: the tokens of one thread, for each family."""

import pytest
import torch

from kernels.cpu import call_list, threads
from kernels.cpu.call_list import Batch
from testing.checkpoints.families import CASES, make_family_checkpoint
from testing.engines.speculating import Ask, serve
from testing.kernels.pending_calls import watch_batches
from tests.engine.step.test_bursts import make_engine
from wire.messages.sampling_params import SamplingParams

BATCHED = {"nemotron-h", "bamba", "granite-4", "falcon-h1", "qwen3-next", "qwen3.5", "qwen3.5-moe"}
"""Families whose prompts have enough calls for many batches; some of them have experts."""


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    """An engine sets the number of threads of its process."""
    monkeypatch.setattr(threads, "_num_threads", [])
    torch_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(torch_threads)


def asks():
    """Prompts that share their beginnings; some are longer than a step has tokens."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [
        tuple((i // 2 * 5 + 3 * n) % 150 + 5 for n in range(size))
        for i, size in enumerate((90, 1, 17, 64, 65, 30, 2, 48))
    ]
    return [Ask(prompt, params) for prompt in prompts]


@pytest.mark.parametrize("name", CASES)
def test_two_threads_give_the_tokens_of_one(tmp_path, monkeypatch, name):
    monkeypatch.setattr(call_list, "LONG_SHARES", 0)  # as if all calls were long
    num_batches = count_batches(tmp_path, monkeypatch, name)
    assert num_batches > 20 or name not in BATCHED


@pytest.mark.parametrize("name", ["nemotron-h", "qwen3.5-moe"])
def test_so_do_short_calls_in_longer_batches(tmp_path, monkeypatch, name):
    assert count_batches(tmp_path, monkeypatch, name) <= 20


def count_batches(directory, monkeypatch, name):
    """Compares the tokens. Returns how often a batch has ended before its prompts' pass."""
    model_dir = make_family_checkpoint(directory / name, name, seed=3)
    settings = {"cache_mode": "all", "block_size": 8, "sanitize": False}
    expected = serve(make_engine(model_dir, 0.0, num_threads=1, **settings), asks(), 3, per_step=1)
    watch_batches(monkeypatch)
    num_settled = 0
    settle = Batch.settle

    def settled(batch):
        nonlocal num_settled
        num_settled += bool(batch.calls)
        settle(batch)

    monkeypatch.setattr(Batch, "settle", settled)
    engine = make_engine(model_dir, 0.0, num_threads=2, **settings)
    found = serve(engine, asks(), 3, per_step=1)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    return num_settled
