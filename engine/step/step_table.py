"""A table of the host's rows on the device, and the rows of a step in the step's order.

Only those cells of a row table (:mod:`engine.step.row_table`) are uploaded that have changed. When a step has
other rows than the one before, its rows are copied on the device. So the host does work only for what has
changed, however long the rows are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.memory.async_copy import upload


@dataclass(frozen=True)
class StepTable:
    """``[N + 1, columns]`` int32 on host and device, and its rows in the order of a step."""

    host: NDArray[np.int32]
    all_rows: torch.Tensor
    """The device's copy of ``host``; on a CPU it is the same memory."""
    device: torch.Tensor
    """``[R, columns]``: the step's rows."""
    here: NDArray[np.int32] | None
    """The same memory if the device is the host, else None. Numpy writes to it: many calls of torch let go of
    the interpreter's lock, and then the engine waits until the thread that sends tokens has done its work."""

    @classmethod
    def make(cls, host: NDArray[np.int32], num_rows: int, device: torch.device) -> StepTable:
        """Mirror ``host``. A step has at most ``num_rows`` rows."""
        step = torch.zeros((num_rows, host.shape[1]), dtype=torch.int32, device=device)
        here = step.numpy() if device.type == "cpu" else None
        return cls(host, torch.from_numpy(host).to(device), step, here)

    def arrange(self, rows: torch.Tensor) -> None:
        """Copy the rows of a step to their places. ``rows`` ``[R]`` int64 is on the device."""
        if self.here is not None:
            self.here[: len(rows)] = self.host[rows.numpy()]
        else:
            torch.index_select(self.all_rows, 0, rows, out=self.device[: len(rows)])

    def send(self, cells: NDArray[np.int64], places: NDArray[np.int64] | None) -> None:
        """Upload cells that have changed, to the table and to the step's rows.

        ``cells`` are indices into the flattened table. ``places[row]`` is the place of a row among the step's
        rows; -1 if the row is not in the step. None: :meth:`arrange` follows. A cell may be named twice.
        """
        values = self.host.reshape(-1)[cells]
        if self.here is None:
            _scatter(self.all_rows, cells, values)
        if places is None:
            return
        rows, columns = np.divmod(cells, self.host.shape[1])
        at = places[rows]
        is_here = at >= 0
        cells, values = (at * self.host.shape[1] + columns)[is_here], values[is_here]
        if self.here is not None:
            self.here.reshape(-1)[cells] = values
        else:
            _scatter(self.device, cells, values)


def _scatter(table: torch.Tensor, cells: NDArray[np.int64], values: NDArray[np.int32]) -> None:
    """Write values to cells of the flattened table, without waiting for the device."""
    if not len(cells):
        return
    sent = upload(np.stack([cells, values]), table.device)  # one copy for both
    table.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))
