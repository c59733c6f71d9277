"""Ragged prefill rows for the kernel tests: lengths, slots and boundaries as plain lists, then as tensors."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import torch

from kernels.ssm.boundaries import Boundaries

NUM_SLOTS = 32


@dataclass(frozen=True)
class Row:
    """One row. ``stores`` maps the offset of each boundary to the slot where the state at it is written."""

    length: int
    read_slot: int
    write_slot: int
    has_initial: bool
    stores: dict[int, int] = field(default_factory=dict)
    num_before: int = 0


class RaggedRows:
    """A batch of rows on a device: the tensors that the prefill ops take."""

    def __init__(self, rows: list[Row], device: str = "cpu") -> None:
        self.rows = rows
        self.num_tokens = sum(row.length for row in rows)
        self.starts = [0, *itertools.accumulate(row.length for row in rows)]
        names = {
            "cu_seqlens": torch.tensor(self.starts).int(),
            "read_slots": torch.tensor([row.read_slot for row in rows]).int(),
            "write_slots": torch.tensor([row.write_slot for row in rows]).int(),
            "has_initial": torch.tensor([row.has_initial for row in rows]),
        }
        self.num_before = torch.tensor([row.num_before for row in rows]).int()
        entries = [(i, *store) for i, row in enumerate(rows) for store in row.stores.items()]
        self.boundaries = None
        if entries:
            columns = torch.tensor(entries, dtype=torch.int32).T.contiguous()
            cut = Boundaries.cut(*columns, **names, num_before=self.num_before)
            self.boundaries = cut.map(lambda tensor: tensor.to(device))
        self.num_before = self.num_before.to(device)
        self.index = [tensor.to(device) for tensor in names.values()]

    @property
    def filled_slots(self) -> list[int]:
        """Slots whose state is read."""
        return [row.read_slot for row in self.rows if row.write_slot and row.has_initial]

    @property
    def written_slots(self) -> list[int]:
        """Slots that the scan has to write."""
        live = [row for row in self.rows if row.write_slot and row.length]
        return [slot for row in live for slot in (*row.stores.values(), row.write_slot)]


def random_rows(seed: int, max_length: int) -> list[Row]:
    """Returns rows of all kinds: empty, padding, first chunks and later ones, with and without boundaries."""
    choice = random.Random(seed)
    slots = choice.sample(range(1, NUM_SLOTS), NUM_SLOTS - 1)
    shared = slots.pop()  # a cached state that several rows start from
    rows = []
    for _ in range(choice.randint(2, 5)):
        length = choice.choice([0, 1, 2, 3, choice.randint(4, max_length), choice.randint(4, max_length)])
        write = slots.pop()
        read = choice.choice([write, shared])
        if choice.random() < 0.15:
            rows.append(Row(length, read, 0, True))
            continue
        initial = choice.random() < 0.6
        offsets = choice.sample(range(1, length), choice.randint(0, min(5, length - 1))) if length > 1 else []
        stores = {offset: slots.pop() for offset in sorted(offsets)}
        rows.append(Row(length, read if initial else 0, write, initial, stores))
    return rows
