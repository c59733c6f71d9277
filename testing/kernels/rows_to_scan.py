"""Rows of different lengths with which every scan over a recurrent layer's prompts is tested. A scan's chunks
have 16 tokens."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet

from kernels.formats.stochastic_round import NEAREST, StateRounding
from testing.kernels.ragged_rows import Row, random_rows

ROWS = [  # (length, read slot, write slot, has_initial) of each row
    [(16, 3, 3, True)],
    [(15, 1, 1, False), (17, 2, 2, True)],
    [(1, 2, 2, True), (3, 4, 5, True), (48, 0, 1, False), (2, 4, 3, True)],
    [(5, 1, 4, True), (0, 3, 3, True), (6, 5, 0, True), (2, 0, 0, False), (33, 5, 2, False)],
]
BOUNDARY_ROWS = [
    [Row(20, 3, 3, True, {1: 7, 15: 8, 16: 9, 17: 10, 19: 11})],
    [Row(48, 0, 1, False, {32: 7}), Row(2, 2, 4, True, {1: 8}), Row(17, 5, 6, True, {16: 9})],
    [Row(6, 5, 0, True), Row(0, 3, 3, True), Row(3, 4, 1, True, {2: 7}), Row(5, 4, 2, True)],
    random_rows(0, 40),
    *(pytest.param(random_rows(seed, 40), marks=pytest.mark.exhaustive) for seed in (1, 2, 3)),
]
NARROW_ROWS = {  # rows that start anywhere in their sequences
    "new": [Row(150, 0, 1, False)],
    "on the grid": [Row(64, 2, 2, True, num_before=128), Row(70, 3, 4, True, num_before=640)],
    "off the grid": [
        Row(100, 2, 2, True, num_before=37),
        Row(5, 3, 3, True, num_before=62),
        Row(1, 4, 4, True, num_before=63),
    ],
    "boundaries": [Row(90, 2, 2, True, {28: 7, 60: 8}, num_before=100), Row(20, 0, 3, False, {16: 9})],
}
ROUNDINGS = {"nearest": NEAREST, "by_chance": StateRounding.stochastic(2, first_head=3)}


def narrow_rows() -> list[ParameterSet]:
    """Return :data:`NARROW_ROWS`, each with each rounding. By chance, rows that start on the grid run only in
    ``make test-all``."""
    return [
        pytest.param(
            rows,
            rounding,
            id=f"{name}-{kind}",
            marks=[pytest.mark.exhaustive] if kind == "by_chance" and name in ("new", "on the grid") else [],
        )
        for name, rows in NARROW_ROWS.items()
        for kind, rounding in ROUNDINGS.items()
    ]


def further(*values: int) -> list[object]:
    """Marks values of a sweep that only ``make test-all`` tries."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
