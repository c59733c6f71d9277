"""Ends the thinking of rows that have used up their budgets: forces the tokens of the end mark.

An automaton on the device follows each row's answer (:mod:`engine.sampling.thinking_automaton`), so that
steps can be launched before earlier steps were read back. At each position it gives, for the drafts up to
there, the state and the number of thinking tokens. If this number has reached the budget, the position's
token is the one that continues the end mark. A mark that the model has written in part is completed.

Drafts are then compared with that token, as with any other. So the tokens do not depend on drafts.

| table | shape | holds |
|---|---|---|
| marks | ``[N + 1, 2 M]`` int64 | end mark and begin mark, each padded with -1 to M tokens |
| moves | ``[N + 1, NUM_STATES * (2 M + 1)]`` int32 | next states, by state and by the place of the token |
| budget | ``[N + 1]`` int64 | maximum number of thinking tokens |
| state | ``[N + 1]`` int32 | the state after all known tokens |
| num_tokens | ``[N + 1]`` int32 | the number of thinking tokens among them |

A token that is in neither mark has place 2 M. All entries are 0 in rows without a budget, in cleared rows and
in the null row; state 0 is the one behind the thinking. ``N`` is the number of rows, ``M`` the maximum number
of tokens of a mark, ``R`` the number of a step's rows, ``T`` the number of positions in each row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.memory.row_fields import RowFields
from engine.request import Request
from engine.sampling.thinking_automaton import (
    BEGINNING,
    NUM_STATES,
    OVER,
    THINKING,
    ThinkingAutomaton,
    otherwise,
)
from wire.messages.sampling_params import MAX_MARK_TOKENS

_NUM_PLACES = 2 * MAX_MARK_TOKENS + 1
_NO_TOKEN = -1


class ThinkingBudgets:
    """Budgets of up to ``num_rows`` requests, followed by the null row."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.fields = RowFields(
            num_rows + 1,
            {
                "marks": (torch.int64, 2 * MAX_MARK_TOKENS),
                "moves": (torch.int32, NUM_STATES * _NUM_PLACES),
                "budget": (torch.int64, 0),
                "state": (torch.int32, 0),
                "num_tokens": (torch.int32, 0),
            },
            device,
        )
        self._rows: set[int] = set()
        """Rows whose requests have budgets."""

    def fill(self, request: Request) -> None:
        """Write an admitted request's marks and its answer so far into its row, if it has a budget."""
        thinking = None if request.params is None else request.params.thinking
        if thinking is None or thinking.budget is None:
            return
        automaton = ThinkingAutomaton.of(thinking)
        state, num_tokens = automaton.follow(thinking, request.tokens[request.num_prompt :])
        marks = _padded(thinking.end_token_ids) + _padded(thinking.begin_token_ids)
        self._rows.add(request.row)
        self.fields.write(
            request.row,
            marks=marks,
            moves=_moves(automaton, marks),
            budget=thinking.budget,
            state=state,
            num_tokens=num_tokens,
        )

    def clear(self, row: int) -> None:
        """Take the budget away from a row, after its request has left."""
        if row in self._rows:
            self._rows.discard(row)
            self.fields.write(row, marks=0, moves=OVER, budget=0, state=OVER, num_tokens=0)

    def force(self, token_ids: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Return ``token_ids`` ``[R, T]`` with the end mark's tokens where budgets are used up.

        ``rows`` is ``[R]`` int64. ``drafts`` ``[R, T - 1]`` int64 are the inputs of positions 1 … T - 1.
        """
        states, num_tokens = self._follow(rows, drafts)
        is_over_budget = num_tokens >= self.fields.device["budget"][rows][:, None]
        is_forced = (states >= THINKING) & (states < BEGINNING) & is_over_budget
        next_place = (states - THINKING).clamp(min=0, max=MAX_MARK_TOKENS - 1).to(torch.int64)
        return torch.where(is_forced, self.fields.device["marks"][rows].gather(1, next_place), token_ids)

    def commit(self, rows: torch.Tensor, gained: torch.Tensor, num_gained: torch.Tensor) -> None:
        """Follow the first ``num_gained`` ``[R]`` tokens of ``gained`` ``[R, T]`` in each of ``rows``."""
        states, num_tokens = self._follow(rows, gained)
        last = num_gained[:, None].to(torch.int64)
        self.fields.device["state"].index_copy_(0, rows, states.gather(1, last)[:, 0])
        self.fields.device["num_tokens"].index_copy_(0, rows, num_tokens.gather(1, last)[:, 0])

    def _follow(self, rows: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states and numbers of thinking tokens, before ``token_ids`` ``[R, n]`` and after each.

        Both are ``[R, 1 + n]`` int32.
        """
        tables = self.fields.device
        order = torch.arange(_NUM_PLACES - 1, device=rows.device)
        is_here = token_ids[:, :, None] == tables["marks"][rows][:, None]
        places = torch.where(is_here, order, _NUM_PLACES - 1).amin(dim=-1)
        moves = tables["moves"].view(-1)
        states, num_tokens = [tables["state"][rows]], [tables["num_tokens"][rows]]
        for i in range(token_ids.shape[1]):
            state = states[-1]
            num_tokens.append(num_tokens[-1] + ((state >= THINKING) & (state < BEGINNING)))
            states.append(moves[(rows * NUM_STATES + state) * _NUM_PLACES + places[:, i]])
        return torch.stack(states, dim=1), torch.stack(num_tokens, dim=1)


def _padded(mark: tuple[int, ...]) -> list[int]:
    return [*mark, *[_NO_TOKEN] * (MAX_MARK_TOKENS - len(mark))]


def _moves(automaton: ThinkingAutomaton, marks: list[int]) -> NDArray[np.int32]:
    """Return the next states by state and by the token's place in ``marks``, one state after the other.

    A token that is in ``marks`` twice has its first place.
    """
    moves = np.empty((NUM_STATES, _NUM_PLACES), dtype=np.int32)
    moves[:] = [[otherwise(state)] for state in range(NUM_STATES)]
    for state, next_states in enumerate(automaton.moves):
        for token_id, next_state in next_states.items():
            moves[state, marks.index(token_id)] = next_state
    return moves.ravel()
