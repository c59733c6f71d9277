from dataclasses import fields

import pytest
import torch

from kernels.speculation import prepare_rows as module
from kernels.speculation.prepare_rows import PrepareRows, prepare_rows_reference

OUTPUTS = {
    "input_ids": torch.int64,
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "seq_lens": torch.int32,
    "read_slots": torch.int32,
    "write_slots": torch.int32,
}


def prepare(target, tensors, block_size):
    """Everything by name, rows among it."""
    op, num_rows = PrepareRows(**tensors, block_size=block_size), len(tensors["rows"])
    if target.name == "triton":
        module._launch(op, num_rows)
    else:
        op(num_rows)


def batch(rows, num_positions, num_columns, device="cpu", *, num_rows=5):
    """A step of these rows: random tables, every other row inactive; the outputs hold an earlier step."""

    def ints(*shape, high, dtype=torch.int32):
        return torch.randint(1, high, shape, generator=generator, dtype=dtype)

    generator = torch.Generator().manual_seed(len(rows) + num_positions)
    shape = (len(rows), num_positions)
    tensors = {
        "rows": torch.tensor(rows, dtype=torch.int64),
        "tokens": ints(num_rows + 1, num_positions, high=1000, dtype=torch.int64),
        "num_computed": ints(num_rows + 1, high=20),
        "state_slot": ints(num_rows + 1, high=50),
        "active": (torch.arange(num_rows + 1) % 2 == 0).int(),
        "block_table": ints(len(rows), num_columns, high=2**30) - 1,
        "slots": ints(*shape, high=50),
        "boundary_len": ints(len(rows), high=24),
        "boundary_slot": ints(len(rows), high=50),
        **{name: torch.full(shape, -7, dtype=dtype) for name, dtype in OUTPUTS.items()},
    }
    for name in ("seq_lens", "read_slots"):
        tensors[name] = tensors[name][:, 0].contiguous()
    tensors["active"][num_rows] = 0
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def row(target, *, num_computed=5, boundary_len=0, block_table=(7, 0, 9)):
    """One row with three positions and blocks of four."""
    made = {
        "rows": torch.tensor([1], device=target.device),
        "tokens": torch.tensor([[0, 0, 0], [11, 12, 13], [0, 0, 0]], device=target.device),
        "num_computed": target.int32([0, num_computed, 0]),
        "state_slot": target.int32([0, 4, 0]),
        "active": target.int32([0, 1, 0]),
        "block_table": target.int32([block_table]),
        "slots": target.int32([[1, 2, 3]]),
        "boundary_len": target.int32([boundary_len]),
        "boundary_slot": target.int32([30]),
    }
    for name, dtype in OUTPUTS.items():
        shape = (1,) if name in ("seq_lens", "read_slots") else (1, 3)
        made[name] = torch.full(shape, -7, dtype=dtype, device=target.device)
    prepare(target, made, 4)
    return made


@pytest.mark.parametrize("num_positions", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("rows", [[0], [1], [4, 1, 2, 5, 5], [5, 5], []])
def test_agrees_with_the_reference(target, rows, num_positions, block_size):
    expected = batch(rows, num_positions, 4)
    prepare_rows_reference(**expected, block_size=block_size)
    tensors = batch(rows, num_positions, 4, target.device)
    prepare(target, tensors, block_size)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.cpu(), expected[name]), name


def test_inputs_stay_as_they_are(target):
    tensors = batch([0, 2, 3], 3, 4, target.device)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    prepare(target, tensors, 4)
    for name in tensors.keys() - OUTPUTS.keys():
        assert torch.equal(tensors[name], before[name]), name


def test_a_row_in_the_middle_of_its_blocks(target):
    made = row(target, num_computed=1)
    assert made["input_ids"].tolist() == [[11, 12, 13]]
    assert made["positions"].tolist() == [[1, 2, 3]]
    assert made["slot_mapping"].tolist() == [[29, 30, 31]]
    assert made["seq_lens"].tolist() == [4]
    assert made["read_slots"].tolist() == [4]
    assert made["write_slots"].tolist() == [[1, 2, 3]]


def test_positions_without_a_block_are_mapped_to_null(target):
    assert row(target, num_computed=6)["slot_mapping"].tolist() == [[0, 0, 36]]  # blocks 0, 0, 9
    assert row(target, num_computed=10)["slot_mapping"].tolist() == [[38, 39, 0]]  # beyond the table
    assert row(target, num_computed=50)["slot_mapping"].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("boundary_len", "slots"),
    [
        (0, [1, 2, 3]),
        (5, [1, 2, 3]),
        (6, [30, 2, 3]),
        (7, [1, 30, 3]),
        (8, [1, 2, 30]),
        (9, [1, 2, 3]),
    ],
)
def test_the_state_at_a_boundary_goes_to_its_slot(target, boundary_len, slots):
    assert row(target, num_computed=5, boundary_len=boundary_len)["write_slots"].tolist() == [slots]


def test_padding_and_inactive_rows_are_zero_whatever_stood_there(target):
    tensors = batch([5, 1, 5], 4, 2, target.device)
    prepare(target, tensors, 4)
    for name in OUTPUTS:
        assert tensors[name].count_nonzero() == 0, name


def test_a_bound_call_writes_the_rows_that_it_names_and_no_others():
    tensors, expected = batch([0, 2, 4], 3, 4), batch([0, 2, 4], 3, 4)
    op = PrepareRows(**tensors, block_size=4)
    prepare_rows_reference(**expected, block_size=4)
    op(2)
    for name in OUTPUTS:
        assert torch.equal(tensors[name][:2], expected[name][:2]), name
        assert (tensors[name][2:] == -7).all(), name
    op(3)
    assert all(torch.equal(tensors[name], expected[name]) for name in OUTPUTS)


def test_a_bound_call_sees_the_tables_as_they_are_now():
    tensors = batch([0], 3, 4)
    op = PrepareRows(**tensors, block_size=4)
    op(1)
    tensors["num_computed"][0] += 3
    before = tensors["positions"].clone()
    op(1)
    assert torch.equal(tensors["positions"], before + 3)


def test_fields_are_in_the_order_of_the_kernels_arguments():
    names = [field.name for field in fields(PrepareRows)]
    assert list(module._prepare_rows_cpu.fn.__code__.co_varnames[: len(names)]) == names
