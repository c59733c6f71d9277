"""Where decode rows keep the recurrent states after their drafts. Only the next step knows which one counts.

*Slots*: each of a row's T positions leaves its state in a slot of its own, and acceptance chooses one.
*Replay*: a row has one slot, in which the state is behind by the row's *pending* tokens, those that its last
step gained. The layers keep these tokens' inputs (:mod:`kernels.replay.kept_inputs`), and the next step
repeats them first. Answers have the same bits. ``pending``, and all else that changes from step to step, is
on the device, so steps may be launched before the last one was read back.

Whoever reads a state in the pool needs it complete. In a replay that takes a *flush* first:

| reader | state |
|---|---|
| preemption, fork | flushed before its copy is made |
| a server that takes the request over | flushed when the request leaves its row |
| prefix cache | after a step that may pass a boundary, the state there is flushed to the boundary's slot |
| a chunk after a decode row | flushed before the chunk |

A decode row always starts from its own slot. If a prompt's newest state is in another one, a cached state's,
the slot is copied before the prompt's first decode row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.memory.async_copy import Download, upload
from engine.memory.caches import Caches, LayerCaches
from engine.models.causal_lm import CausalLM
from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.schedule.step_plan import StepPlan
from engine.step.program import Step
from engine.step.row_progress import RowState
from engine.step.row_table import RowTable
from kernels.replay.kept_inputs import PendingRows


class DraftStates(Protocol):
    """What a step runner does for the states of decode rows. Nothing but :meth:`complete` waits."""

    layers: LayerCaches
    """What the model's layers get."""

    def begin(self, request: Request) -> None:
        """Prepare for a request whose row was filled."""

    def end(self, row: int) -> None:
        """Forget a row whose request has left."""

    def restless_rows(self, plan: StepPlan) -> list[PlannedRow] | None:
        """Return :attr:`StepPlan.restless_rows`, with the boundaries whose states the step itself stores."""

    def before(self, rows: Sequence[PlannedRow]) -> None:
        """Bring states into the slots from which a step's rows start. ``rows`` are its eventful rows."""

    def accepted(self, step: Step) -> None:
        """Note what the step gained. This is a part of the step, and captured with it."""

    def after(self, rows: Sequence[PlannedRow]) -> None:
        """Leave states at the boundaries that a launched step has passed."""

    def flush(self, rows: Sequence[int]) -> None:
        """Complete the states of rows of the tables, which are not in flight."""

    def complete(self, row: int) -> None:
        """Complete a row's state, and wait for it: another server may read it then."""

    def warm_up(self) -> None:
        """Compile all kernels that no step runs."""


class SlotStates:
    """Every position has a slot: states in the pool are always complete."""

    def __init__(self, layers: LayerCaches) -> None:
        self.layers = layers

    def begin(self, request: Request) -> None:
        pass

    def end(self, row: int) -> None:
        pass

    def restless_rows(self, plan: StepPlan) -> list[PlannedRow] | None:
        return plan.restless_rows

    def before(self, rows: Sequence[PlannedRow]) -> None:
        pass

    def accepted(self, step: Step) -> None:
        pass

    def after(self, rows: Sequence[PlannedRow]) -> None:
        pass

    def flush(self, rows: Sequence[int]) -> None:
        pass

    def complete(self, row: int) -> None:
        pass

    def warm_up(self) -> None:
        pass


class ReplayedStates:
    """Every row has one slot, and its pending tokens are repeated."""

    def __init__(self, model: CausalLM, caches: Caches, state: RowState, rows: RowTable) -> None:
        self._model = model
        self._pool = caches.state
        self._device = caches.device
        self._state = state
        self._rows = rows
        sizes = rows.num_rows + 1, rows.num_positions
        kept = [layer.kept_inputs(*sizes, caches.layers) for layer in model.recurrent_layers]
        self.layers = replace(caches.layers, kept=kept)
        self._elsewhere: dict[int, int] = {}
        """Rows of prompts whose newest state is not in the row's own slot, but in this one."""
        self._behind: set[int] = set()
        """Rows of prompts that may have a pending token."""

    def begin(self, request: Request) -> None:
        self.end(request.row)
        self._note_slot(request.row, request.memory.state_slot)

    def end(self, row: int) -> None:
        self._elsewhere.pop(row, None)
        self._behind.discard(row)

    def restless_rows(self, plan: StepPlan) -> list[PlannedRow] | None:
        rows = plan.decode_rows if plan.restless_rows is None else plan.restless_rows
        return [row._replace(boundaries=()) for row in rows]

    def before(self, rows: Sequence[PlannedRow]) -> None:
        late, moved = [], []
        for planned in rows:
            row = planned.request.row
            if not planned.is_decode:
                if row in self._behind:
                    self._behind.discard(row)
                    late.append(row)
                self._note_slot(row, planned.write_slot)
                continue
            if row in self._elsewhere:
                moved.append((row, self._elsewhere.pop(row)))
            if not planned.samples:
                self._behind.add(row)
        self.flush(late)
        if moved:
            self._bring(moved)

    def accepted(self, step: Step) -> None:
        # A row that has reached its end gains nothing, and its last tokens stay pending.
        rows, gained = step.rows[: step.num_decode], step.accepted[: step.num_decode]
        pending = self._state.pending
        newest = torch.where(gained > 0, gained, pending[rows])
        pending.scatter_(0, rows, newest)  # padding rows, which repeat the null row, all write its zero

    def after(self, rows: Sequence[PlannedRow]) -> None:
        kept = [
            (planned.request.row, boundary.length, boundary.slot)
            for planned in rows
            if planned.is_decode
            for boundary in planned.boundaries
        ]
        if not kept:
            return
        numbers, lengths, slots = (list(column) for column in zip(*kept, strict=True))
        index, ends = self._index(numbers), self._int32(lengths)
        known = self._state.num_computed.index_select(0, index)
        before = known - self._state.pending.index_select(0, index)
        is_passed = (before < ends) & (ends <= known)
        counts = (ends - before) * is_passed
        self._advance(index, counts, ends, self._int32(slots))

    def flush(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        state, index = self._state, self._index(rows)
        counts, known = (table.index_select(0, index) for table in (state.pending, state.num_computed))
        self._advance(index, counts, known, state.state_slot.index_select(0, index))
        state.pending.index_fill_(0, index, 0)

    def complete(self, row: int) -> None:
        self.flush([row])
        Download(self._state.pending).wait()  # of a few numbers, behind the flush

    def warm_up(self) -> None:
        self.flush([self._rows.null_row])

    def _note_slot(self, row: int, slot: int) -> None:
        if slot == self._rows.slots[row, 0]:
            self._elsewhere.pop(row, None)
        else:
            self._elsewhere[row] = slot

    def _bring(self, moved: Sequence[tuple[int, int]]) -> None:
        """Copy states from the slots in which they are to the rows' own slots."""
        rows = [row for row, _ in moved]
        owned = [int(self._rows.slots[row, 0]) for row in rows]
        for (_, slot), own in zip(moved, owned, strict=True):
            self._pool[own].copy_(self._pool[slot])
        self._state.state_slot.index_copy_(0, self._index(rows), self._int32(owned))

    def _advance(self, rows: Tensor, counts: Tensor, ends: Tensor, targets: Tensor) -> None:
        """Store the states after ``counts`` more tokens, ``ends`` in all, in the ``targets``."""
        slots = self._state.state_slot.index_select(0, rows)
        pending = PendingRows(rows, counts, ends)
        for layer in self._model.recurrent_layers:
            layer.flush(slots, targets, pending, self.layers)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return upload(np.array(rows, dtype=np.int64), self._device)

    def _int32(self, values: Sequence[int]) -> Tensor:
        return upload(np.array(values, dtype=np.int32), self._device)
