"""Formats are recognised from templates, and whether the model thinks is read from the prompt."""

import typing

import pytest

from router.config import ReasoningParserName
from router.models.chat_template import ChatTemplate
from router.models.reasoning.format_names import (
    FORMATS,
    GLM,
    GRANITE,
    MISTRAL,
    SEED,
    THINK_TAGS,
    reasoning_format,
)
from router.models.reasoning.model_reasoning import ModelReasoning
from router.models.reasoning.reasoning_format import Place
from router.models.tokenizer import Tokenizer
from testing.router.tokenizers import with_marks
from wire.errors import InvalidRequestError

OFF = {"enable_thinking": False}
TEMPLATES = {
    "deepseek-r1": "{{ '</think>' in messages[0].content }}<|Assistant|><think>\n",
    "deepseek-v3.1": "<|Assistant|>{{ '<think>' if thinking else '</think>' }}",
    "glm-4.6": "[gMASK]<sop><|user|>\n{{ messages[0].content }}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}",
    "granite-3.2": "{% if thinking %}'Here is my thought process:', 'Here is my response:'{% endif %}"
    "<|start_of_role|>assistant<|end_of_role|>",
    "kimi-k2": "<|im_assistant|>assistant<|im_middle|>{# <think></think> #}",
    "ministral-3": "[INST]{{ messages[0].content }}[/INST]{# [THINK] [/THINK] #}",
    "nemotron-3": "<|im_start|>assistant\n"
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\n' }}",
    "plain": "{{ messages[0].content }}<|assistant|>",
    "qwen3": "<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '' }}",
    "seed-oss": "<seed:bos>assistant\n{# </seed:think> #}"
    "{{ '<seed:think><seed:cot_budget_reflect>' if thinking_budget == 0 else '' }}",
}


@pytest.mark.parametrize(
    ("name", "form", "places"),
    [
        ("deepseek-r1", THINK_TAGS, {(): Place.WITHIN}),
        ("deepseek-v3.1", THINK_TAGS, {(): Place.BEHIND, ("thinking", True): Place.WITHIN}),
        ("glm-4.6", GLM, {(): Place.BEFORE, ("enable_thinking", False): Place.BEHIND}),
        ("granite-3.2", GRANITE, {(): Place.BEFORE}),
        ("kimi-k2", THINK_TAGS, {(): Place.BEFORE}),
        ("ministral-3", MISTRAL, {(): Place.BEFORE}),
        ("nemotron-3", THINK_TAGS, {(): Place.WITHIN, ("enable_thinking", False): Place.BEHIND}),
        ("plain", None, {}),
        ("qwen3", THINK_TAGS, {(): Place.BEFORE, ("enable_thinking", False): Place.BEHIND}),
        ("seed-oss", SEED, {(): Place.BEFORE, ("thinking_budget", 0): Place.WITHIN}),
    ],
)
def test_a_template_shows_the_format_and_the_prompt_the_place(name, form, places):
    template = ChatTemplate({"default": TEMPLATES[name]}, {})
    assert reasoning_format("auto", template) is form
    for variable, place in places.items():
        variables = dict([variable]) if variable else {}
        prompt = template.render({"messages": [{"role": "user", "content": "<think>"}], **variables})
        assert form.place_behind(prompt) is place


def test_a_format_may_be_named():
    template = ChatTemplate({"default": TEMPLATES["qwen3"]}, {})
    assert reasoning_format("none", template) is None
    assert reasoning_format("auto", None) is None
    assert reasoning_format("mistral", template) is MISTRAL
    assert {"auto", "none", *FORMATS} == set(typing.get_args(ReasoningParserName))


def test_all_end_marks_of_a_format_begin_with_the_same_character():
    for form in FORMATS.values():
        assert len({mark[0] for mark in (*form.ends, *form.interrupts)}) == 1


@pytest.mark.parametrize("place", [Place.BEFORE, Place.WITHIN])
def test_servers_are_told_of_marks_that_are_tokens(place):
    tokenizer = Tokenizer(with_marks("<think>", "</think>"))
    ids = tokenizer.added_id("<think>"), tokenizer.added_id("</think>")
    prompt = "<think>\n" if place is Place.WITHIN else "Hello"
    reasoning = ModelReasoning(THINK_TAGS, tokenizer).behind(prompt)
    assert reasoning.message(has_grammar=False, budget=None) is None
    for budget, has_grammar in ((None, True), (0, False), (17, True)):
        message = reasoning.message(has_grammar=has_grammar, budget=budget)
        assert (message.begin_token_ids, message.end_token_ids) == ((ids[0],), (ids[1],))
        assert (message.is_open, message.budget) == (place is Place.WITHIN, budget)
    closed = ModelReasoning(THINK_TAGS, tokenizer).behind("<think></think>\n\n")
    assert closed.message(has_grammar=True, budget=17) is None


def test_glm_begins_its_thinking_with_a_line_break():
    tokenizer = Tokenizer(with_marks("<think>", "</think>"))
    message = ModelReasoning(GLM, tokenizer).behind("<|assistant|>").message(has_grammar=True, budget=None)
    assert message.begin_token_ids == (*tokenizer.encode_now("\n"), tokenizer.added_id("<think>"))


def test_marks_that_are_only_text_leave_no_thinking_before_a_grammar():
    """Their text can be written with other tokens, so a server could miss the end of the thinking."""
    tokenizer = Tokenizer(with_marks())
    reasoning = ModelReasoning(THINK_TAGS, tokenizer)
    forced = reasoning.behind("<think>\n").message(has_grammar=True, budget=None)
    assert (forced.budget, forced.end_token_ids) == (0, tuple(tokenizer.encode_now("</think>")))
    assert reasoning.behind("Hello").message(has_grammar=True, budget=None) is None
    assert reasoning.behind("Hello").message(has_grammar=False, budget=0) is None
    assert reasoning.behind("<think>\n").message(has_grammar=False, budget=0).budget == 0
    with pytest.raises(InvalidRequestError, match="thinking_token_budget is 9, but this model's tokenizer"):
        reasoning.behind("<think>\n").message(has_grammar=False, budget=9)
