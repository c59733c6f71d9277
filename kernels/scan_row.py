"""What a Triton program does around the scan of a row, whatever it scans; segments are boundaries.py's."""

from __future__ import annotations

from kernels.triton_jit import tl, triton_jit


@triton_jit
def segments_of_row(row_starts_ptr, row, HAS_BOUNDARIES: tl.constexpr):
    """The row's first segment, and the next row's."""
    first, behind = row, row + 1
    if HAS_BOUNDARIES:
        first, behind = tl.load(row_starts_ptr + row), tl.load(row_starts_ptr + row + 1)
    return first, behind


@triton_jit
def fill_padding_row(columns, stride, live_columns, start, end, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros for outputs ``columns`` [BLOCK] of tokens ``start`` to ``end``, ``stride`` apart."""
    zeros = tl.zeros((CHUNK, BLOCK), columns.dtype.element_ty)
    for first in range(start, end, CHUNK):
        tokens = (first + tl.arange(0, CHUNK)).to(tl.int64)
        live = (tokens < end)[:, None] & live_columns[None, :]
        tl.store(columns[None, :] + tokens[:, None] * stride, zeros, mask=live)


@triton_jit
def initial_state(pool, slot_stride, live, read_slots_ptr, has_initial_ptr, segment):
    """float32, of the shape of ``pool`` and ``live``: that tile of the read slot, or zeros."""
    state = tl.zeros(live.shape, tl.float32)
    if tl.load(has_initial_ptr + segment) != 0:
        source = tl.load(read_slots_ptr + segment).to(tl.int64)
        state += tl.load(pool + source * slot_stride, mask=live, other=0.0).to(tl.float32)
    return state
