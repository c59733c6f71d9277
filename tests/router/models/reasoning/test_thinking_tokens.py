"""The tokens between the marks are counted, however they arrive."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.models.reasoning.format_names import GRANITE, THINK_TAGS
from router.models.reasoning.reasoning_format import Place
from router.models.reasoning.thinking_text import ThinkingText
from router.models.reasoning.thinking_tokens import ThinkingTokens
from router.models.tokenizer import Tokenizer
from testing.router.tokenizers import byte_level, with_marks

MARKED = Tokenizer(with_marks("<think>", "</think>"))
PLAIN = byte_level()


def counted(tokenizer, form, place, steps):
    """The counts behind each step."""
    counter = ThinkingTokens(ThinkingText(form, place), tokenizer.decode_token)
    num_tokens, counts = 0, []
    for step in steps:
        num_tokens += len(step)
        counter.push(step, num_tokens)
        counts.append(counter.among(num_tokens))
    return counts


def test_the_tokens_between_the_marks_count():
    ids = MARKED.encode_now("<think>\nWell, a < b.\n</think>\n\nHello")
    begin, end = (ids.index(MARKED.added_id(mark)) for mark in ("<think>", "</think>"))
    thinking = end - begin - 1
    assert counted(MARKED, THINK_TAGS, Place.BEFORE, [ids]) == [thinking]
    assert counted(MARKED, THINK_TAGS, Place.WITHIN, [ids[1:]]) == [thinking]
    assert counted(MARKED, THINK_TAGS, Place.BEHIND, [ids[1:]]) == [0]
    assert counted(MARKED, THINK_TAGS, Place.BEFORE, [ids[end + 1 :]]) == [0]
    assert counted(MARKED, THINK_TAGS, Place.BEFORE, [ids[:end]]) == [thinking]
    assert counted(MARKED, THINK_TAGS, Place.BEFORE, [ids[:1] + ids[end:]]) == [0]
    one_by_one = [[token_id] for token_id in ids]
    expected = [0, *range(1, thinking + 1), *[thinking] * (len(ids) - end)]
    assert counted(MARKED, THINK_TAGS, Place.BEFORE, one_by_one) == expected


def test_marks_of_several_tokens_do_not_count():
    said = PLAIN.encode_now(" Well, it is.\n")
    begin, end, behind = map(
        PLAIN.encode_now, ("Here is my thought process:", "Here is my response:", " Hello.")
    )
    ids = [*begin, *said, *end, *behind]
    assert counted(PLAIN, GRANITE, Place.BEFORE, [ids]) == [len(said)]
    assert counted(PLAIN, GRANITE, Place.BEFORE, [[i] for i in ids])[-1] == len(said)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<", " a", "é", "</", "think", ">", "\n"]), max_size=12),
    st.lists(st.integers(1, 5), min_size=30, max_size=30),
    st.booleans(),
)
def test_tokens_that_a_lane_wrote_count_too(words, sizes, has_end):
    said = MARKED.encode_now("".join(words).replace("</think>", ""))
    ids = [*said, MARKED.added_id("</think>"), 70] if has_end else said
    text = ThinkingText(THINK_TAGS, Place.WITHIN)
    counter, done = ThinkingTokens(text, MARKED.decode_token), 0
    for size in sizes:
        step = ids[done : done + size]
        done += len(step)
        watched = text.watched
        if watched is None or any(watched in MARKED.decode_token(token_id) for token_id in step):
            counter.push(step, done)
    assert counter.among(done) == len(said)
