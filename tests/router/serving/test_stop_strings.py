import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.serving.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include_in_output=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def expected(stops: list[str], text: str, *, include: bool = False) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


letters = st.text(alphabet="ab", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


@given(stop_lists, st.lists(letters, max_size=8), st.booleans())
def test_the_match_does_not_depend_on_how_the_text_is_cut(stops, pieces, include):
    assert run(stops, pieces, include=include) == expected(stops, "".join(pieces), include=include)


@given(stop_lists, st.lists(letters, max_size=8))
def test_nothing_is_held_back_longer_than_it_can_become_a_stop_string(stops, pieces):
    matcher, text, shown = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_partial_match_is_held_back_and_released_when_it_fails():
    matcher = StopStrings(["END"])
    assert matcher.push("say E") == "say "
    assert matcher.push("N") == ""
    assert matcher.push("O") == "ENO"
    assert matcher.push("EN") == ""
    assert matcher.flush() == "EN"


def test_text_after_the_stop_string_is_dropped_and_the_stop_string_kept_if_asked():
    assert run(["\n\n"], ["one\n", "\ntwo"]) == ("one", "\n\n")
    assert run(["\n\n"], ["one\n", "\ntwo"], include=True) == ("one\n\n", "\n\n")


def test_of_stop_strings_that_end_together_the_longest_counts():
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_a_match_that_ends_before_min_tokens_does_not_count_but_may_begin_there():
    matcher = StopStrings(["ab"])
    assert matcher.push("xab", armed=False) == "xab"
    assert matcher.push("ya", armed=False) == "y"
    assert matcher.push("bz") == ""
    assert matcher.matched == "ab"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
