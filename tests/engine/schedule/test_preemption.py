"""When blocks run out, the youngest request moves to host memory and comes back, and every answer is
exact."""

import random

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from testing.engines.crowded import crowded_engine
from testing.engines.sanitizing import SANITIZE
from testing.engines.shared_prefixes import answers, prompts_with_shared_prefixes, run
from wire.messages.sampling_params import SamplingParams


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


@pytest.mark.parametrize(("mode", "k", "steps_ahead"), [("none", 3, 1), ("align", 1, 0), ("all", 3, 1)])
def test_with_drafts_and_steps_in_flight_preempted_requests_end_exactly(bundled_model, mode, k, steps_ahead):
    choose = random.Random(3)
    prompts = [[choose.randrange(6, 150) for _ in range(5)] * 3 for _ in range(6)]

    def run_all(num_blocks, k):
        engine = crowded_engine(bundled_model, 6, mode=mode, k=k, steps_ahead=steps_ahead)
        owned = engine.scheduler.owned
        owned.blocks.allocate(owned.blocks.num_free - num_blocks)
        requests = [
            Request(str(i), list(prompt), SamplingParams(max_tokens=40, temperature=0))
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            engine.add(request)
        while not engine.step().did_nothing:
            pass
        assert owned.cache.num_available_blocks == num_blocks
        assert owned.cache.num_available_slots == owned.slots.capacity
        assert engine._store.num_bytes == 0
        return answers(requests), engine.scheduler.num_preemptions

    expected, _ = run_all(190, 0)
    found, num_preemptions = run_all(40, k)
    assert found == expected
    assert num_preemptions > 0


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


def test_a_request_that_is_preempted_before_its_first_chunk_comes_back(bundled_model):
    """Fails where the sanitizer takes for granted that what is preempted has a state."""
    tight = Engine(
        EngineConfig(
            bundled_model,
            "both",
            device="cpu",
            max_num_seqs=3,
            max_batch_tokens=4,
            block_size=4,
            max_model_len=128,
            cache_mode="none",
            cache_memory_bytes=16 << 20,
            sanitize=True,
        )
    )
    owned = tight.scheduler.owned
    owned.blocks.allocate(owned.blocks.num_free - 34)
    prompts = [[7] * 3, [8] * 60, [9] * 60]
    preempted = set()
    requests = [
        Request(str(i), list(prompt), SamplingParams(max_tokens=60 if i == 0 else 3, temperature=0))
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        tight.add(request)
    while not tight.step().did_nothing:
        preempted.update(r.request_id for r in tight.scheduler.preempted.values() if r.num_computed == 0)
    assert preempted
    assert [request.finish_reason for request in requests] == ["length"] * 3
