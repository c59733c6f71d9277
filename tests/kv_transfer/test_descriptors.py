"""Spans are few, in bounds, and copy exactly the units that were named."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.descriptors import unit_spans
from wire.errors import TransferError
from wire.layout import Axis, Layout, Segment


def pool(num_units, unit_bytes=8):
    """Named axes aside, a layout is a number of units of some bytes."""
    segments = () if unit_bytes == 0 else (Segment("kv", "uint8", 0, (Axis("bytes", unit_bytes, 1),)),)
    return Layout("block", num_units, unit_bytes, segments)


@st.composite
def two_pools(draw):
    """Two pools of unequal sizes and ids to pair; runs are likely, as allocators hand them out."""
    unit_bytes = draw(st.integers(1, 24))
    local, remote = (pool(draw(st.integers(2, 40)), unit_bytes) for _ in range(2))
    count = draw(st.integers(0, min(local.num_units, remote.num_units) - 1))
    return local, _ids(draw, local, count), remote, _ids(draw, remote, count)


def _ids(draw, layout, count):
    ids = list(range(1, layout.num_units))
    if draw(st.booleans()):
        start = draw(st.integers(0, len(ids) - count))
        return ids[start : start + count]
    return draw(st.permutations(ids))[:count]


@given(two_pools())
def test_spans_copy_each_named_unit_and_no_other_byte(case):
    local, local_ids, remote, remote_ids = case
    source = [("remote", i) for i in range(remote.num_bytes)]
    expected: list[object] = ["untouched"] * local.num_bytes
    copied = list(expected)
    for ours, theirs in zip(local_ids, remote_ids, strict=True):
        size = local.unit_bytes
        expected[ours * size : (ours + 1) * size] = source[theirs * size : (theirs + 1) * size]
    for here, there, size in unit_spans(local, local_ids, remote, remote_ids).tolist():
        copied[here : here + size] = source[there : there + size]
    assert copied == expected


@given(two_pools())
def test_no_two_successive_spans_could_have_been_one(case):
    for first, second in pairwise(unit_spans(*case).tolist()):
        assert (first[0] + first[2], first[1] + first[2]) != (second[0], second[1])


@given(two_pools())
def test_spans_stay_inside_both_pools_and_clear_of_the_null_entry(case):
    local, _, remote, _ = case
    for here, there, size in unit_spans(*case).tolist():
        assert local.unit_bytes <= here
        assert here + size <= local.num_bytes
        assert remote.unit_bytes <= there
        assert there + size <= remote.num_bytes


def test_a_run_on_both_sides_is_one_span():
    spans = unit_spans(pool(20), [3, 4, 5, 6], pool(20), [9, 10, 11, 12])
    assert spans.tolist() == [[24, 72, 32]]


def test_a_run_on_one_side_only_is_not_joined():
    assert len(unit_spans(pool(20), [3, 4, 5], pool(20), [9, 12, 15])) == 3
    assert len(unit_spans(pool(20), [3, 8, 5], pool(20), [9, 10, 11])) == 3


def test_a_descending_run_is_not_joined():
    assert len(unit_spans(pool(20), [5, 4, 3], pool(20), [11, 10, 9])) == 3


@pytest.mark.parametrize("bad", [0, -1, 8, 1 << 40])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_an_id_outside_its_pool_is_refused_with_the_pool_s_range(bad, side):
    local_ids, remote_ids = ([bad], [1]) if side == "local" else ([1], [bad])
    with pytest.raises(TransferError, match=rf"{bad} .* 1 to 7"):
        unit_spans(pool(8), local_ids, pool(8), remote_ids)


@given(bad=st.integers().filter(lambda i: not 1 <= i < 8), place=st.integers(0, 4))
def test_a_bad_id_is_found_wherever_it_stands(bad, place):
    ids = [2, 3, 4, 5]
    ids.insert(place, bad)
    with pytest.raises(TransferError):
        unit_spans(pool(8), [1, 2, 3, 4, 5], pool(8), ids)


def test_lists_of_different_length_are_refused():
    with pytest.raises(TransferError, match=r"3 blocks .* 2"):
        unit_spans(pool(8), [1, 2], pool(8), [1, 2, 3])


def test_a_pool_of_no_bytes_has_nothing_to_copy_but_checks_its_ids():
    assert len(unit_spans(pool(8, 0), [1, 2], pool(8, 0), [3, 4])) == 0
    with pytest.raises(TransferError):
        unit_spans(pool(8, 0), [9], pool(8, 0), [3])
