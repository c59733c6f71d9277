"""Decode steps that follow each other without a plan: the same answers as step by step, and nobody waits."""

from __future__ import annotations

import math

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.request import Request
from engine.step.burst import MAX_STEPS, stream_interval
from testing.engines.speculating import assert_nothing_is_owned
from wire.errors import ConfigError
from wire.messages.sampling_params import SamplingParams

LONG_S = 60.0
"""An interval that no burst of a test reaches."""
KINDS = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 0.9, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "frequency_penalty": 0.8, "min_tokens": 20},
    "reported": {"temperature": 0, "logprobs": 2},
}


def make_engine(model_dir, interval_s, **settings):
    settings = {"max_num_seqs": 8, "max_batch_tokens": 64, "cache_memory_bytes": 64 << 20, **settings}
    return Engine(EngineConfig(model_dir, "both", device="cpu", stream_interval_s=interval_s, **settings))


def ask(name, *, length=13, max_tokens=70, stops=(), **params):
    """A request that repeats itself, so that n-gram drafts are accepted now and then."""
    prompt = [40 + (i * 7 + length) % 23 for i in range(length)]
    params.setdefault("temperature", 0)
    return Request(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        stop_token_ids=frozenset(stops),
        seed=5,
    )


def run(engine, requests):
    """Serve the requests. Return their answers, and the number of tokens in each output of each request."""
    for request in requests:
        engine.add(request)
    sizes = {request.request_id: [] for request in requests}
    while not (result := engine.step()).did_nothing:
        for output in result.outputs:
            sizes[output.request_id].append(len(output.token_ids))
    assert_nothing_is_owned(engine)
    return [(one.tokens[one.num_prompt :], one.finish_reason) for one in requests], sizes


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_answers_and_counts_are_those_of_single_steps(bundled_model, mode, k):
    settings = {"cache_mode": mode, "num_speculative": k, "drafter": "ngram" if k else None, "block_size": 8}
    single, bursting = (make_engine(bundled_model, interval_s, **settings) for interval_s in (0.0, LONG_S))

    def asks():
        return [ask(f"{kind}-{i}", length=9 + 5 * i, **KINDS[kind]) for i, kind in enumerate(list(KINDS)[:3])]

    expected, _ = run(single, asks())
    found, sizes = run(bursting, asks())
    assert found == expected
    assert max(map(max, sizes.values())) > 1 + k
    one, other = single.stats(), bursting.stats()
    assert (one.decode_tokens, one.prefill_tokens) == (other.decode_tokens, other.prefill_tokens)
    if not k:  # otherwise fewer drafts are tried beside other prompts' chunks
        assert other.num_steps == one.num_steps
    decode = bursting.measures
    assert sum(decode.steps.values()) == other.num_steps


@pytest.mark.parametrize("k", [0, 3])
def test_an_answer_that_stops_within_a_burst_ends_there(bundled_model, k):
    settings = {"num_speculative": k, "drafter": "ngram" if k else None}
    single, bursting = (make_engine(bundled_model, interval_s, **settings) for interval_s in (0.0, LONG_S))
    ((whole, _),), _ = run(single, [ask("whole", temperature=0.9)])
    for stop in dict.fromkeys(whole[2:12]):
        expected, _ = run(single, [ask(f"one-{stop}", temperature=0.9, stops=[stop]), ask("beside")])
        found, _ = run(bursting, [ask(f"one-{stop}", temperature=0.9, stops=[stop]), ask("beside")])
        assert found == expected
        assert found[0][1] == "stop"


def test_the_next_turn_goes_on_from_an_answer_that_stopped_within_a_burst(bundled_model):
    """The state that is kept is the one after the answer's last token, not after the burst's last step."""
    engine = make_engine(bundled_model, LONG_S, num_speculative=3, drafter="ngram")
    ((whole, _),), _ = run(engine, [ask("whole", temperature=0.9)])
    for stop in dict.fromkeys(whole[2:12]):
        turn = ask("turn", temperature=0.9, stops=[stop])
        turn.keeps_state = True
        engine.add(turn)
        kept = []
        while not (result := engine.step()).did_nothing:
            kept += result.kept
        assert kept == [turn]
        assert turn.num_computed == len(turn.tokens) - 1
        engine.release("turn")
        assert_nothing_is_owned(engine)


def test_rows_with_log_probabilities_are_computed_one_by_one(bundled_model):
    engine = make_engine(bundled_model, LONG_S)
    _, sizes = run(engine, [ask("reports", logprobs=1), ask("beside")])
    assert set(sizes["reports"]) == set(sizes["beside"]) == {1}


def test_a_burst_has_at_most_so_many_steps_and_ends_at_its_time(bundled_model):
    _, sizes = run(make_engine(bundled_model, LONG_S), [ask("long")])
    assert max(sizes["long"]) == MAX_STEPS
    _, sizes = run(make_engine(bundled_model, 1e-9), [ask("short")])
    assert max(sizes["short"]) == 1


def test_blocks_are_given_ahead_only_while_a_quarter_of_them_is_free(bundled_model):
    settings = {"block_size": 4, "cache_mode": "none", "max_num_seqs": 1, "max_model_len": 56}
    single, bursting = (make_engine(bundled_model, interval_s, **settings) for interval_s in (0.0, LONG_S))
    assert bursting.capacity.num_blocks == 16
    (expected, _), (found, sizes) = (
        run(engine, [ask("alone", length=9, max_tokens=40)]) for engine in (single, bursting)
    )
    assert found == expected
    assert sizes["alone"][:4] == [1, *[MAX_STEPS] * 3]
    assert max(sizes["alone"][-2:]) <= 4, "each of the last blocks was given when it was needed"


def test_an_event_ends_a_burst(bundled_model):
    """A request that comes before a burst waits for one step, not for the burst."""
    engine = make_engine(bundled_model, LONG_S)
    engine.add(ask("running"))
    while not engine.step().outputs:
        pass
    engine.bursts.wanted.set()
    (output,) = engine.step().outputs
    assert len(output.token_ids) == 1
    engine.bursts.wanted.clear()
    (output,) = engine.step().outputs
    assert len(output.token_ids) == MAX_STEPS
    engine.cancel("running")
    assert_nothing_is_owned(engine)


def test_the_loop_says_that_an_event_waits(bundled_model):
    engine = make_engine(bundled_model, LONG_S)
    loop = EngineLoop(engine, on_step=lambda result: None, on_fatal=lambda error: None)
    assert not engine.bursts.wanted
    loop.post(lambda: None)
    assert engine.bursts.wanted
    loop._handle_events(wait=False, wait_s=None)
    assert not engine.bursts.wanted


def test_tokens_of_a_burst_count_with_the_time_between_messages(bundled_model):
    engine = make_engine(bundled_model, LONG_S)
    request = ask("one", max_tokens=30)
    _, sizes = run(engine, [request])
    gaps, measured = engine.measures.inter_token_latency, request.measured
    assert sum(gaps._counts) == sum(sizes["one"]) - 1
    assert gaps.total == pytest.approx(measured.last_token_s - measured.first_token_s)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sanitize": True}, "`sanitize`, which looks at each step"),
        ({"steps_ahead": 1}, "`steps_ahead` 1, which launches steps one by one"),
        ({"tensor_parallel": 2}, "several ranks, which must take the same steps"),
    ],
)
def test_what_needs_single_steps_excludes_an_interval(tmp_path, settings, says):
    device = torch.device("cpu")
    assert stream_interval(EngineConfig(tmp_path, "both", **settings), device) == 0
    with pytest.raises(ConfigError, match=f"`stream_interval_s` 0.01 and {says}, exclude each other: use 0"):
        stream_interval(EngineConfig(tmp_path, "both", stream_interval_s=0.01, **settings), device)


def test_the_interval_is_checked(tmp_path):
    device = torch.device("cpu")
    assert stream_interval(EngineConfig(tmp_path, "both"), device) == 0.025
    assert stream_interval(EngineConfig(tmp_path, "both"), torch.device("cuda")) == 0
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=f"`stream_interval_s` must be at least 0, got {wrong}"):
            stream_interval(EngineConfig(tmp_path, "both", stream_interval_s=wrong), device)
