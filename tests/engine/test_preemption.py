"""Out of blocks: the youngest moves to host memory and comes back, and every answer is exact."""

import random

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.engine.sanitizing import SANITIZE
from tests.engine.test_cache_modes import answers, prompts_with_shared_prefixes, run


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_more_requests_than_blocks_all_end_exactly(bundled_model, mode):
    prompts = prompts_with_shared_prefixes(24, seed=4)

    def engine(num_seqs):
        return Engine(
            EngineConfig(
                bundled_model,
                "both",
                device="cpu",
                max_num_seqs=num_seqs,
                max_batch_tokens=64,
                block_size=4,
                max_model_len=256,
                cache_mode=mode,
                state_block_size=32 if mode == "all" else None,
                cache_memory_bytes=64 << 20,
                sanitize=SANITIZE,
            )
        )

    expected = answers(run(engine(24), prompts, 24))
    tight = engine(24)
    owned = tight.scheduler.owned
    owned.blocks.allocate(owned.blocks.num_free - 64)  # room for one sequence of full length
    assert answers(run(tight, prompts, 24)) == expected
    assert tight.scheduler.num_preemptions > 0
    assert tight._store.num_bytes == 0
    assert owned.cache.num_available_blocks == 64


def test_a_preempted_request_that_is_cancelled_leaves_nothing(bundled_model):
    tight = Engine(
        EngineConfig(
            bundled_model,
            "both",
            device="cpu",
            max_num_seqs=8,
            max_batch_tokens=64,
            block_size=4,
            max_model_len=128,
            cache_mode="none",
            cache_memory_bytes=64 << 20,
            sanitize=SANITIZE,
        )
    )
    owned = tight.scheduler.owned
    owned.blocks.allocate(owned.blocks.num_free - 32)
    choose = random.Random(1)
    from engine.request import Request
    from wire.sampling_params import SamplingParams

    for i in range(6):
        prompt = [choose.randrange(6, 150) for _ in range(15)]
        tight.add(Request(str(i), prompt, SamplingParams(max_tokens=60, temperature=0)))
    while not tight.scheduler.preempted:
        tight.step()
    for name in list(tight.scheduler.preempted):
        tight.cancel(name)
    while not tight.step().did_nothing:
        pass
    assert tight._store.num_bytes == 0
    assert owned.cache.num_available_blocks == 32
