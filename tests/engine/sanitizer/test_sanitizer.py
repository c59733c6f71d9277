"""The sanitizer finds each planted fault before the step computes with it, and says where it is."""

import pytest
import torch

from engine.sanitizer.checksum import Checksums
from testing.engines.handing_over import (
    admit,
    assert_all_free,
    copy,
    greedy,
    make_engine,
    prefill,
    prompts,
    run,
)
from wire.errors import SanitizerError

LENGTHS = (50, 37, 18)


@pytest.fixture
def engine(bundled_model):
    return make_engine(bundled_model, "both", cache_mode="none", sanitize=True)


@pytest.fixture(scope="module")
def alone(bundled_model):
    """Greedy tokens of each of the three requests run by itself."""
    engine = make_engine(bundled_model, "both", max_batch_tokens=2048, cache_mode="none", sanitize=False)
    return {name: run(engine, [greedy(name, tokens)])[name] for name, tokens in three().items()}


@pytest.fixture(params=["mtp", "ngram"])
def speculating(bundled_model, request):
    """Four positions a row, and a state kept every 8 tokens."""
    settings = {"num_speculative": 3, "drafter": request.param, "block_size": 4, "state_block_size": 8}
    return make_engine(bundled_model, "both", sanitize=True, **settings)


def three():
    return {
        name: prompts(1, seed=i, low=n, high=n)[0]
        for i, (name, n) in enumerate(zip("abc", LENGTHS, strict=True))
    }


def start(engine):
    """Three requests that have decoded a few tokens each."""
    requests = [greedy(name, tokens) for name, tokens in three().items()]
    for request in requests:
        engine.add(request)
    while any(request.num_output < 3 for request in requests):
        engine.step()
    return requests


def first_segments(engine, slot):
    """Bytes of the first layer's conv and SSM state, as far as both go."""
    conv, ssm = engine.caches.state_layout.segments[:2]
    num_bytes = min(conv.num_bytes, ssm.num_bytes)
    state = engine.caches.state[slot]
    return tuple(state[segment.offset : segment.offset + num_bytes] for segment in (conv, ssm))


def swap_conv_and_ssm(engine, slot):
    conv, ssm = first_segments(engine, slot)
    kept = conv.clone()
    conv.copy_(ssm)
    ssm.copy_(kept)


def assert_only_one_ends(engine, requests, victim, alone, *, says):
    """The next step ends ``victim`` with an error; the others answer as if alone."""
    (failed,) = [output for output in engine.step().outputs if output.error is not None]
    assert failed.request_id == victim.request_id
    assert failed.error.code == "state_corrupted"
    for text in (victim.request_id, *says):
        assert text in failed.error.message
    run(engine)
    for request in requests:
        if request is not victim:
            assert request.tokens[request.num_prompt :] == alone[request.request_id]
    assert_all_free(engine)


# --- the six planted faults ----------------------------------------------------------------------


def test_a_wrong_slot_is_found(engine):
    a, b, _ = start(engine)
    a.memory.slots, b.memory.slots = b.memory.slots, a.memory.slots
    with pytest.raises(
        SanitizerError, match=rf"'a': slot {a.memory.state_slot}: expected h\(5\d\).*found h\(\d+\) of 'b'"
    ):
        engine.step()


def test_a_slot_that_two_rows_write_is_found(engine):
    a, b, _ = start(engine)
    a.memory.slots = b.memory.slots
    with pytest.raises(
        SanitizerError, match=rf"slot {b.memory.state_slot}: expected one row to write it.*'a', 'b'"
    ):
        engine.step()


def test_a_stale_row_of_the_block_table_is_found(engine, alone):
    requests = a, b, _ = start(engine)
    engine._runner._rows.block_table[b.row, 1] = a.memory.block_ids[1]
    says = [f"row {b.row} of the block table", str(b.memory.block_ids[1]), str(a.memory.block_ids[1])]
    assert_only_one_ends(engine, requests, b, alone, says=says)


def test_a_batch_with_a_stale_row_is_found(engine):
    start(engine)
    buffers = engine._runner._buffers
    prepare = buffers.prepare

    def stale(num_rows, **sizes):
        batch = prepare(num_rows, **sizes)
        batch.decode.block_table[1, 0] += 1
        return batch

    buffers.prepare = stale
    with pytest.raises(SanitizerError, match=r"block table of 'b'\[0\]: expected \d+; found \d+"):
        engine.step()


def test_a_state_of_one_token_less_is_found(engine, alone):
    requests = a, _, _ = start(engine)
    before = engine.caches.state[a.memory.state_slot].clone()
    engine.step()
    engine.caches.state[a.memory.state_slot] = before
    assert_only_one_ends(
        engine, requests, a, alone, says=[f"slot {a.memory.state_slot}", "conv.0", f"h({a.num_computed})"]
    )


@pytest.mark.parametrize("off", [-1, 1])
def test_a_count_that_is_off_by_one_is_found(engine, alone, off):
    requests = a, _, _ = start(engine)
    right = a.num_computed
    a.tokens.append(7)  # so that there is a token to compute either way
    a.num_computed += off
    a.num_planned += off
    says = [f"slot {a.memory.state_slot}", f"expected h({right + off})", f"found h({right}) of 'a'"]
    assert_only_one_ends(engine, requests, a, alone, says=says)


def test_swapped_conv_and_ssm_bytes_are_found(engine, alone):
    requests = _, b, _ = start(engine)
    swap_conv_and_ssm(engine, b.memory.state_slot)
    assert_only_one_ends(engine, requests, b, alone, says=[f"slot {b.memory.state_slot}", "conv.0"])


def test_conv_and_ssm_bytes_swapped_on_the_way_are_found(bundled_model):
    source = make_engine(bundled_model, "prefill", sanitize=True)
    sink = make_engine(bundled_model, "decode", sanitize=True)
    tokens = three()["a"]
    request = admit(sink, tokens, prefill(source, tokens, "a"))
    copy(source, sink, request)
    slot = request.memory.state_slot
    swap_conv_and_ssm(sink, slot)
    (failed,) = sink.transferred(request, error=None, settled=True)
    assert failed.error.code == "state_corrupted"
    assert f"slot {slot}, conv.0 as received" in failed.error.message
    run(sink)
    assert_all_free(sink)


@pytest.mark.parametrize("kind", ["block", "slot"])
def test_memory_freed_while_it_is_used_is_found(engine, kind):
    a, _, _ = start(engine)
    index = a.memory.block_ids[0] if kind == "block" else a.memory.state_slot
    pool = engine.scheduler.owned.blocks if kind == "block" else engine.scheduler.owned.slots
    pool.free([index])
    with pytest.raises(SanitizerError, match=rf"'a': {kind} {index}: expected .* it owns; found it free"):
        engine.step()


@pytest.mark.parametrize("kind", ["block", "slot"])
def test_memory_freed_early_and_handed_out_again_is_found(engine, kind):
    a, _, _ = start(engine)
    index = a.memory.block_ids[0] if kind == "block" else a.memory.state_slot
    pool = engine.scheduler.owned.blocks if kind == "block" else engine.scheduler.owned.slots
    pool.free([index])
    engine.add(greedy("d", three()["c"][:4]))  # of one block: it gets the gap
    with pytest.raises(SanitizerError, match=rf"{kind} {index}: .*'a'"):
        engine.step()


def test_a_row_that_was_not_cleared_is_found(engine):
    a, _, _ = start(engine)
    row, block_ids = a.row, list(a.memory.block_ids)
    engine._runner._rows.clear = lambda row: None
    engine.cancel("a")
    with pytest.raises(
        SanitizerError, match=rf"row {row} of the block table: nobody owns it.*{block_ids[0]}"
    ):
        engine.step()


# --- with speculation ----------------------------------------------------------------------------


def start_until(engine, holds):
    """Three requests that decode, the first with its newest state in a spec slot; and ``holds(first)``."""
    requests = start(engine)
    while requests[0].memory.read_slot or not holds(requests[0]):
        assert not engine.step().did_nothing, "it never came to that"
    return requests


def after_a_rejection(engine):
    """The first request has just had a draft, or a dummy, rejected, whose state went to a spec slot."""
    return start_until(engine, lambda r: r.memory.state_index < 3 and (r.num_computed + 1) % 8)


def after_an_acceptance(engine):
    """The first request has just had a draft accepted; the state before that is in a spec slot, too."""
    return start_until(engine, lambda r: r.memory.state_index > 0 and (r.num_computed - 1) % 8)


def test_the_slot_of_a_rejected_position_is_found(speculating, alone):
    requests = a, _, _ = after_a_rejection(speculating)
    right = a.num_computed
    a.memory.state_index += 1
    says = [
        f"slot {a.memory.state_slot}",
        f"expected h({right})",
        "found the state behind a rejected draft of 'a'",
    ]
    assert_only_one_ends(speculating, requests, a, alone, says=says)


def test_the_slot_of_an_earlier_position_is_found(speculating, alone):
    requests = a, _, _ = after_an_acceptance(speculating)
    right = a.num_computed
    a.memory.state_index -= 1
    says = [f"slot {a.memory.state_slot}", f"expected h({right})", f"found h({right - 1}) of 'a'"]
    assert_only_one_ends(speculating, requests, a, alone, says=says)


def test_a_device_that_reads_the_slot_of_a_rejected_position_is_found(speculating):
    """The tables on the host are right; the batch is not."""
    a, _, _ = after_a_rejection(speculating)
    right, wrong = a.memory.state_slot, a.memory.slots[a.memory.state_index + 1]
    speculating._runner.state.state_slot[a.row] = wrong
    with pytest.raises(SanitizerError, match=rf"read_slots\[\d\]: expected {right}; found {wrong}"):
        speculating.step()


@pytest.mark.parametrize("at", [0, 3])
def test_a_spec_slot_that_two_rows_share_is_found(speculating, at):
    a, b, _ = start(speculating)
    a.memory.slots[at] = b.memory.slots[3]
    with pytest.raises(
        SanitizerError, match=rf"slot {b.memory.slots[3]}: expected one row to write it.*'a', 'b'"
    ):
        speculating.step()


def test_a_spec_slot_that_is_a_cached_state_is_found(speculating):
    """It would be written over what later requests start from."""
    a, _, _ = start(speculating)
    tags = speculating._checks._states._tags
    states = speculating.scheduler.owned.cache._states
    slot = next(state.slot for state in states if tags.current(state.slot).writer == "b")
    a.memory.slots[3] = slot
    found = rf"'a': slot {slot}: expected nothing before its first use; found h\(\d+\) of 'b'"
    with pytest.raises(SanitizerError, match=found):
        speculating.step()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_boundary_slot_that_is_read_before_it_was_passed_is_found(speculating, alone, is_written):
    """Either only a rejected draft has reached it, or nothing has been written there yet."""
    requests = a, _, _ = start_until(speculating, lambda request: request.memory.boundary is not None)
    slot, right = a.memory.boundary.slot, a.num_computed
    if not is_written:
        slots = speculating.scheduler.owned.slots
        slots.free([slot])
        (slot,) = slots.allocate(1)
    a.memory.boundary, a.memory.read_slot = None, slot  # as when it counts as passed
    if is_written:
        says = [f"slot {slot}", f"expected h({right})", "found the state behind a rejected draft of 'a'"]
        assert_only_one_ends(speculating, requests, a, alone, says=says)
        return
    with pytest.raises(SanitizerError, match=rf"'a': slot {slot}: expected h\({right}\).*; found"):
        speculating.step()


def test_bytes_of_a_spec_slot_that_changed_are_found(speculating, alone):
    requests = a, _, _ = after_an_acceptance(speculating)
    swap_conv_and_ssm(speculating, a.memory.state_slot)
    says = [f"slot {a.memory.state_slot}", "conv.0", f"h({a.num_computed})"]
    assert_only_one_ends(speculating, requests, a, alone, says=says)


def test_what_a_rejected_position_left_in_its_slot_is_nobodys_business(speculating, alone):
    requests = a, _, _ = after_a_rejection(speculating)
    swap_conv_and_ssm(speculating, a.memory.slots[a.memory.state_index + 1])
    run(speculating)
    assert all(r.tokens[r.num_prompt :] == alone[r.request_id] for r in requests)


# --- what else it promises -----------------------------------------------------------------------


def test_freed_memory_is_nan_before_anyone_may_use_it(engine):
    a, _, _ = start(engine)
    slot, block_ids = a.memory.state_slot, list(a.memory.block_ids)
    engine.cancel("a")
    engine.step()
    assert engine.caches.kv[block_ids].isnan().all()
    for views in (engine.caches.layers.conv, engine.caches.layers.ssm):
        assert all(view[slot].isnan().all() for view in views)


def test_a_damaged_state_of_the_prefix_cache_ends_the_process_and_not_a_request(bundled_model):
    engine = make_engine(bundled_model, "both", cache_mode="align", sanitize=True)
    tokens = three()["a"]
    run(engine, [greedy("first", tokens)])
    (state,) = [s for s in engine.scheduler.owned.cache._states if s.node.num_blocks == 3]
    swap_conv_and_ssm(engine, state.slot)
    engine.add(greedy("second", tokens))
    with pytest.raises(SanitizerError, match=f"'second': slot {state.slot}, conv.0"):
        engine.step()


def test_a_block_damaged_on_the_way_is_named(bundled_model):
    source = make_engine(bundled_model, "prefill", sanitize=True)
    sink = make_engine(bundled_model, "decode", sanitize=True)
    tokens = three()["a"]
    ticket = prefill(source, tokens, "a")
    request = admit(sink, tokens, ticket)
    copy(source, sink, request)
    sink.caches.kv[request.memory.block_ids[-1], :, :, :, ticket.num_tokens % 16 :] = (
        1.0  # beyond what is covered
    )
    sink.caches.kv[request.memory.block_ids[2], 0, 0, 0, 0, 0] += 1.0
    block_id = request.memory.block_ids[2]
    (failed,) = sink.transferred(request, error=None, settled=True)
    assert f"block {block_id} as received" in failed.error.message


def test_a_preempted_request_whose_copy_was_damaged_ends_alone(bundled_model):
    settings = {"max_model_len": 128, "block_size": 4, "cache_mode": "none", "sanitize": True}
    engine = make_engine(bundled_model, "both", **settings)
    blocks = engine.scheduler.owned.blocks
    blocks.allocate(blocks.num_free - 32)
    requests = [greedy(str(i), prompts(1, seed=i, low=15, high=15)[0], max_tokens=60) for i in range(4)]
    for request in requests:
        engine.add(request)
    while not engine.scheduler.preempted:
        engine.step()
    victim = next(iter(engine.scheduler.preempted))
    with torch.inference_mode():
        engine._store._stored[victim].kv.host[0] += 1
    outputs = []
    while not (result := engine.step()).did_nothing:
        outputs += result.outputs
    ended = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ended == {r.request_id: "error" if r.request_id == victim else "length" for r in requests}


# --- checksums -----------------------------------------------------------------------------------


def test_every_bit_and_every_exchange_of_words_changes_a_checksum(engine):
    sums, state = Checksums(engine.caches), engine.caches.state
    state[1] = torch.randint(0, 256, state[1].shape, dtype=torch.uint8)
    slot = torch.tensor([1])
    right = sums.states(slot).clone()
    words = state[1].view(torch.int32)
    for segment in engine.caches.state_layout.segments:
        at = segment.offset // 4
        for bit in range(32):
            words[at] ^= 1 << bit if bit < 31 else -(1 << 31)
            words[at + 1] ^= 1 << bit if bit < 31 else -(1 << 31)
            changed = (sums.states(slot) != right)[0].nonzero().flatten().tolist()
            assert [sums.segment_of(chunk) for chunk in changed] == [segment.name]
            words[at] ^= 1 << bit if bit < 31 else -(1 << 31)
            words[at + 1] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert torch.equal(sums.states(slot), right)
        words[[at, at + 1]] = words[[at + 1, at]]
        assert not torch.equal(sums.states(slot), right)
        words[[at, at + 1]] = words[[at + 1, at]]
