"""Budgets of thinking end it as their definition says, whatever was drafted and however steps fall."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.row_fields import send
from engine.request import Request
from engine.sampling.thinking_automaton import OVER, ThinkingAutomaton, is_thinking
from engine.sampling.thinking_budgets import ThinkingBudgets
from wire.messages.sampling_params import SamplingParams, Thinking

CPU = torch.device("cpu")
TOKENS = st.integers(0, 3)
"""So few that marks occur in marks, and in answers by chance."""
MARKS = st.lists(TOKENS, min_size=1, max_size=5).map(tuple)
THINKINGS = st.builds(
    Thinking, begin_token_ids=MARKS, end_token_ids=MARKS, is_open=st.booleans(), budget=st.integers(0, 12)
)
ANSWERS = st.lists(TOKENS, max_size=40)


def thinking_in(thinking, answer):
    """The tokens of ``answer`` from where its thinking began; None if it has not begun, or has ended."""
    begin, end = list(thinking.begin_token_ids), list(thinking.end_token_ids)
    first = 0 if thinking.is_open else len(begin)
    if not thinking.is_open and answer[:first] != begin:
        return None
    text = answer[first:]
    has_ended = any(text[i : i + len(end)] == end for i in range(len(text)))
    return None if has_ended else text


def forced_after(thinking, answer):
    """The token that the budget forces after ``answer``; None if it leaves the choice free."""
    text = thinking_in(thinking, answer)
    if text is None or len(text) < thinking.budget:
        return None
    end = list(thinking.end_token_ids)
    return next(end[n] for n in reversed(range(len(end))) if n == 0 or text[-n:] == end[:n])


@given(THINKINGS, ANSWERS)
def test_the_automaton_is_in_the_thinking_where_the_definition_is(thinking, answer):
    automaton = ThinkingAutomaton.of(thinking)
    for length in range(len(answer) + 1):
        state, num_tokens = automaton.follow(thinking, answer[:length])
        text = thinking_in(thinking, answer[:length])
        assert is_thinking(state) == (text is not None)
        if text is not None:
            assert num_tokens == len(text)


def filled(thinkings, answers):
    budgets = ThinkingBudgets(len(thinkings), CPU)
    for row, (thinking, answer) in enumerate(zip(thinkings, answers, strict=True)):
        request = Request(f"r{row}", [7, 8, *answer], SamplingParams(max_tokens=99, thinking=thinking))
        request.num_prompt, request.row = 2, row
        budgets.fill(request)
    send([budgets.fields])
    return budgets


@settings(max_examples=60)
@given(st.lists(st.tuples(THINKINGS | st.none(), ANSWERS, ANSWERS), min_size=1, max_size=5), st.data())
def test_steps_with_any_drafts_write_what_the_definition_says(cases, data):
    """The model's choice at index i is ``wishes[i]``, or what the budget forces."""
    thinkings, _, wishes = zip(*cases, strict=True)
    answers = [list(answer[:9]) for _, answer, _ in cases]
    budgets = filled(thinkings, answers)
    num_drafts = data.draw(st.integers(0, 4))
    rows = torch.arange(len(cases) + 1)  # the last one is padding
    for _ in range(12):
        drafts = data.draw(
            st.lists(
                st.lists(TOKENS, min_size=num_drafts, max_size=num_drafts),
                min_size=len(rows),
                max_size=len(rows),
            )
        )
        chosen = [
            [wish[len(answer) + i] if len(answer) + i < len(wish) else i % 4 for i in range(1 + num_drafts)]
            for wish, answer in zip(wishes, answers, strict=True)
        ]
        chosen.append([0] * (1 + num_drafts))
        token_ids = budgets.force(
            torch.tensor(chosen), rows, torch.tensor(drafts, dtype=torch.int64).view(len(rows), num_drafts)
        ).tolist()
        assert token_ids[-1] == chosen[-1]
        accepted = [0] * len(rows)
        for row, (thinking, answer) in enumerate(zip(thinkings, answers, strict=True)):
            for i, token_id in enumerate(token_ids[row]):
                forced = None if thinking is None else forced_after(thinking, answer)
                assert token_id == (chosen[row][i] if forced is None else forced)
                answer.append(token_id)
                accepted[row] = i + 1
                if i < num_drafts and drafts[row][i] != token_id:
                    break
        budgets.commit(rows, torch.tensor(token_ids), torch.tensor(accepted, dtype=torch.int32))


@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_end_that_the_model_has_begun_is_completed(written):
    thinking = Thinking((9,), (5, 6, 7), is_open=True, budget=4)
    answer = [1, 1, 1, 1, *(5, 6)[:written]][-4:]
    budgets = filled([thinking], [answer])
    for token_id in (5, 6, 7)[written:]:
        token_ids = budgets.force(
            torch.tensor([[1]]), torch.tensor([0]), torch.zeros(1, 0, dtype=torch.int64)
        )
        assert token_ids.tolist() == [[token_id]]
        budgets.commit(torch.tensor([0]), token_ids, torch.tensor([1]))
    free = budgets.force(torch.tensor([[1]]), torch.tensor([0]), torch.zeros(1, 0, dtype=torch.int64))
    assert free.tolist() == [[1]]


def test_a_cleared_row_is_as_fresh():
    fresh = ThinkingBudgets(1, CPU)
    used = filled([Thinking((1, 2), (3, 4), is_open=False, budget=0)], [[1, 2, 3]])
    assert used.fields.device["state"][0] != OVER
    used.clear(0)
    send([used.fields])
    for name, table in fresh.fields.device.items():
        assert torch.equal(used.fields.device[name], table), name
