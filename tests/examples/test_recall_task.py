"""The recall task's prompts: their length, their answers, and that a seed names one of them."""

from __future__ import annotations

import json
import re

import pytest
from jinja2 import Template
from tokenizers import Tokenizer

from testing.oracles.recall_task import (
    ANSWER_TOKENS,
    CHAT_AFTER,
    CHAT_BEFORE,
    CHAT_TOKENS,
    MAX_PROMPT_TOKENS,
    MIN_PROMPT_TOKENS,
    chat_content,
    chat_recall_prompts,
    make_chat_recall_prompt,
    make_recall_prompt,
    recall_prompts,
)
from testing.repository import ROOT

TOKENIZER = ROOT / "twinfang" / "bundled_model" / "tokenizer.json"
LENGTHS = [MIN_PROMPT_TOKENS, 64, 65, 66, 67, 68, 69, 70, 128, 256, 512, 1024, 2048, MAX_PROMPT_TOKENS]


@pytest.mark.parametrize("length_tokens", LENGTHS)
def test_a_prompt_asks_for_the_value_of_one_of_its_distinct_keys(length_tokens: int) -> None:
    for recall in recall_prompts(0, 20, length_tokens):
        told = re.findall(r"([A-Z]{2})=(\d{3});", recall.prompt)
        assert len(told) == recall.num_pairs == len(dict(told))
        assert recall.prompt.endswith(f";?{told[recall.pair_index][0]}=")
        assert told[recall.pair_index][1] == recall.answer


@pytest.mark.parametrize("length_tokens", LENGTHS)
def test_a_prompt_has_the_length_asked_for_in_tokens_of_the_bundled_model(length_tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    for recall in recall_prompts(100, 5, length_tokens):
        assert recall.num_tokens == length_tokens
        assert len(tokenizer.encode(recall.prompt).ids) == length_tokens
        assert len(tokenizer.encode(recall.prompt + recall.answer).ids) == length_tokens + ANSWER_TOKENS


@pytest.mark.parametrize("length_tokens", [64, 100, 1024])
def test_a_chat_prompt_is_the_template_around_a_plain_one(length_tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    template = json.loads(TOKENIZER.with_name("tokenizer_config.json").read_text())["chat_template"]
    for recall in chat_recall_prompts(0, 5, length_tokens):
        messages = [{"role": "user", "content": chat_content(recall)}]
        assert Template(template).render(messages=messages, add_generation_prompt=True) == recall.prompt
        assert len(tokenizer.encode(recall.prompt).ids) == recall.num_tokens == length_tokens
    plain = make_recall_prompt(3, length_tokens - CHAT_TOKENS)
    chat = make_chat_recall_prompt(3, length_tokens)
    assert chat.prompt == CHAT_BEFORE + plain.prompt + CHAT_AFTER
    assert chat.answer == plain.answer


def test_a_seed_and_a_length_name_one_prompt() -> None:
    assert make_recall_prompt(7, 64) == make_recall_prompt(7, 64)
    assert len({recall.prompt for recall in recall_prompts(0, 100, 64)}) == 100


def test_only_the_whole_value_at_the_start_of_a_completion_is_correct() -> None:
    recall = make_recall_prompt(1, 64)
    assert recall.is_correct(recall.answer)
    assert recall.is_correct(recall.answer + ";?")
    assert not recall.is_correct(recall.answer[:2])
    assert not recall.is_correct(" " + recall.answer)


@pytest.mark.parametrize("length_tokens", [MIN_PROMPT_TOKENS - 1, MAX_PROMPT_TOKENS + 1])
def test_a_length_that_no_prompt_has_is_refused(length_tokens: int) -> None:
    with pytest.raises(ValueError, match=str(length_tokens)):
        make_recall_prompt(0, length_tokens)


@pytest.mark.parametrize("text", ["", "naïve 漢字 🎉\t\r\n", "HTTPServer v2.13  x==1", "\x00\x7f<pad"])
def test_the_bundled_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
