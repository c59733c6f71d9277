"""Rows are cut at their boundaries; what the ops store there is tested with each op."""

import itertools

import pytest
import torch

from kernels.ssm.boundaries import Boundaries
from kernels.ssm.reference_row import reference_rows
from testing.kernels.ragged_rows import RaggedRows, Row, random_rows


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def cut(rows, offsets, slots):
    """Of three rows of 9, 2 and 4 tokens, the second one padding."""
    return Boundaries.cut(
        int32(rows),
        int32(offsets),
        int32(slots),
        cu_seqlens=int32([0, 9, 11, 15]),
        read_slots=int32([1, 2, 0]),
        write_slots=int32([1, 0, 3]),
        has_initial=torch.tensor([True, True, False]),
        num_before=int32([100, 3, 0]),
    )


def test_a_segment_starts_from_what_the_one_before_it_left():
    segments = cut([0, 0, 2], [2, 5, 2], [7, 8, 9]).segments
    assert segments.cu_seqlens.tolist() == [0, 2, 5, 9, 11, 13, 15]
    assert segments.read_slots.tolist() == [1, 7, 8, 2, 0, 9]
    assert segments.write_slots.tolist() == [7, 8, 1, 0, 9, 3]
    assert segments.has_initial.tolist() == [True, True, True, True, False, True]
    assert segments.num_before.tolist() == [100, 102, 105, 3, 0, 2]
    assert segments.row_starts.tolist() == [0, 3, 4, 6]
    assert segments.max_seq_len == 4
    assert all(tensor.dtype == torch.int32 for tensor in (*segments.as_rows()[:3], segments.row_starts))


@pytest.mark.parametrize("seed", range(20))
def test_segments_tile_the_rows(seed):
    batch = RaggedRows([*random_rows(seed, 40), Row(3, 0, 31, False, {1: 30})])
    segments = batch.boundaries.segments
    starts = segments.cu_seqlens.tolist()
    for i, (row, (first, last)) in enumerate(
        zip(batch.rows, itertools.pairwise(segments.row_starts.tolist()), strict=True)
    ):
        offsets = [0, *row.stores, row.length]
        assert starts[first : last + 1] == [batch.starts[i] + offset for offset in offsets]
        assert segments.write_slots[first:last].tolist() == [*row.stores.values(), row.write_slot]
        assert segments.read_slots[first:last].tolist() == [row.read_slot, *row.stores.values()]
    assert segments.max_seq_len == max(b - a for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize("seed", range(5))
def test_references_see_the_same_rows_and_boundaries(seed):
    batch = RaggedRows(random_rows(seed, 40))
    expected = [
        (slice(start, start + row.length), row.stores | {row.length: row.write_slot})
        for start, row in zip(batch.starts, batch.rows, strict=False)
        if row.length and row.write_slot
    ]
    found = reference_rows(*batch.index, batch.boundaries, batch.num_before)
    assert [(row.tokens, row.stores) for row in found] == expected


@pytest.mark.parametrize(
    ("rows", "offsets", "slots", "message"),
    [
        ([2, 0], [1, 1], [7, 8], "order of their rows"),
        ([0], [1], [0], "null slot"),
        ([1], [1], [7], "null slot"),
        ([0], [0], [7], "offsets"),
        ([0], [9], [7], "offsets"),
        ([0], [-1], [7], "offsets"),
        ([0, 0], [5, 2], [7, 8], "offsets"),
        ([0, 0], [5, 5], [7, 8], "offsets"),
    ],
)
def test_boundaries_outside_the_contract_are_refused(rows, offsets, slots, message):
    with pytest.raises(ValueError, match=message):
        cut(rows, offsets, slots)


def test_map_moves_every_tensor():
    before = cut([0], [3], [7])
    after = before.map(lambda tensor: tensor.clone())
    for name in ("rows", "offsets", "slots"):
        assert getattr(after, name).data_ptr() != getattr(before, name).data_ptr()
    for name, value in before.segments._asdict().items():
        if isinstance(value, torch.Tensor):
            assert getattr(after.segments, name).data_ptr() != value.data_ptr()
            assert getattr(after.segments, name).tolist() == value.tolist()
    assert after.segments.max_seq_len == before.segments.max_seq_len
