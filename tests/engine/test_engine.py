"""Engines in one process: roles, chunking, batching and hand-over give the same greedy tokens.

The hand-over here is a copy of blocks and slot from one engine's pools to the other's; that NIXL does the
same between processes is shown in ``tests/end_to_end``.
"""

import pytest

from engine.request import Request
from testing.engines.handing_over import assert_all_free, greedy, hand_over, make_engine, prompts, run
from wire.messages.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def alone(bundled_model):
    """Greedy tokens of each prompt run by itself, whole, in one engine of both roles."""
    engine = make_engine(bundled_model, "both", max_batch_tokens=2048)
    return [run(engine, [greedy("r", prompt)])["r"] for prompt in prompts(12)]


@pytest.mark.parametrize("budget", [8, 16, 64, 512])
def test_batched_and_chunked_equals_alone_and_whole(bundled_model, alone, budget):
    engine = make_engine(bundled_model, "both", max_batch_tokens=budget)
    tokens = run(engine, [greedy(str(i), prompt) for i, prompt in enumerate(prompts(12))])
    assert [tokens[str(i)] for i in range(12)] == alone


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_handed_over_equals_monolithic(bundled_model, alone, block_size):
    source = make_engine(bundled_model, "prefill", block_size=block_size)
    sink = make_engine(bundled_model, "decode", block_size=block_size)
    requests = []
    for i, prompt in enumerate(prompts(12)):
        requests.append(hand_over(source, sink, prompt, name=str(i)))  # those before decode meanwhile
        if i % 5 == 4:
            run(sink)
    run(sink)
    assert [request.tokens[request.num_prompt :] for request in requests] == alone
    for engine in (source, sink):
        assert_all_free(engine)


def test_a_two_token_prompt_reaches_the_decode_engine_as_one_decode_row(bundled_model):
    source, sink = make_engine(bundled_model, "prefill"), make_engine(bundled_model, "decode")
    hand_over(source, sink, [17, 23])
    batches = []
    forward = sink.model.forward
    sink.model.forward = lambda batch, caches: batches.append(batch) or forward(batch, caches)
    sink.step()
    assert batches[0].decode.num_rows == 1
    assert batches[0].prefill is None


def test_a_one_token_prompt_starts_from_the_zero_state_whatever_its_slot_held(bundled_model):
    engine = make_engine(bundled_model, "both")
    clean = run(engine, [greedy("clean", [17])])["clean"]
    engine.caches.state.fill_(0x7F)
    engine.caches.kv.fill_(float("nan"))
    assert run(engine, [greedy("dirty", [17])])["dirty"] == clean


def test_null_entries_stay_as_they_were(bundled_model):
    engine = make_engine(bundled_model, "both")
    engine.caches.kv[0] = float("nan")
    engine.caches.state[0] = 0x55
    run(engine, [greedy(str(i), prompt) for i, prompt in enumerate(prompts(6))])
    assert engine.caches.kv[0].isnan().all()
    assert (engine.caches.state[0] == 0x55).all()


@pytest.mark.parametrize("sanitize", [False, True])
def test_a_damaged_request_ends_with_an_error_and_no_other_does(bundled_model, alone, sanitize):
    engine = make_engine(bundled_model, "both", max_batch_tokens=2048, sanitize=sanitize)
    requests = [greedy(str(i), prompt) for i, prompt in enumerate(prompts(4))]
    for request in requests:
        engine.add(request)
    outputs = list(engine.step().outputs)
    for views in (engine.caches.layers.ssm, engine.caches.layers.conv):
        for view in views:
            view[requests[1].memory.state_slot] = float("nan")
    while not (result := engine.step()).did_nothing:
        outputs += result.outputs
    ended = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ended == {"0": "length", "1": "error", "2": "length", "3": "length"}
    shown_by = {"state": 1, "logits": 0} if sanitize else {"state": 0, "logits": 1}
    assert engine.measures.state_faults == shown_by
    for i in (0, 2, 3):
        tokens = [token for output in outputs if output.request_id == str(i) for token in output.token_ids]
        assert tokens == alone[i]
    assert_all_free(engine)


def test_cancelled_requests_give_everything_back_and_disturb_nobody(bundled_model, alone):
    engine = make_engine(bundled_model, "both")
    for i, prompt in enumerate(prompts(12)):
        engine.add(greedy(str(i), prompt))
    tokens = {str(i): [] for i in range(12)}
    steps = 0
    while not (result := engine.step()).did_nothing:
        for output in result.outputs:
            tokens[output.request_id] += output.token_ids
        steps += 1
        if steps % 4 == 0 and steps // 4 <= 4:
            engine.cancel(str(3 * (steps // 4 - 1)))
    assert all(tokens[str(i)] == alone[i] for i in range(12) if i % 3)
    assert_all_free(engine)


def test_only_after_the_last_answer_an_engine_may_rest(bundled_model):
    engine = make_engine(bundled_model, "both", max_batch_tokens=16)
    engine.add(greedy("short", [17, 23], max_tokens=1))
    engine.add(greedy("long", list(range(5, 45)), max_tokens=3))
    seen = []
    while not (result := engine.step()).did_nothing:
        seen.append((result.may_rest, {one.request_id for one in result.outputs if one.finish_reason}))
    assert [ended for may_rest, ended in seen if may_rest] == [{"long"}]
    assert {"short"} in [ended for may_rest, ended in seen if not may_rest]


def test_an_engine_that_has_prefilled_all_its_prompts_may_rest(bundled_model):
    source, sink = make_engine(bundled_model, "prefill"), make_engine(bundled_model, "decode")
    hand_over(source, sink, [17, 23, 5])
    assert not sink.step().may_rest, "its state has come: it decodes"
    run(sink)
    for prompt in ([17, 23], [17, 23, 5]):
        source.add(Request("p", prompt, params=None))
        assert source.step().may_rest, "it is prefilled, and held for another server"
        source.release("p")


def test_seeded_sampling_is_the_same_alone_and_batched(bundled_model):
    def sampled(i):
        params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9 if i % 2 else 1.0)
        return Request(str(i), prompts(8)[i], params, seed=1000 + i)

    engine = make_engine(bundled_model, "both")
    together = run(engine, [sampled(i) for i in range(8)])
    for i in range(8):
        assert run(engine, [sampled(i)])[str(i)] == together[str(i)]


def test_stop_tokens_and_limits_end_a_request(bundled_model, alone):
    engine = make_engine(bundled_model, "both")
    prompt, tokens = prompts(12)[0], alone[0]
    stop = tokens[5]
    request = greedy("stopped", prompt)
    request.stop_token_ids = frozenset({stop})
    assert run(engine, [request])["stopped"] == tokens[: tokens.index(stop) + 1]
    assert request.finish_reason == "stop"
    assert len(run(engine, [greedy("short", prompt, max_tokens=3)])["short"]) == 3


def test_prompt_logprobs_do_not_depend_on_chunking(bundled_model):
    prompt = prompts(1, low=90, high=90)[0]

    def score(budget):
        engine = make_engine(bundled_model, "both", max_batch_tokens=budget, max_num_seqs=4)
        request = greedy("r", prompt, max_tokens=1)
        request.prompt_logprobs_wanted = 2
        run(engine, [request])
        return request.prompt_logprobs

    whole, chunked = score(2048), score(7)
    assert [one.token_id for one in whole] == prompt[1:] == [one.token_id for one in chunked]
    for one, other in zip(whole, chunked, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top[0][1] >= one.top[1][1]
