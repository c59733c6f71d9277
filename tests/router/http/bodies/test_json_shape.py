import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.bodies import json_shape
from router.http.bodies.json_shape import MAX_DEPTH, MAX_PARTS, MAX_VALUES, check_shape
from wire.errors import InvalidRequestError

BOMBS = {
    "numbers": (b"1", MAX_VALUES, "values"),
    "strings": (b'""', MAX_VALUES, "values"),
    "lists": (b"[]", MAX_PARTS - 1, "lists, objects and names"),
    "objects": (b"{}", MAX_PARTS - 1, "lists, objects and names"),
    "names": (b'{"":1}', (MAX_PARTS - 1) // 2, "lists, objects and names"),
}
"""One of many items in a list, and how many there may be: the list around them counts as well."""


@pytest.mark.parametrize("kind", BOMBS)
def test_more_values_than_parsing_may_cost_are_refused(kind):
    item, num_allowed, unit = BOMBS[kind]

    def check(num_items):
        check_shape(b"[" + (item + b",") * (num_items - 1) + item + b"]")

    check(num_allowed)
    with pytest.raises(InvalidRequestError, match=f"{unit}, the limit is"):
        check(num_allowed + 1)
    with pytest.raises(InvalidRequestError, match="the limit is"):
        check(min(100 * num_allowed, 8_000_000 // len(item + b",")))


def test_only_so_many_lists_and_objects_may_be_within_one_another():
    check_shape(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    check_shape(b"[" + b"[[]]," * 1000 + b"1]")
    for opening in (b"[", b'{"a":'):
        for depth in (MAX_DEPTH + 1, 100 * MAX_DEPTH):
            with pytest.raises(
                InvalidRequestError, match=f"has {depth} lists and objects within one another"
            ):
                check_shape(opening * depth)


@pytest.mark.parametrize("char", ["[", "{", ",", ":", '"', "\\", '\\"[', "],["])
def test_texts_may_hold_whatever_they_like(char):
    check_shape(json.dumps({"prompt": char * 1_400_000}).encode())


VALUES = st.recursive(
    st.none() | st.text(st.sampled_from('a"\\[]{}:,\n')) | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\[{,:')), inner),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_counted_is_what_there_is(value):
    def parts(value):
        if isinstance(value, list):
            return 1 + sum(map(parts, value))
        if isinstance(value, dict):
            return 1 + sum(1 + parts(item) for item in value.values())
        return 0

    def depth(value):
        inner = list(value.values()) if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0) if isinstance(inner, list) else 0

    data = json.dumps([value]).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "MAX_DEPTH", 0)
        with pytest.raises(InvalidRequestError, match=f"has {depth([value])} lists"):
            check_shape(data)
        patch.setattr(json_shape, "MAX_PARTS", -1)
        patch.setattr(json_shape, "MAX_VALUES", 1 << 20)
        with pytest.raises(InvalidRequestError, match=re.escape(f"holds {parts([value])} lists, obj")):
            check_shape(data)
