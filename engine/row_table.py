"""Persistent per-row tables: blocks and sampling of each admitted request, one row a request.

A row is filled when its request is admitted and cleared when it leaves. Steps gather rows by index, so
building a batch copies no block list. A cleared row holds the null index
everywhere: whoever reads it by mistake reads the null entries and nobody's state (vllm 37728).
"""

from __future__ import annotations

import numpy as np

from engine.index_pool import NULL_INDEX
from engine.request import Request
from wire.sampling_params import SamplingParams


class RowTable:
    """Host tables of ``num_rows`` rows and ``num_columns`` block columns."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.block_table = np.full((num_rows, num_columns), NULL_INDEX, dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.int64)

    def fill(self, request: Request) -> None:
        """Writes an admitted request's blocks and sampling parameters into its row."""
        row = request.row
        self.extend(request)
        if request.params is not None:
            self._fill_sampling(row, request.params, request.seed)

    def extend(self, request: Request) -> None:
        """Writes the blocks that a request has got since its row was filled."""
        row, known = request.row, self.num_blocks[request.row]
        self.block_table[row, known : len(request.block_ids)] = request.block_ids[known:]
        self.num_blocks[row] = len(request.block_ids)

    def _fill_sampling(self, row: int, params: SamplingParams, seed: int) -> None:
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed

    def clear(self, row: int) -> None:
        """Null indices and greedy sampling: no trace of the request that was here."""
        self.block_table[row] = NULL_INDEX
        self.num_blocks[row] = 0
        self.temperature[row] = 0.0
        self.top_k[row] = 0
        self.top_p[row] = 1.0
        self.min_p[row] = 0.0
        self.seed[row] = 0
