"""Random histories of speculation: which sequences are in a step, and how many of their drafts are accepted.

The same history is run in two forms: with a slot for every position, and with one state that is replayed
(kernels/replay). Both must have the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.replay.kept_inputs import PendingRows

NOBODY = -1
"""Stands for a padding row."""


@dataclass(frozen=True)
class Rows:
    """The rows of a step or of a flush. Slots are 0 in padding rows, whose other numbers are arbitrary."""

    sequences: list[int]
    read_slots: Tensor
    """``[R]`` of the slots form"""
    write_slots: Tensor
    """``[R, T]`` of the slots form"""
    replay_read: Tensor
    """``[R]`` of the replay form, as the next two"""
    replay_write: Tensor
    pending: PendingRows
    stored: list[int]
    """The replay form's slots that are stored."""


class History:
    """``num_sequences`` sequences with drafts, ``num_positions`` in a step.

    A sequence has ``num_positions`` slots in the slots form. It has two in the replay form, which stores its
    state in one and the other in turn, or always in the first one if ``in_place``, and one for a state before
    the newest one.
    """

    def __init__(
        self, num_sequences: int, num_positions: int, device: str, *, seed: int = 0, in_place: bool = False
    ) -> None:
        self.choice = random.Random(seed)
        self.num_sequences, self.num_positions, self.device = num_sequences, num_positions, device
        self.in_place = in_place
        self.lengths = [self.choice.randrange(1, 40) for _ in range(num_sequences)]
        self.pending = [0] * num_sequences
        self.slot = [1 + q * num_positions for q in range(num_sequences)]
        self.replay_slot = [1 + 2 * q for q in range(num_sequences)]

    @property
    def num_slots(self) -> int:
        return 1 + self.num_sequences * max(3, self.num_positions)

    @property
    def num_kept_rows(self) -> int:
        """One for each sequence, and one for padding."""
        return self.num_sequences + 1

    def step(self) -> Rows:
        """Returns some sequences and padding rows, in a random order."""
        return self.rows(self._some(), self.num_positions)

    def accept(self, rows: Rows) -> None:
        """Decides how many of the step's positions count, at least one of each row."""
        self._leave(rows)
        for q in rows.sequences:
            if q != NOBODY:
                count = self.choice.randint(1, self.num_positions)
                self.slot[q] = 1 + q * self.num_positions + count - 1
                self.pending[q] = count
                self.lengths[q] += count

    def flush(self, *, everybody: bool = False) -> Rows:
        """Returns some sequences, or all, as rows of a flush, after which nothing of them is pending."""
        rows = self.rows(list(range(self.num_sequences)) if everybody else self._some(), 0)
        self._leave(rows)
        for q in rows.sequences:
            if q != NOBODY:
                self.pending[q] = 0
        return rows

    def earlier(self) -> tuple[Rows, list[int]]:
        """Returns rows of a flush that store states of one token less, and their slots in the slots form."""
        sequences = [q for q in range(self.num_sequences) if self.pending[q] > 1]
        rows = self.rows(sequences, 0)
        pending = rows.pending
        spare = [1 + 2 * self.num_sequences + q for q in sequences]
        fewer = PendingRows(pending.rows, pending.counts - 1, pending.seq_lens - 1)
        rows = replace(rows, replay_write=self._int32(spare), pending=fewer, stored=spare)
        return rows, [self.slot[q] - 1 for q in sequences]

    def rows(self, sequences: list[int], num_new: int) -> Rows:
        """Returns the rows of these sequences with ``num_new`` new positions, none for a flush."""
        width, live = self.num_positions, [q != NOBODY for q in sequences]
        write = [[(1 + q * width + i) if q != NOBODY else 0 for i in range(width)] for q in sequences]
        targets = [self._target(q) if q != NOBODY else 0 for q in sequences]
        counts = [self.pending[q] if q != NOBODY else 1 for q in sequences]
        return Rows(
            sequences,
            self._int32([self.slot[q] if q != NOBODY else 0 for q in sequences]),
            self._int32(write),
            self._int32([self.replay_slot[q] if q != NOBODY else 0 for q in sequences]),
            self._int32(targets),
            PendingRows(
                self._int32([self.num_sequences - 1 - q for q in sequences]).long(),
                self._int32(counts),
                self._int32([self.lengths[q] + num_new if q != NOBODY else 0 for q in sequences]),
            ),
            [t for t, count, is_live in zip(targets, counts, live, strict=True) if is_live and count > 0],
        )

    def _some(self) -> list[int]:
        live = self.choice.sample(range(self.num_sequences), self.choice.randint(1, self.num_sequences))
        live += [NOBODY] * self.choice.randint(0, 2)
        self.choice.shuffle(live)
        return live

    def _target(self, q: int) -> int:
        return self.replay_slot[q] if self.in_place else 4 * q + 3 - self.replay_slot[q]

    def _leave(self, rows: Rows) -> None:
        for q in rows.sequences:
            if q != NOBODY and self.pending[q] > 0:
                self.replay_slot[q] = self._target(q)

    def _int32(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


class Forms(Protocol):
    """One op in both forms, each with its pool ``[num_slots, …]``."""

    slots: Tensor
    replayed: Tensor

    def inputs(self, num_rows: int) -> Any: ...

    def update(self, inputs: Any, rows: Rows) -> Tensor: ...

    def replay(self, inputs: Any, rows: Rows) -> Tensor: ...

    def flush(self, rows: Rows) -> None: ...


def assert_forms_agree(forms: Forms, history: History, num_steps: int, *, is_exact: bool = True) -> None:
    """Runs a history in both forms. All outputs and all states that a flush stores must have the same bits,
    and the replay form must write no other slots."""
    same = _assert_same_bits if is_exact else torch.testing.assert_close
    for q in range(history.num_sequences):
        forms.replayed[history.replay_slot[q]] = forms.slots[history.slot[q]]
    for number in range(num_steps):
        rows = history.step()
        inputs = forms.inputs(len(rows.sequences))
        expected, before = forms.update(inputs, rows), forms.replayed.clone()
        same(forms.replay(inputs, rows), expected)
        _assert_only_written(forms.replayed, before, rows.stored)
        history.accept(rows)
        if number % 4 == 1:
            before, (rows, slots) = forms.replayed.clone(), history.earlier()
            forms.flush(rows)
            _assert_only_written(forms.replayed, before, rows.stored)
            same(forms.replayed[rows.stored], forms.slots[slots])
        if number % 4 == 3 or number == num_steps - 1:
            before = forms.replayed.clone()
            rows = history.flush(everybody=number == num_steps - 1)
            forms.flush(rows)
            _assert_only_written(forms.replayed, before, rows.stored)
            for q in rows.sequences:
                if q != NOBODY:
                    same(forms.replayed[history.replay_slot[q]], forms.slots[history.slot[q]])


def bits_of(tensor: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    same = bits_of(found) == bits_of(expected)
    first = (~same).nonzero()[:3].tolist()
    assert same.all(), f"{int((~same).sum())} of {same.numel()} differ, at first {first}"


def _assert_only_written(pool: Tensor, before: Tensor, slots: list[int]) -> None:
    changed = (bits_of(pool) != bits_of(before)).flatten(1).any(dim=1)
    changed[slots] = False
    assert not changed.any(), f"slots {changed.nonzero().flatten().tolist()} were written, not only {slots}"
