"""Inputs and indices of a step's decode rows, from the tables as the previous step left them.

The step has R rows with T positions each. The tables have N rows for requests and one row for padding.
Row r of the step is row ``q = rows[r]`` of the tables, with ``L = num_computed[q]`` tokens computed. For its
positions ``p = L + i``, i = 0 … T-1:

    input_ids[r, i]    = tokens[q, i]
    positions[r, i]    = p
    slot_mapping[r, i] = block_table[r, p // block_size] * block_size + p % block_size    0 without a block
    write_slots[r, i]  = boundary_slot[r]     if p + 1 == boundary_len[r], else slots[r, i]
    seq_lens[r]        = L + T
    read_slots[r]      = state_slot[q]

A row that isn't active, such as padding, is zero in all outputs. A position after the block table's last
column, or at a null block, has no place for its KV: it is mapped to 0, and no KV is written.

No output may share memory with an input. In vllm 39809, the slots to read and the slots to write were
one tensor, so a step read data that it had just written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.jit import cpu_jit
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.speculation.bound_tensors import BoundTensors

_ROWS_A_GRAIN = 512  # about 100 µs


@dataclass(frozen=True, kw_only=True)
class PrepareRows(BoundTensors):
    """The operator, bound to persistent tensors, so that a call only passes the number of rows.

    Inspecting 15 tensors in every step would take longer than computing the rows.

    The tables have ``N + 1`` rows, the other tensors at least as many rows as a call has. All tensors are
    contiguous. A call writes the first ``num_rows`` rows of the outputs and does not wait for the device.
    """

    rows: Tensor
    """``[R]`` int64 rows of the tables"""
    tokens: Tensor
    """table ``[N + 1, T]`` int64: the newest known token, then drafts"""
    num_computed: Tensor
    """table ``[N + 1]`` int32: tokens whose KV and state exist"""
    state_slot: Tensor
    """table ``[N + 1]`` int32: slot with the state after the computed tokens"""
    active: Tensor
    """table ``[N + 1]`` int32: 1 if the row is active, else 0"""
    block_table: Tensor
    """``[R, columns]`` int32"""
    slots: Tensor
    """``[R, T]`` int32: the speculative slots of each row"""
    boundary_len: Tensor
    """``[R]`` int32: number of tokens after which the state goes to ``boundary_slot``; 0 means never"""
    boundary_slot: Tensor
    """``[R]`` int32"""
    input_ids: Tensor
    """written: ``[R, T]`` int64"""
    positions: Tensor
    """written: ``[R, T]`` int64"""
    slot_mapping: Tensor
    """written: ``[R, T]`` int64"""
    seq_lens: Tensor
    """written: ``[R]`` int32"""
    read_slots: Tensor
    """written: ``[R]`` int32"""
    write_slots: Tensor
    """written: ``[R, T]`` int32"""
    block_size: int

    def __call__(self, num_rows: int) -> None:
        if self.rows.is_cuda:
            _launch(self, num_rows)
        else:
            _prepare_rows_cpu.parallel_for(num_rows, _ROWS_A_GRAIN, *self._arrays, self.block_size)


def prepare_rows_reference(
    rows: Tensor,
    *,
    tokens: Tensor,
    num_computed: Tensor,
    state_slot: Tensor,
    active: Tensor,
    block_table: Tensor,
    slots: Tensor,
    boundary_len: Tensor,
    boundary_slot: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    block_size: int,
) -> None:
    """Reference of :class:`PrepareRows`. Computes all rows at once."""
    num_positions, num_columns = slots.shape[1], block_table.shape[1]
    live = active[rows]
    computed = num_computed[rows].to(torch.int64)
    new = computed[:, None] + torch.arange(num_positions, device=rows.device)
    columns = new // block_size
    blocks = block_table.gather(1, columns.clamp(max=num_columns - 1)).to(torch.int64)
    has_block = live[:, None] & (columns < num_columns) & (blocks != 0)
    at_boundary = new + 1 == boundary_len[:, None]
    input_ids.copy_(tokens[rows] * live[:, None])
    positions.copy_(new * live[:, None])
    slot_mapping.copy_((blocks * block_size + new % block_size) * has_block)
    seq_lens.copy_((computed + num_positions) * live)
    read_slots.copy_(state_slot[rows] * live)
    write_slots.copy_(torch.where(at_boundary, boundary_slot[:, None], slots) * live[:, None])


# One program per row, one thread per position: a few dozen integers, so only latency matters. No thread reads
# data that another thread writes, so no order is needed. Inactive rows store zeros with the same masks.
@triton_jit
def _prepare_rows_kernel(
    rows_ptr,
    tokens_ptr,
    num_computed_ptr,
    state_slot_ptr,
    active_ptr,
    block_table_ptr,
    slots_ptr,
    boundary_len_ptr,
    boundary_slot_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    read_slots_ptr,
    write_slots_ptr,
    num_positions,
    num_columns,
    block_size,
    BLOCK_T: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    q = tl.load(rows_ptr + r)
    live = tl.load(active_ptr + q) != 0
    i = tl.arange(0, BLOCK_T)
    here, filled = i < num_positions, i < tl.where(live, num_positions, 0)
    computed = tl.load(num_computed_ptr + q)
    p = (computed + i).to(tl.int64)
    column = p // block_size
    has_column = filled & (column < num_columns)
    block = tl.load(block_table_ptr + r * num_columns + column, mask=has_column, other=0).to(tl.int64)
    mapped = tl.where(block != 0, block * block_size + p % block_size, 0)
    token = tl.load(tokens_ptr + q * num_positions + i, mask=filled, other=0)
    slot = tl.load(slots_ptr + r * num_positions + i, mask=filled, other=0)
    at_boundary = filled & (p + 1 == tl.load(boundary_len_ptr + r))
    slot = tl.where(at_boundary, tl.load(boundary_slot_ptr + r), slot)
    out = r * num_positions + i
    tl.store(input_ids_ptr + out, token, mask=here)
    tl.store(positions_ptr + out, tl.where(filled, p, 0), mask=here)
    tl.store(slot_mapping_ptr + out, mapped, mask=here)
    tl.store(write_slots_ptr + out, slot, mask=here)
    tl.store(seq_lens_ptr + r, tl.where(live, computed + num_positions, 0))
    tl.store(read_slots_ptr + r, tl.where(live, tl.load(state_slot_ptr + q), 0))


def _launch(op: PrepareRows, num_rows: int) -> None:
    if num_rows == 0:
        return
    num_positions = op.slots.shape[1]
    _prepare_rows_kernel[(num_rows,)](
        *op._tensors,
        num_positions,
        op.block_table.shape[1],
        op.block_size,
        BLOCK_T=triton.next_power_of_2(num_positions),
        num_warps=1,
    )


@cpu_jit
def _prepare_rows_cpu(
    rows,
    tokens,
    num_computed,
    state_slot,
    active,
    block_table,
    slots,
    boundary_len,
    boundary_slot,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    read_slots,
    write_slots,
    block_size,
    begin,
    end,
):
    num_positions, num_columns = slots.shape[1], block_table.shape[1]
    for r in range(begin, end):
        q = rows[r]
        live = active[q]
        seq_lens[r] = num_computed[q] + num_positions if live else 0
        read_slots[r] = state_slot[q] if live else 0
        for i in range(num_positions):
            input_ids[r, i] = positions[r, i] = slot_mapping[r, i] = write_slots[r, i] = 0
            if not live:
                continue
            p = num_computed[q] + i
            input_ids[r, i] = tokens[q, i]
            positions[r, i] = p
            write_slots[r, i] = boundary_slot[r] if p + 1 == boundary_len[r] else slots[r, i]
            if p // block_size < num_columns and block_table[r, p // block_size] != 0:
                slot_mapping[r, i] = block_table[r, p // block_size] * block_size + p % block_size
