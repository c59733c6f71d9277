"""Whatever bytes a peer sends: a message comes out, or an error that says why none does; nothing else."""

import copy
import dataclasses
import types
import typing
from itertools import islice

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wire import codec, gathered, rpc
from wire.codec import PROTOCOL_VERSION, decode, encode
from wire.errors import InvalidRequestError, WireError
from wire.messages import (
    generation,
    handoff,
    layout,
    neighbours,
    prefixes,
    purge,
    ranks,
    sampling_params,
    sessions,
)
from wire.messages import group as lockstep

MODULES = (
    *(
        gathered,
        generation,
        handoff,
        layout,
        lockstep,
        neighbours,
        prefixes,
        purge,
        ranks,
        sampling_params,
        sessions,
    ),
)
MESSAGES = sorted(
    {
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    },
    key=lambda cls: cls.__name__,
)
REFUSALS = (WireError, InvalidRequestError)
"""The second is what the ranges of sampling parameters raise."""

INT64 = st.integers(-(2**63), 2**64 - 1)
EDGES = st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
SMALL = st.integers(0, 9)


def tree_of(hint):
    """msgpack values that a field of that type may hold, most of them plausible."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in args if a is not type(None)]
        if len(inner) == 1:
            return st.none() | tree_of(inner[0])
        tagged = [st.tuples(st.just(a.__name__), tree_of(a)).map(list) for a in inner]
        return st.one_of(st.none(), *tagged) if type(None) in args else st.one_of(*tagged)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return st.tuples(*map(tree_of, args)).map(list)
    if origin in (list, tuple):
        return st.lists(tree_of(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(max_size=3), tree_of(args[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.tuples(*[tree_of(hints[f.name]) for f in dataclasses.fields(hint)]).map(list)
    return {
        int: SMALL | SMALL | EDGES,
        float: st.floats() | SMALL,
        str: st.text(max_size=5),
        bytes: st.binary(max_size=5),
        bool: st.booleans(),
    }[hint]


TREES = {cls: tree_of(cls) for cls in MESSAGES}

_tree = st.recursive(
    st.none() | st.booleans() | INT64 | EDGES | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.integers(1, 400).flatmap(lambda depth: inner.map(lambda value: nested(value, depth)))
        | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    ),
    max_leaves=5,
)
# Repeated at the top alone: of 300 times 300 times 300 items, seconds would go by in making them.
junk = _tree | st.builds(lambda value, count: [value] * count, _tree, st.integers(1, 300))


def nested(value, depth):
    for _ in range(depth):
        value = [value]
    return value


def packed(cls, fields):
    return msgpack.packb([PROTOCOL_VERSION, cls.__name__, fields])


def check_brief(error):
    """A log line, not an echo of what was sent."""
    assert len(error.message) < 2000


def check(data, *expected):
    """A message that survives the wire once more, or a refusal of bounded length."""
    try:
        message = decode(data, *expected)
    except REFUSALS as error:
        check_brief(error)
        return
    again = encode(message)
    assert encode(decode(again, *expected)) == again  # compared as bytes: NaN is not equal to itself
    assert type(message) in expected


def places(tree):
    """Yield a list and an index in it for each node below the root."""
    lists = [tree] if isinstance(tree, list) else []
    while lists:
        above = lists.pop()
        for index, item in enumerate(above):
            yield above, index
            if isinstance(item, list):
                lists.append(item)


MAX_PLACES = 10_000
"""Junk may hold a million nodes; some of the first are as good to break as any."""


@st.composite
def broken_trees(draw, cls):
    """A plausible message in which a few nodes were replaced, dropped or doubled."""
    tree = copy.deepcopy(draw(TREES[cls]))
    for _ in range(draw(st.integers(1, 3))):
        found = list(islice(places(tree), MAX_PLACES))
        if not found:
            return draw(junk)
        above, index = found[draw(st.integers(0, len(found) - 1))]
        match draw(st.sampled_from(["replace", "drop", "double"])):
            case "replace":
                above[index] = draw(junk)
            case "drop":
                del above[index]
            case "double":
                above.insert(index, copy.deepcopy(above[index]))
    return tree


messages = st.sampled_from(MESSAGES)


@settings(max_examples=60)
@given(messages.flatmap(lambda cls: st.tuples(st.just(cls), TREES[cls])))
def test_fields_of_the_right_types_make_a_message_or_are_refused(case):
    cls, tree = case
    check(packed(cls, tree), cls)


@settings(max_examples=100)
@given(messages.flatmap(lambda cls: st.tuples(st.just(cls), broken_trees(cls))))
def test_broken_fields_are_refused_or_make_a_message(case):
    cls, tree = case
    check(packed(cls, tree), cls)


@settings(max_examples=60)
@given(st.binary(max_size=300), messages)
def test_random_bytes_are_refused(data, cls):
    with pytest.raises(WireError):
        decode(data, cls)


@settings(max_examples=60)
@given(junk, messages)
def test_any_msgpack_in_place_of_the_envelope_is_refused(tree, cls):
    with pytest.raises(WireError) as refusal:
        decode(msgpack.packb(tree), cls)
    check_brief(refusal.value)


DEEP = [[[[["deep"] * 6] * 6] * 6] * 6] * 6


@settings(max_examples=60)
@given(version=junk, name=junk, fields=junk, cls=messages)
@example(version=DEEP, name=DEEP, fields=DEEP, cls=handoff.Ticket)
def test_junk_in_the_envelope_is_refused_briefly(version, name, fields, cls):
    for envelope in ([version, cls.__name__, fields], [PROTOCOL_VERSION, name, fields]):
        check(msgpack.packb(envelope), cls)


@settings(max_examples=100)
@given(st.data())
def test_flipped_cut_and_doubled_bytes_are_refused_or_make_a_message(data):
    cls = data.draw(messages)
    raw = bytearray(packed(cls, data.draw(TREES[cls])))
    for _ in range(data.draw(st.integers(1, 4))):
        if not raw:
            break
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "double", "set"])):
            case "flip":
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 8))]
            case "double":
                raw[at:at] = raw[at : at + 8]
            case "set":  # 0xdd and its like announce four thousand million items
                raw[at : at + 1] = data.draw(st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1"]))  # fmt: skip  # noqa: E501
    check(bytes(raw), cls)


@settings(max_examples=60)
@given(messages.flatmap(lambda cls: TREES[cls].map(lambda tree: packed(cls, tree))))
def test_the_stream_s_readers_refuse_what_is_not_theirs(data):
    for read in (rpc.decode_stream_request, rpc.decode_stream_reply):
        try:
            read(data)
        except REFUSALS as error:
            check_brief(error)


@pytest.mark.parametrize(
    "opening", [b"\x91", b"\x81\xa1a", b"\x93\x01\xa6Cancel\x91"], ids=["list", "map", "fields"]
)
@pytest.mark.parametrize("depth", [100, 508, 1010, 100_000])
@pytest.mark.parametrize("start", [b"", b"\x93", b"\x93\x01", b"\x93\x01\xa6Cancel"])
def test_deep_nesting_is_refused(opening, depth, start):
    for data in (start + opening * depth + b"\xc0", start + opening * depth + b"\xc0" * 3):
        with pytest.raises(WireError) as refusal:
            decode(data, generation.Cancel)
        check_brief(refusal.value)


@pytest.mark.parametrize("fill", [0, "x", None, [], "y" * 1000], ids=repr)
def test_a_long_list_anywhere_is_refused_with_a_short_message(fill):
    many = [fill] * 20_000 if fill != "y" * 1000 else [fill] * 2000
    for envelope in (
        many,
        [many, "Cancel", ["r"]],
        [PROTOCOL_VERSION, many, ["r"]],
        [PROTOCOL_VERSION, "Cancel", many],
        [PROTOCOL_VERSION, "Cancel", [many]],
    ):
        with pytest.raises(WireError) as refusal:
            decode(msgpack.packb(envelope), generation.Cancel)
        check_brief(refusal.value)


def test_a_literal_s_wrong_value_is_shown_briefly():
    tree = [PROTOCOL_VERSION, "Region", [0, 0, 0, ["x" * 100] * 100_000]]
    with pytest.raises(WireError) as refusal:
        decode(msgpack.packb(tree), handoff.Region)
    assert len(refusal.value.message) < 500


def test_every_message_is_tried():
    assert {cls.__name__ for cls in MESSAGES} >= {
        name for name, cls in codec._classes.items() if cls.__module__.startswith("wire.")
    }
