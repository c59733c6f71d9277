"""The progress of decoding rows, on the device. Each step reads it and updates it for the next step.

The host fills a row when its request begins to run here (admitted, handed over or resumed) and clears it
when the request leaves. Between these two moments only steps write the row. So a step can be launched before
the previous step was read back.

| table | shape | holds |
|---|---|---|
| tokens | ``[N + 1, T]`` | the next step's input: the newest known token, then drafts |
| num_drafts | ``[N + 1]`` | number of drafts; the tokens after them are dummies, which are always rejected |
| num_computed | ``[N + 1]`` | number of tokens whose KV and state exist |
| state_slot | ``[N + 1]`` | slot with the state after these tokens, chosen by the step that wrote the state |
| active | ``[N + 1]`` | False: the row has reached its end, or has no request |
| limit | ``[N + 1]`` | maximum number of tokens of prompt and answer together |
| max_drafts | ``[N + 1]`` | k, or 0 for a request without speculation |

A row has ``T = 1 + k`` positions, and there are N rows for requests. Row N is the null row, which padding
uses: it is never active.
"""

from __future__ import annotations

import torch

from engine.memory.index_pool import NULL_INDEX
from engine.request import Request


class RowState:
    """Tables of ``num_rows`` rows and the null row, with ``T = 1 + k`` positions."""

    def __init__(self, num_rows: int, num_positions: int, device: torch.device) -> None:
        def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((num_rows + 1, *shape), dtype=dtype, device=device)

        self._device = device
        self._num_drafts = num_positions - 1
        self.tokens = table(num_positions, dtype=torch.int64)
        self.num_drafts = table()
        self.num_computed = table()
        self.state_slot = table()
        self.active = table(dtype=torch.bool)
        self.limit = table()
        self.max_drafts = table()

    def fill(self, request: Request) -> None:
        """Fill the row of a request that begins to run: newest state and next token, but no drafts yet."""
        row, params = request.row, request.params
        self.tokens[row] = 0
        self.tokens[row, 0] = request.tokens[request.num_computed]
        self.num_drafts[row] = 0
        self.num_computed[row] = request.num_computed
        self.state_slot[row] = request.memory.state_slot
        self.limit[row] = request.num_prompt + (0 if params is None else params.max_tokens)
        self.max_drafts[row] = self._num_drafts if params is not None and params.speculate else 0
        self.active[row] = True

    def clear(self, row: int) -> None:
        """Clear the row of a request that has left. A step does nothing in a cleared row."""
        self.active[row] = False
        self.state_slot[row] = NULL_INDEX
        for table in (self.num_drafts, self.num_computed, self.limit, self.max_drafts, self.tokens):
            table[row] = 0
