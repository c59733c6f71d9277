"""Ends the thinking of rows that have used up their budgets: forces the tokens of the end mark.

An automaton on the device follows each row's answer (:mod:`engine.sampling.thinking_automaton`), so that
steps can be launched before earlier steps were read back. It gives the state at each position, for the drafts
up to there. Thinking tokens follow each other without a gap, so a budget is used up from a certain index on.
If a row is still within its thinking there, the position's token is the one that continues the end mark: a
mark that the model has written in part is completed.

Drafts are then compared with that token, as with any other. So the tokens do not depend on drafts.

| table, int64 | shape | holds |
|---|---|---|
| marks | ``[N + 1, 2 M]`` | end mark and begin mark, each padded with -1 to M tokens |
| moves | ``[N + 1, NUM_STATES * (2 M + 1)]`` | next states, by state and by the place of the token |
| until | ``[N + 1]`` | the index from which on the budget is used up |
| state | ``[N + 1]`` | the state after all known tokens |

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
                "moves": (torch.int64, NUM_STATES * _NUM_PLACES),
                "until": (torch.int64, 0),
                "state": (torch.int64, 0),
            },
            device,
        )
        self._places = torch.arange(_NUM_PLACES - 1, device=device)
        self._rows: set[int] = set()
        """Rows whose requests have budgets."""

    def fill(self, request: Request) -> None:
        """Write an admitted request's marks and its answer so far into its row, if it has a budget."""
        thinking = None if request.params is None else request.params.thinking
        if thinking is None or thinking.budget is None:
            return
        automaton = ThinkingAutomaton.of(thinking)
        marks = _padded(thinking.end_token_ids) + _padded(thinking.begin_token_ids)
        first = 0 if thinking.is_open else len(thinking.begin_token_ids)
        self._rows.add(request.row)
        self.fields.write(
            request.row,
            marks=marks,
            moves=_moves(automaton, marks),
            until=request.num_prompt + first + thinking.budget,
            state=automaton.follow(thinking, request.tokens[request.num_prompt :]),
        )

    def clear(self, row: int) -> None:
        """Take the budget away from a row, after its request has left."""
        if row in self._rows:
            self._rows.discard(row)
            self.fields.write(row, marks=0, moves=OVER, until=0, state=OVER)

    def force(
        self, token_ids: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, drafts: torch.Tensor
    ) -> torch.Tensor:
        """Return ``token_ids`` ``[R, T]`` with the end mark's tokens where budgets are used up.

        ``rows`` is ``[R]`` int64. ``index`` ``[R, T]`` int64 is the index of the token that each position
        chooses. ``drafts`` ``[R, T - 1]`` int64 are the inputs of positions 1 … T - 1.
        """
        tables = self.fields.device
        states = self._follow(rows, drafts)
        is_thinking = (states >= THINKING) & (states < BEGINNING)
        is_forced = is_thinking & (index >= tables["until"][rows][:, None])
        next_place = (states - THINKING).clamp(min=0, max=MAX_MARK_TOKENS - 1)
        return torch.where(is_forced, tables["marks"][rows].gather(1, next_place), token_ids)

    def commit(self, rows: torch.Tensor, gained: torch.Tensor, num_gained: torch.Tensor) -> None:
        """Follow each row's first ``num_gained`` ``[R]`` int64 tokens of ``gained`` ``[R, T]``."""
        states = self._follow(rows, gained)
        self.fields.device["state"][rows] = states.gather(1, num_gained[:, None])[:, 0]

    def _follow(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the states before ``token_ids`` ``[R, n]`` and after each of them, ``[R, 1 + n]``."""
        tables = self.fields.device
        is_here = token_ids[:, :, None] == tables["marks"][rows][:, None]
        places = torch.where(is_here, self._places, _NUM_PLACES - 1).amin(dim=-1)
        places = places + (rows * (NUM_STATES * _NUM_PLACES))[:, None]
        moves, states = tables["moves"].view(-1), [tables["state"][rows]]
        for i in range(token_ids.shape[1]):
            states.append(moves[places[:, i] + states[-1] * _NUM_PLACES])
        return torch.cat([state[:, None] for state in states], dim=1)


def _padded(mark: tuple[int, ...]) -> list[int]:
    return [*mark, *[_NO_TOKEN] * (MAX_MARK_TOKENS - len(mark))]


def _moves(automaton: ThinkingAutomaton, marks: list[int]) -> NDArray[np.int64]:
    """Return the next states by state and by the token's place in ``marks``, one state after the other.

    A token that is in ``marks`` twice has its first place.
    """
    moves = np.empty((NUM_STATES, _NUM_PLACES), dtype=np.int64)
    moves[:] = [[otherwise(state)] for state in range(NUM_STATES)]
    for state, next_states in enumerate(automaton.moves):
        for token_id, next_state in next_states.items():
            moves[state, marks.index(token_id)] = next_state
    return moves.ravel()
