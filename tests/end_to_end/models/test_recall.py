"""The recall task is answered equally well monolithic and disaggregated. A damaged state would show here
first."""

import pytest

from testing.fleets.clients import all_at_once
from testing.oracles.recall_task import ANSWER_TOKENS, make_chat_recall_prompt, make_recall_prompt

LENGTHS = [64, 128, 256, 512, 1024]
PER_LENGTH = 16


def questions():
    forms = (make_recall_prompt, make_chat_recall_prompt)
    return [
        form(10_000 + seed, length) for length in LENGTHS for form in forms for seed in range(PER_LENGTH // 2)
    ]


async def recall(stack):
    """The answers, and the share of exact matches by length."""
    bodies = [
        {"prompt": question.prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0} for question in questions()
    ]
    texts = [answer.text for answer in await all_at_once(stack, bodies)]
    right = [question.is_correct(text) for question, text in zip(questions(), texts, strict=True)]
    shares = {
        length: sum(right[i * PER_LENGTH : (i + 1) * PER_LENGTH]) / PER_LENGTH
        for i, length in enumerate(LENGTHS)
    }
    return texts, shares


async def test_recall_is_exact_and_equal_monolithic_and_disaggregated(stacks):
    texts, tables = {}, {}
    for command in ("serve", "up"):
        texts[command], tables[command] = await recall(stacks(command, "--max-num-seqs", "16"))
        print(command, tables[command])
    assert texts["serve"] == texts["up"]
    assert tables["serve"] == tables["up"]
    assert sum(tables["up"].values()) / len(LENGTHS) == pytest.approx(1.0, abs=0.05)
