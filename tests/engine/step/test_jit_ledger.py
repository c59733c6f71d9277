"""Serving launches no variant of a kernel that the start has not: no client waits for a compilation."""

from __future__ import annotations

import random

import pytest

from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from testing.engines.speculating import Ask, serve
from testing.simulated_gpu.engines import Setting, all_kinds_of_asks
from testing.simulated_gpu.gpu import SimulatedGpu
from testing.simulated_gpu.jit_keys import jit_key
from wire.messages.sampling_params import SamplingParams

LONG = (("max_model_len", 1024), ("max_batch_tokens", 512), ("cache_memory_bytes", 64 << 20))
SETTINGS = {
    "plain": Setting("dense", 0, None, "none", LONG),
    "mtp": Setting("dense", 2, "mtp", "align", LONG),
    "ngram": Setting("dense", 3, "ngram", "all", (("state_block_size", 64), *LONG)),
    "experts": Setting("moe", 1, "mtp", "align", (("dtype", "bfloat16"), *LONG)),
    "float32 experts": Setting("moe", 0, None, "none", LONG),
    "invariant": Setting("dense", 2, "ngram", "none", (("batch_invariant", True), *LONG)),
}
LENGTHS = (1, 2, 3, 16, 17, 33, 64, 65, 128, 512, 513, 980, 980)


def long_asks() -> list[Ask]:
    """Return prompts of lengths at which Triton would specialise a kernel, some with a common beginning."""
    choose = random.Random(1)
    text = [choose.randrange(6, 150) for _ in range(max(LENGTHS))]
    params = [SamplingParams(max_tokens=4, temperature=0), SamplingParams(max_tokens=4, logprobs=2)]
    return [Ask(tuple(text[:length]), params[i % 2]) for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    "name", [one if one == "mtp" else pytest.param(one, marks=pytest.mark.exhaustive) for one in SETTINGS]
)
def test_serving_compiles_nothing(name, tmp_path):
    setting = SETTINGS[name]
    shape = MOE_WITH_MTP if setting.model == "moe" else DENSE_WITH_MTP
    warmed, served, gpu = set(), set(), SimulatedGpu()
    with gpu:
        gpu.on_launch = lambda launch: warmed.add(jit_key(launch))
        engine = setting.engine(make_checkpoint(tmp_path, shape, seed=5), "cuda")
        gpu.on_launch = lambda launch: served.add(jit_key(launch))
        serve(engine, long_asks(), 4)
        serve(engine, all_kinds_of_asks(4, seed=3), 3)
    assert served - warmed == set()
    assert len(served) > 12
