"""Engines of models without states (Llama) or without KV (Mamba-2): cached, preempted, moved, sanitized."""

import logging

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from testing.checkpoints.families import make_family_checkpoint
from testing.engines.shared_prefixes import answers, prompts_with_shared_prefixes, run
from testing.engines.speculating import assert_nothing_is_owned
from wire.errors import ConfigError, SanitizerError
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams

BLOCK = 8
MODELS = ("llama", "mamba-2")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: make_family_checkpoint(tmp_path_factory.mktemp(name), name, seed=5) for name in MODELS}


@pytest.fixture(params=MODELS)
def model_dir(request, checkpoints):
    return checkpoints[request.param]


def make_engine(model_dir, role="both", **settings):
    settings = {
        "max_num_seqs": 16,
        "max_batch_tokens": 64,
        "max_model_len": 512,
        "block_size": BLOCK,
        "cache_memory_bytes": 64 << 20,
        "sanitize": True,
        **settings,
    }
    return Engine(EngineConfig(model_dir, role, device="cpu", **settings))


@pytest.mark.parametrize(
    ("name", "mode", "num_tokens", "cached"),
    [
        ("llama", "none", 100, 0),
        ("llama", "align", 100, 96),
        ("llama", "all", 100, 96),
        ("llama", "all", 96, 88),  # one token has to be computed
        ("llama", "all", 8, 0),
        ("mamba-2", "none", 100, 0),
        ("mamba-2", "align", 100, 96),
        ("mamba-2", "all", 100, 96),
        ("mamba-2", "all", 96, 88),
    ],
)
def test_the_same_prompt_again_computes_what_lies_behind_the_last_block(
    checkpoints, name, mode, num_tokens, cached
):
    engine = make_engine(checkpoints[name], cache_mode=mode)
    prompt = (prompts_with_shared_prefixes(1, seed=9)[0] * 20)[:num_tokens]
    first, again = (run(engine, [prompt], 1)[0] for _ in range(2))
    assert (first.measured.num_cached, again.measured.num_cached) == (0, cached)
    assert first.tokens == again.tokens
    assert_nothing_is_owned(engine)


def test_without_states_a_branch_is_a_hit_at_once_and_an_answer_too(checkpoints):
    """A hybrid has a state at a branch only from the third prompt on, and of answers now and then."""
    engine = make_engine(checkpoints["llama"])
    system = [6 + i % 23 for i in range(40)]
    first, second = run(engine, [system + [7] * 20, system + [8] * 20], 1)
    assert second.measured.num_cached == 40
    (turn,) = run(engine, [[*first.tokens, 9, 9, 9]], 1)
    assert turn.measured.num_cached == (len(first.tokens) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("k", [0, 3])
def test_more_sequences_than_blocks_end_exactly(checkpoints, k):
    def served(engine, num_blocks):
        owned = engine.scheduler.owned
        owned.blocks.allocate(owned.blocks.num_free - num_blocks)
        requests = [
            Request(str(i), [6 + i, 7, 8] * 5, SamplingParams(max_tokens=40, temperature=0)) for i in range(6)
        ]
        for request in requests:
            engine.add(request)
        while not engine.step().did_nothing:
            pass
        assert_nothing_is_owned(engine, num_blocks)
        return answers(requests)

    expected = served(make_engine(checkpoints["llama"], cache_mode="none"), 60)
    tight = make_engine(checkpoints["llama"], num_speculative=k, max_model_len=128)
    assert served(tight, 18) == expected
    assert tight.scheduler.num_preemptions > 0
    assert tight._store.num_bytes == 0


def test_without_kv_a_long_context_takes_no_more_memory_than_a_short_one(checkpoints):
    short, long = (
        make_engine(checkpoints["mamba-2"], max_model_len=length, max_num_seqs=2, cached_states=1)
        for length in (64, 1 << 20)
    )
    assert short.capacity.num_bytes == long.capacity.num_bytes
    prompt = prompts_with_shared_prefixes(1, seed=3)[0] * 40
    (request,) = run(long, [prompt], 1)
    assert request.num_output == 8
    assert long.scheduler.num_preemptions == 0
    assert (long.stats().num_blocks, long.stats().free_blocks, long.stats().cached_blocks) == (0, 0, 0)


def test_without_states_no_slots_are_counted_and_max_num_seqs_run_at_once(checkpoints):
    engine = make_engine(checkpoints["llama"], num_speculative=3, max_num_seqs=16)
    for i in range(16):
        engine.add(Request(str(i), [i + 6] * 5, SamplingParams(max_tokens=20, temperature=0)))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (16, 0)
    assert (stats.num_slots, stats.free_slots, stats.cached_states, stats.quarantined_slots) == (0, 0, 0, 0)
    assert engine.caches.state.numel() == 0


@pytest.mark.parametrize("setting", ["cached_states", "state_block_size"])
def test_settings_about_states_are_refused_where_there_are_none(checkpoints, setting):
    with pytest.raises(ConfigError, match=f"`{setting}` 16 means nothing .* no recurrent layers"):
        make_engine(checkpoints["llama"], **{setting: 16})


@pytest.mark.parametrize("mode", ["align", "all"])
def test_what_a_cache_mode_means_without_states_is_said_once(checkpoints, caplog, mode):
    with caplog.at_level(logging.INFO, logger="engine.schedule.cache_modes"):
        make_engine(checkpoints["llama"], cache_mode=mode)
    (said,) = caplog.messages
    assert said == f"cache mode {mode}: the model has no recurrent state, so every full block of KV is kept"


def hand_over(source, sink, tokens, name="a"):
    """Prefills on one engine, copies what a ticket names into the other's pools and lets that go on."""
    source.add(Request(name, list(tokens), None))
    while not (result := source.step()).prefilled:
        pass
    (held,) = result.prefilled
    num_blocks = source.capacity.blocks_for(held.num_computed)
    ticket = Ticket(
        name,
        0,
        0,
        "h:1",
        "i",
        held.num_computed,
        tuple(held.memory.block_ids[:num_blocks]),
        held.memory.state_slot,
        1.0,
        source.digests(held.request_id),
    )
    request = Request(name, list(tokens), SamplingParams(max_tokens=12, temperature=0), ticket=ticket)
    sink.add(request)
    (asked,) = sink.step().to_transfer
    first = len(asked.memory.nodes)
    for ours, theirs in zip(asked.memory.block_ids[first:num_blocks], ticket.block_ids[first:], strict=True):
        sink.caches.kv[ours] = source.caches.kv[theirs]
    sink.caches.state[asked.memory.state_slot] = source.caches.state[ticket.state_slot]
    return request, held


@pytest.mark.parametrize("k", [0, 3])
def test_a_handed_over_prompt_goes_on_as_if_computed_here(model_dir, k):
    prompts = [[6 + i % 40 for i in range(n)] for n in (2, 9, 41, 41, 64)]
    expected = run(make_engine(model_dir, cache_mode="none"), prompts, 1)
    source, sink = make_engine(model_dir, "prefill"), make_engine(model_dir, "decode", num_speculative=k)
    for prompt, alone in zip(prompts, expected, strict=True):
        request, held = hand_over(source, sink, prompt)
        assert (held.memory.state_slot == 0) == (source.caches.spec.mamba_layers == 0)
        assert sink.transferred(request, error=None, settled=True) == []
        while not sink.step().did_nothing:
            pass
        assert request.tokens[len(prompt) :][:8] == alone.tokens[len(prompt) :]
        source.release("a")
    assert_nothing_is_owned(source)
    assert_nothing_is_owned(sink)


def test_bytes_that_changed_on_the_way_are_found(model_dir):
    source, sink = make_engine(model_dir, "prefill"), make_engine(model_dir, "decode")
    request, _ = hand_over(source, sink, [6 + i % 40 for i in range(41)])
    if sink.capacity.has_kv:
        sink.caches.kv[request.memory.block_ids[2]].view(-1)[3] += 1
        where = f"block {request.memory.block_ids[2]}"
    else:
        sink.caches.state[request.memory.state_slot, 5] += 1
        where = f"slot {request.memory.state_slot}, conv.0"
    (failed,) = sink.transferred(request, error=None, settled=True)
    assert failed.error.code == "state_corrupted"
    assert f"{where} as received" in failed.error.message
    assert_nothing_is_owned(sink)


def test_all_requests_are_let_go_and_what_decodes_is_held_without_its_absent_part(model_dir):
    engine = make_engine(model_dir, num_speculative=3)
    request = Request("a", [6 + i for i in range(37)], SamplingParams(max_tokens=40, temperature=0))
    engine.add(request)
    while request.num_output < 5:
        engine.step()
    engine.move_all()
    (held,) = engine.step().kept
    assert held.num_computed == len(held.tokens) - 1
    assert len(held.memory.slots) == engine.capacity.has_state
    assert bool(held.memory.block_ids) == engine.capacity.has_kv
    digests = engine.digests(held.request_id)
    assert len(digests.blocks) == engine.capacity.blocks_for(held.num_computed)
    assert len(digests.state) == 2 * engine.caches.spec.mamba_layers
    engine.release("a")
    assert_nothing_is_owned(engine)


def test_a_wrong_block_is_found_without_states(checkpoints):
    engine = make_engine(checkpoints["llama"], max_num_seqs=2)
    a, b = requests = [
        Request(name, [fill] * 20, SamplingParams(max_tokens=30, temperature=0))
        for name, fill in (("a", 7), ("b", 9))
    ]
    for request in requests:
        engine.add(request)
    while b.num_output < 3:
        engine.step()
    a.memory.block_ids[1], b.memory.block_ids[1] = b.memory.block_ids[1], a.memory.block_ids[1]
    for request in requests:
        engine._runner._rows.block_table[request.row, 1] = request.memory.block_ids[1]
    with pytest.raises(SanitizerError, match=r"'a': block \d+: expected a prefix of 16 tokens"):
        engine.step()


def test_a_dummy_step_writes_nothing_but_the_null_entries(model_dir):
    engine = make_engine(model_dir, num_speculative=3, sanitize=False)
    request = Request("a", [9] * 30, SamplingParams(max_tokens=30, temperature=0))
    engine.add(request)
    while request.num_output < 3:
        engine.step()
    engine.cancel("a")
    engine.step()
    pools = engine.caches.kv, engine.caches.state
    for pool in pools:
        pool.view(torch.uint8).fill_(0x5A)
    engine.dummy_step(engine._runner.decode_shape(8))
    for pool in pools:
        if pool.numel():
            assert (pool[1:].reshape(-1).view(torch.uint8) == 0x5A).all()
