"""The progress of decoding rows, on the device. Each step reads it and updates it for the next step.

The host fills a row when its request begins to run here (admitted, handed over or resumed) and clears it
when the request leaves. Between these two moments only steps write the row. So a step can be launched before
the previous step was read back. What the host has written reaches the device before the next step
(:func:`engine.memory.row_fields.send`).

| table | shape | holds |
|---|---|---|
| tokens | ``[N + 1, T]`` | the next step's input: the newest known token, then drafts |
| num_drafts | ``[N + 1]`` | number of drafts; the tokens after them are dummies, which are always rejected |
| num_computed | ``[N + 1]`` | number of tokens whose KV and state exist |
| state_slot | ``[N + 1]`` | slot with the state after these tokens, chosen by the step that wrote the state |
| pending | ``[N + 1]`` | number of these tokens that the state lacks, if rows replay (draft_states.py) |
| active | ``[N + 1]`` | 1, or 0 if the row has reached its end or has no request |
| limit | ``[N + 1]`` | maximum number of tokens of prompt and answer together |
| max_drafts | ``[N + 1]`` | k, or 0 for a request without speculation |

A row has ``T = 1 + k`` positions, and there are N rows for requests. Row N is the null row, which padding
uses: it is never active. Tokens are int64, all other tables int32.
"""

from __future__ import annotations

import torch

from engine.memory.index_pool import NULL_INDEX
from engine.memory.row_fields import RowFields
from engine.request import Request

_INTEGERS = ("num_drafts", "num_computed", "state_slot", "pending", "active", "limit", "max_drafts")


class RowState:
    """Tables of ``num_rows`` rows and the null row, with ``T = 1 + k`` positions."""

    def __init__(self, num_rows: int, num_positions: int, device: torch.device) -> None:
        self._num_drafts = num_positions - 1
        fields = {"tokens": (torch.int64, num_positions)} | dict.fromkeys(_INTEGERS, (torch.int32, 0))
        self.fields = RowFields(num_rows + 1, fields, device)
        tables = self.fields.device
        self.tokens = tables["tokens"]
        self.num_drafts = tables["num_drafts"]
        self.num_computed = tables["num_computed"]
        self.state_slot = tables["state_slot"]
        self.pending = tables["pending"]
        self.active = tables["active"]
        self.limit = tables["limit"]
        self.max_drafts = tables["max_drafts"]

    def fill(self, request: Request) -> None:
        """Fill the row of a request that begins to run: newest state and next token, but no drafts yet."""
        params = request.params
        self.fields.write(
            request.row,
            tokens=[request.tokens[request.num_computed]] + [0] * self._num_drafts,
            num_drafts=0,
            num_computed=request.num_computed,
            state_slot=request.memory.state_slot,
            pending=0,
            active=1,
            limit=request.num_prompt + (0 if params is None else params.max_tokens),
            max_drafts=self._num_drafts if params is not None and params.speculate else 0,
        )

    def clear(self, row: int) -> None:
        """Clear the row of a request that has left. A step does nothing in a cleared row."""
        self.fields.write(row, tokens=0, **dict.fromkeys(_INTEGERS, 0) | {"state_slot": NULL_INDEX})
