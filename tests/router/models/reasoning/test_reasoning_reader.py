"""Thinking is told apart from what follows it, wherever the text is cut."""

from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.models.answer_parts import Content, ContentReader, Reasoning, gathered
from router.models.reasoning.format_names import FORMATS, GRANITE, SEED, THINK_TAGS
from router.models.reasoning.reasoning_format import Place
from router.models.reasoning.reasoning_reader import ReasoningReader, WithoutReasoning
from router.models.reasoning.thinking_text import MAX_BLANKS, ThinkingText
from router.models.tools.call_scanner import CallScanner
from router.models.tools.format_names import FORMATS as TOOL_FORMATS
from router.models.tools.tool_format import Tool

WEATHER = Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


def reader(form, place=Place.BEFORE):
    return ReasoningReader(ThinkingText(form, place), ContentReader())


def read(made, pieces, *, is_cut=False):
    whole = gathered(
        [*chain.from_iterable(map(made.push, pieces)), *(made.cut() if is_cut else made.finish())]
    )
    return whole.reasoning, whole.content


def divided(text, cuts):
    edges = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_at_every_cut(name):
    form = FORMATS[name]
    for begin in form.begins:
        for end in form.ends:
            text = f"\n{begin}\nLet me <see>.\nHere [it] is.\n{end}\n\nThe answer.\n"
            open_text = text.removeprefix(f"\n{begin}\n")
            expected = ("Let me <see>.\nHere [it] is.\n", "The answer.\n")
            for at in range(len(text)):
                assert read(reader(form), [text[:at], text[at:]]) == expected
                pieces = [open_text[:at], open_text[at:]]
                assert read(reader(form, Place.WITHIN), pieces) == expected
            assert read(reader(form), text) == expected
            assert read(reader(form, Place.WITHIN), text) == expected  # the mark again


def test_what_does_not_begin_with_the_mark_is_content():
    for text in ("Hello <think>no</think>", "", " \n", "<thin", "</think>Hello", "<think"):
        assert read(reader(THINK_TAGS), text) == ("", text)
    after_blanks = " " * (MAX_BLANKS + 1) + "<think>a</think>b"
    assert read(reader(THINK_TAGS), after_blanks) == ("", after_blanks)
    assert read(reader(THINK_TAGS), after_blanks[1:]) == ("a", "b")


def test_a_closed_prompt_is_followed_by_content_alone():
    text = "\n<think>a</think>b"
    assert read(reader(THINK_TAGS, Place.BEHIND), [text]) == ("", text)


def test_an_answer_may_end_within_the_thinking():
    assert read(reader(THINK_TAGS), ["<think>a </thi"]) == ("a </thi", "")
    assert read(reader(THINK_TAGS, Place.WITHIN), ["\n\n"]) == ("", "")
    assert read(reader(THINK_TAGS), ["<think>a </thi"], is_cut=True) == ("a ", "")
    assert read(reader(THINK_TAGS), ["<thi"], is_cut=True) == ("", "")
    assert read(reader(THINK_TAGS), [" "], is_cut=True) == ("", " ")


SNIPPETS = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<seed:think>",
            "</seed:think>",
            "<",
            "</thin",
            "</",
            "think>",
            ">",
            "\n",
            " ",
        ),
        *("Here is my thought process:", "Here's my response:", "Here is my response:", "Here", "Here is my"),
        *("<tool_call>\n<function=", "<tool_call>", "a", "é", "\n\n"),
    ]
)
TEXTS = st.lists(SNIPPETS, max_size=12).map("".join)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([THINK_TAGS, SEED, GRANITE]),
    st.sampled_from(Place),
    TEXTS,
    st.sets(st.integers(1, 120)),
    st.booleans(),
)
def test_the_parts_do_not_depend_on_cuts(form, place, text, cuts, is_cut):
    whole = read(reader(form, place), [text], is_cut=is_cut)
    assert read(reader(form, place), divided(text, cuts), is_cut=is_cut) == whole
    assert read(reader(form, place), text, is_cut=is_cut) == whole


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([THINK_TAGS, GRANITE]), st.sampled_from(Place), TEXTS, st.sets(st.integers(1, 120)))
def test_text_without_the_watched_character_need_not_be_pushed(form, place, text, cuts):
    """As a text lane writes it: as a further piece of the newest part."""
    made, parts = reader(form, place), []
    for piece in divided(text, cuts):
        watched = made.watched
        if watched is None or (watched and watched in piece):
            parts += made.push(piece)
        else:
            parts.append(Reasoning(piece) if watched else Content(piece))
    whole = gathered([*parts, *made.finish()])
    assert (whole.reasoning, whole.content) == read(reader(form, place), [text])


def test_hidden_thinking_is_left_out():
    made = WithoutReasoning(reader(THINK_TAGS, Place.WITHIN))
    assert made.push("a") == []
    assert made.watched is None  # nothing of it must be written
    assert made.push("b</think>\n") == []
    assert made.push("c") == [Content("c")]
    assert made.watched == ""
    assert made.finish() == []


@pytest.mark.parametrize("ends", ["</think>\n\n", ""], ids=["ended", "interrupted"])
def test_calls_are_found_behind_the_thinking_or_where_they_interrupt_it(ends):
    text = f"I wonder: <tool_call>?\n{ends}{CALL}"
    for at in range(len(text)):
        rest = CallScanner(TOOL_FORMATS["qwen3_coder"], [WEATHER])
        thinking = ThinkingText(THINK_TAGS, Place.WITHIN, THINK_TAGS.interrupts)
        made = ReasoningReader(thinking, rest)
        whole = gathered([*made.push(text[:at]), *made.push(text[at:]), *made.finish()])
        assert (whole.reasoning, whole.content) == ("I wonder: <tool_call>?\n", "")
        assert [(call.name, call.arguments) for call in whole.calls] == [("weather", '{"city": "Rome"}')]


@pytest.mark.parametrize("text", ["<" * 3000, "</think" * 500, " " * 3000, "\n" * 3000, "Here is my " * 300])
def test_little_is_held_back(text):
    for form in (THINK_TAGS, GRANITE):
        for place in Place:
            made = ThinkingText(form, place, form.interrupts)
            for character in text:
                made.push(character)
                assert len(made.held) <= MAX_BLANKS + max(
                    map(len, (*form.begins, *form.ends, *form.interrupts))
                )
