"""Answers of engines in different roles and batches, with log-probabilities, to be compared bit for bit."""

from __future__ import annotations

from engine.request import Request
from testing.engines.handing_over import copy, make_engine, prefill
from testing.engines.sanitizing import SANITIZE
from wire.messages.sampling_params import SamplingParams

NUM_TOKENS = 24


def request(name, tokens, ticket=None):
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=1)
    return Request(name, list(tokens), params, ticket=ticket)


def answers_of(engine, requests=()):
    """Tokens and their log-probabilities by request id: hardly a bit of a state can differ and not show."""
    for one in requests:
        engine.add(one)
    answers = {}
    while not (result := engine.step()).did_nothing:
        for output in result.outputs:
            assert output.error is None, output.error
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            answers.setdefault(output.request_id, []).extend(pairs)
    return answers


def all_at_once(engine, prompts):
    return answers_of(engine, [request(str(i), tokens) for i, tokens in enumerate(prompts)])


def one_by_one(engine, prompts):
    answers = {}
    for i, tokens in enumerate(prompts):
        answers |= answers_of(engine, [request(str(i), tokens)])
    return answers


def handed_over(source, sink, prompts):
    answers = {}
    for i, tokens in enumerate(prompts):
        ticket = prefill(source, tokens, str(i))
        arriving = request(str(i), tokens, ticket)
        sink.add(arriving)
        assert sink.step().to_transfer == [arriving]
        copy(source, sink, arriving)
        source.release(str(i))
        assert sink.transferred(arriving, error=None, settled=True) == []
        answers |= answers_of(sink)
    return answers


def tokens_of(answers):
    return [[token for token, _ in answers[name]] for name in sorted(answers)]


def assert_all_agree(model, prompts, mode, k, *, compare=lambda answers: answers, **settings):
    """Alone and without drafts, in a batch with them, handed over; cold and warm: the same bits.

    Returns the tokens.
    """
    settings = {"cache_mode": mode, "max_batch_tokens": 160, "max_num_seqs": 5, **settings}
    settings.setdefault("sanitize", SANITIZE)
    alone = one_by_one(make_engine(model, "both", **settings), prompts)
    drafting = {**settings, "num_speculative": k}
    both = make_engine(model, "both", **drafting)
    source, sink = (make_engine(model, role, **drafting) for role in ("prefill", "decode"))
    for warmth in ("cold", "warm"):
        assert compare(all_at_once(both, prompts)) == compare(alone), warmth
        assert compare(handed_over(source, sink, prompts)) == compare(alone), warmth
    return tokens_of(alone)
