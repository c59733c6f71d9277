"""Which sampling parameters a server takes: none by which finite logits could become infinite."""

import pytest

from wire.errors import InvalidRequestError
from wire.messages.sampling_params import MAX_MARK_TOKENS, THINKING_BUDGETS, SamplingParams, Thinking

LIMITS = {
    "temperature": (0.0, 1e4),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_p": (0.0, 1.0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_number_outside_its_limits_is_refused_with_them(name):
    low, high = LIMITS[name]
    for value in (low, high):
        SamplingParams(max_tokens=1, **{name: value})
    for value in (low - 1e-6, high + 1e-6, -1e300, 1e300, float("inf"), float("-inf"), float("nan")):
        with pytest.raises(InvalidRequestError) as raised:
            SamplingParams(max_tokens=1, **{name: value})
        assert str(raised.value) == f"{name} must be between {low} and {high}, got {value}"
        assert raised.value.param == name


@pytest.mark.parametrize("bias", [-100.1, 100.1, 1e300, float("inf"), float("nan")])
def test_a_bias_outside_its_limits_is_refused(bias):
    with pytest.raises(InvalidRequestError, match=r"logit_bias must be between -100\.0 and 100\.0"):
        SamplingParams(max_tokens=1, logit_bias=((5, bias),))


@pytest.mark.parametrize("value", [1e-40, 1e-38, 1e-9, 0.0])
def test_a_repetition_penalty_by_which_logits_overflow_is_refused(value):
    with pytest.raises(InvalidRequestError, match="repetition_penalty must be between"):
        SamplingParams(max_tokens=1, repetition_penalty=value)


@pytest.mark.parametrize("name", ["begin_token_ids", "end_token_ids"])
def test_a_mark_of_thinking_has_a_bounded_number_of_tokens_of_the_vocabulary(name):
    def params(mark):
        marks = {"begin_token_ids": (1,), "end_token_ids": (2,)} | {name: mark}
        return SamplingParams(max_tokens=1, thinking=Thinking(**marks, is_open=True))

    params(tuple(range(MAX_MARK_TOKENS))).check_vocabulary(MAX_MARK_TOKENS)
    for mark in ((), tuple(range(MAX_MARK_TOKENS + 1))):
        with pytest.raises(InvalidRequestError) as raised:
            params(mark)
        assert (
            str(raised.value)
            == f"thinking.{name} (their count) must be between 1 and {MAX_MARK_TOKENS}, got {len(mark)}"
        )
        assert raised.value.param == f"thinking.{name}"
    for token_id in (-1, 9):
        with pytest.raises(InvalidRequestError, match=f"thinking.{name} must be between 0 and 8, got"):
            params((3, token_id)).check_vocabulary(9)


def test_a_budget_of_thinking_outside_its_limits_is_refused():
    low, high = THINKING_BUDGETS
    for value in (low, high, None):
        Thinking((1,), (2,), is_open=False, budget=value)
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidRequestError, match=f"between {low} and {high}, got {value}"):
            Thinking((1,), (2,), is_open=False, budget=value)
