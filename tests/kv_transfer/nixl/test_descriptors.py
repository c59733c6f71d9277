"""Indices of descriptor lists are in bounds and copy exactly the named units."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.nixl.descriptors import (
    MAX_DESCRIPTORS,
    cells_of,
    local_descriptors,
    remote_descriptors,
    unit_indices,
)
from kv_transfer.nixl.unit_cut import Piece, whole
from wire.errors import HandshakeError, TransferError
from wire.messages.handoff import Region
from wire.messages.layout import Axis, Layout, Segment


def pool(num_units, unit_bytes=8):
    """Named axes aside, a layout is a number of units of some bytes."""
    segments = () if unit_bytes == 0 else (Segment("kv", "uint8", 0, (Axis("bytes", unit_bytes, 1),)),)
    return Layout("block", num_units, unit_bytes, segments)


def spans(local, local_ids, remote, remote_ids, cut):
    """What the entries say: offset in our pool, offset in the peer's, bytes."""
    here, there = local_descriptors(local, 0, cut), remote_descriptors(remote, 0, cut)
    made = unit_indices(local, local_ids, remote, remote_ids, len(cut))
    ours, theirs = made.local, made.remote
    assert (here[ours, 1] == there[theirs, 1]).all()
    return zip(here[ours, 0].tolist(), there[theirs, 0].tolist(), here[ours, 1].tolist(), strict=True)


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


@st.composite
def cuts(draw, unit_bytes):
    """Some bytes of the unit, in pieces, each from anywhere in the peer's."""
    pieces, at = [], 0
    while at < unit_bytes and draw(st.integers(0, 3)):
        size = draw(st.integers(1, unit_bytes - at))
        pieces.append(Piece(at, draw(st.integers(0, unit_bytes - size)), size))
        at += size
    return tuple(pieces)


@given(two_pools(), st.data())
def test_entries_copy_the_cut_of_each_named_unit_and_no_other_byte(case, data):
    local, local_ids, remote, remote_ids = case
    size = local.unit_bytes
    cut = data.draw(cuts(size) | st.just(whole(local)))
    source = [("remote", i) for i in range(remote.num_bytes)]
    expected: list[object] = ["untouched"] * local.num_bytes
    copied = list(expected)
    for ours, theirs in zip(local_ids, remote_ids, strict=True):
        for piece in cut:
            start, begin = ours * size + piece.local, theirs * size + piece.remote
            expected[start : start + piece.num_bytes] = source[begin : begin + piece.num_bytes]
    for here, there, num_bytes in spans(local, local_ids, remote, remote_ids, cut):
        assert local.unit_bytes <= here <= here + num_bytes <= local.num_bytes
        assert remote.unit_bytes <= there <= there + num_bytes <= remote.num_bytes
        copied[here : here + num_bytes] = source[there : there + num_bytes]
    assert copied == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "count"),
    [
        ([3, 4, 5, 6], [9, 10, 11, 12], 1),
        ([3, 4, 5], [9, 12, 15], 3),
        ([3, 8, 5], [9, 10, 11], 3),
        ([5, 4, 3], [11, 10, 9], 3),
        ([3, 4, 8, 9], [9, 10, 11, 12], 2),
        ([], [], 0),
    ],
)
def test_only_what_is_adjacent_on_both_sides_counts_as_one_read(ours, theirs, count):
    assert unit_indices(pool(20), ours, pool(20), theirs, 1).num_runs == count


def test_a_list_that_no_server_needs_is_refused_before_it_is_made():
    with pytest.raises(HandshakeError, match=f"{MAX_DESCRIPTORS + 1} pieces of blocks"):
        remote_descriptors(pool(MAX_DESCRIPTORS + 1), 0, whole(pool(2)))
    with pytest.raises(HandshakeError, match="epochs"):
        cells_of(Region(0, 8 * (MAX_DESCRIPTORS + 1), 0, "DRAM"))


@pytest.mark.parametrize("bad", [0, -1, 8, 1 << 40])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_an_id_outside_its_pool_is_refused_with_the_pool_s_range(bad, side):
    local_ids, remote_ids = ([bad], [1]) if side == "local" else ([1], [bad])
    with pytest.raises(TransferError, match=rf"{bad} .* 1 to 7"):
        unit_indices(pool(8), local_ids, pool(8), remote_ids, 1)


@given(bad=st.integers().filter(lambda i: not 1 <= i < 8), place=st.integers(0, 4))
def test_a_bad_id_is_found_wherever_it_stands(bad, place):
    ids = [2, 3, 4, 5]
    ids.insert(place, bad)
    with pytest.raises(TransferError):
        unit_indices(pool(8), [1, 2, 3, 4, 5], pool(8), ids, 1)


def test_ids_far_apart_cost_no_more_than_others():
    """A hostile peer may say that it has millions of blocks, and name the first and the last one."""
    own, huge = pool(8), pool(1 << 24)
    tracemalloc.start()
    made = unit_indices(own, [1, 2], huge, [1, huge.num_units - 1], 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (made.remote.tolist(), made.num_runs) == ([1, huge.num_units - 1], 2)
    assert peak_bytes < 1 << 20


def test_lists_of_different_length_are_refused():
    with pytest.raises(TransferError, match=r"3 blocks .* 2"):
        unit_indices(pool(8), [1, 2], pool(8), [1, 2, 3], 1)


def test_a_pool_of_no_bytes_has_nothing_to_copy_but_checks_its_ids():
    assert list(spans(pool(8, 0), [1, 2], pool(8, 0), [3, 4], ())) == []
    with pytest.raises(TransferError):
        unit_indices(pool(8, 0), [9], pool(8, 0), [3], 0)
