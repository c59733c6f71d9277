"""Linear layers of routed experts on CPU, computed in float32, for rows grouped by expert.

    pair i = (token i // k, its expert expert_ids[i])        y[places[i]] = act(x[i // k] W[expert_ids[i]]^T)

First the pairs are sorted by expert, and their inputs are copied together. An expert's rows are then cut
into segments that stay in the caches. The work is divided into segments times panels of their expert's
weight, all in one call: a panel of weights is read once for all rows of a segment, and experts without rows
cost nothing. Only the compiled code knows the number of segments, so that calls can be recorded
(:mod:`kernels.cpu.graph`). The weights of all experts are one tensor of panels
(:mod:`kernels.linear.packed_linear`), and a row has the same bits as from a
:class:`kernels.linear.packed_linear.PackedLinear` of its expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.threads import kernel_threads
from kernels.cpu.vector import aligned
from kernels.gpu.strides import adjacent
from kernels.linear.packed_linear import (
    GRAIN_PRODUCTS,
    ROWS_A_READ,
    as_bytes,
    block_rows_for,
    item_after,
    multiply_panel,
    pack_panels,
    panels_like,
    partial_sums,
)
from kernels.linear.panel_tile import panel_width, panel_width_here


@cpu_jit
def _sort_pairs(expert_ids, k, x, x_stride, size, num_experts, most_rows, rows, places, segments, begin, end):
    """Sort pairs by expert, in order within an expert, and cut the experts' rows into segments.

    One item does all. A segment is (expert, first row, number of rows). The number of segments is written
    behind the last one's place.
    """
    starts = np.zeros(num_experts + 1, np.int64)
    for i in range(expert_ids.shape[0]):
        if expert_ids[i] < num_experts:
            starts[expert_ids[i] + 1] += 1
    count = 0
    for expert in range(num_experts):
        left, first = starts[expert + 1], starts[expert]
        starts[expert + 1] += first
        while left > 0:
            own = min(left, most_rows)
            segments[3 * count], segments[3 * count + 1], segments[3 * count + 2] = expert, first, own
            first, left, count = first + own, left - own, count + 1
    segments[segments.shape[0] - 1] = count
    for i in range(expert_ids.shape[0]):
        if expert_ids[i] < num_experts:
            place = starts[expert_ids[i]]
            starts[expert_ids[i]] += 1
            places[i] = place
            source = i // k * x_stride
            rows[place * size : (place + 1) * size] = x[source : source + size]


@cpu_jit
def _multiply_segments(
    rows, weight, item_bytes, zeros, segments, y, num_inputs, num_outputs, threads, squares, begin, end
):
    """Items are all panels of the first segment, then all panels of the next one … There are as many as for
    the most segments, and the panels that there are have equal shares of them."""
    width = panel_width_here()
    num_panels = (num_outputs + width - 1) // width
    most_segments, num_segments = segments.shape[0] // 3, segments[segments.shape[0] - 1]
    begin, end = begin * num_segments // most_segments, end * num_segments // most_segments
    most = 0
    for segment in range(begin // num_panels, (end - 1) // num_panels + 1):
        most = max(most, segments[3 * segment + 2])
    sums = aligned(partial_sums(most, num_inputs))
    for item in range(begin, end):
        segment, panel = item // num_panels, item % num_panels
        expert, first = segments[3 * segment], segments[3 * segment + 1]
        after = min(item_after(item, begin, end, threads), num_segments * num_panels - 1)
        following = segments[after // num_panels * 3] * num_panels + after % num_panels
        multiply_panel(
            item_bytes,
            rows.ctypes.data + first * num_inputs * 4,
            num_inputs,
            weight.ctypes.data + (expert * num_panels + panel) * num_inputs * width * item_bytes,
            weight.ctypes.data + following * num_inputs * width * item_bytes,
            num_inputs,
            zeros.ctypes.data,
            y.ctypes.data + (first * num_outputs + panel * width) * 4,
            num_outputs,
            min(width, num_outputs - panel * width),
            squares,
            segments[3 * segment + 2],
            sums,
        )


@dataclass(frozen=True)
class GroupedRows:
    """Inputs of (token, expert) pairs, sorted by expert."""

    rows: torch.Tensor
    """``[pairs, size]`` float32, contiguous; rows after the last pair of these experts are undefined"""
    places: torch.Tensor
    """``[n, k]`` int64: the row of each pair; undefined for pairs of other experts"""
    segments: torch.Tensor
    """``[3 * most segments + 1]`` int64: expert, first row and number of rows of each segment; at the end,
    the number of segments"""

    @classmethod
    def sort(cls, x: torch.Tensor, expert_ids: torch.Tensor, num_experts: int) -> GroupedRows:
        """Group x ``[n, size]`` by expert_ids ``[n, k]`` int64; ids from ``num_experts`` on are left out."""
        x = adjacent(x)
        (num_tokens, k), size = expert_ids.shape, x.shape[1]
        num_pairs, most_rows = num_tokens * k, block_rows_for(size)
        most_segments = min(num_experts, num_pairs) + num_pairs // most_rows
        rows, places = torch.empty(num_pairs, size), torch.empty(num_tokens, k, dtype=torch.int64)
        segments = torch.empty(3 * most_segments + 1, dtype=torch.int64)
        _sort_pairs.parallel_for(
            1, 1, FlatArray(expert_ids.contiguous()), k, FlatArray(x), x.stride(0), size, num_experts,
            most_rows, FlatArray(rows), FlatArray(places), FlatArray(segments),
        )  # fmt: skip
        return cls(rows, places, segments)


class PackedExperts:
    """One projection of all experts, in panels."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        """Pack each expert's weight ``[out, in]``: all of them float32, or all bfloat16."""
        self.num_outputs, self.num_inputs = weights[0].shape
        self.panels = panels_like(weights[0], len(weights))
        self.num_panels = self.panels.shape[1]
        for own, weight in zip(self.panels, weights, strict=True):
            pack_panels(weight, own)
        zeros = FlatArray(torch.zeros(panel_width()))
        self._arrays = as_bytes(self.panels), self.panels.itemsize, zeros

    def __len__(self) -> int:
        return len(self.panels)

    def __call__(
        self, rows: torch.Tensor, segments: torch.Tensor, *, relu_squared: bool = False
    ) -> torch.Tensor:
        """Map ``[pairs, in]``, contiguous, to ``[pairs, out]``, each segment with its expert's weight."""
        y = torch.empty(len(rows), self.num_outputs)
        most_segments = len(segments) // 3
        rows_each = max(ROWS_A_READ, len(rows) // max(1, most_segments))
        _multiply_segments.parallel_for(
            most_segments * self.num_panels,
            1 + GRAIN_PRODUCTS // (rows_each * self.num_inputs * panel_width()),
            FlatArray(rows),
            *self._arrays,
            FlatArray(segments),
            FlatArray(y),
            self.num_inputs,
            self.num_outputs,
            kernel_threads(),
            int(relu_squared),
        )
        return y
