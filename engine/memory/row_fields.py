"""Small tables on the device, with some values for each row, which the host writes without waiting.

The host writes a row into its own copy of the tables. Before the next step is launched, :func:`send` uploads
the rows that have changed. It makes one copy from pinned memory for all :class:`RowFields`, and launches one
scatter for each of them. An assignment to an element of a tensor on the device would make the host wait until
all launched steps have run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.memory.async_copy import upload

_WORD_BYTES = 4


class RowFields:
    """One contiguous table ``[num_rows, width]`` for each field, or ``[num_rows]`` if its width is 0.

    ``fields`` gives each field's dtype, of 4 or 8 bytes, and its width. All tables lie in one buffer of words
    of 32 bits. On a CPU the host's copy and the device's tables are the same bytes.
    """

    def __init__(
        self, num_rows: int, fields: Mapping[str, tuple[torch.dtype, int]], device: torch.device
    ) -> None:
        # Fields of 8 bytes come first, so that all are aligned.
        ordered = sorted(fields.items(), key=lambda field: -field[1][0].itemsize)
        widths = [max(1, width) * dtype.itemsize // _WORD_BYTES for _, (dtype, width) in ordered]
        starts = [num_rows * first for first in np.cumsum([0, *widths])]
        host = torch.zeros(starts[-1], dtype=torch.int32)
        self._words = host.numpy()
        self._buffer = host.to(device)
        self._changed: set[int] = set()
        spans = list(zip(starts, widths, strict=False))
        self._first = np.concatenate([start + np.arange(width) for start, width in spans])
        """Indices of row 0's words."""
        self._stride = np.concatenate([np.full(width, width) for _, width in spans])
        """Distances from a row's words to the next row's."""

        def tables(words: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: words[start:end].view(dtype).view(num_rows, *([width] if width else []))
                for (name, (dtype, width)), start, end in zip(ordered, starts, starts[1:], strict=False)
            }

        self.device = tables(self._buffer)
        """The device's tables, by name. Their addresses never change."""
        self._host: dict[str, NDArray[Any]] = {name: one.numpy() for name, one in tables(host).items()}

    def write(self, row: int, **values: object) -> None:
        """Write fields of a row. The host's whole row will be sent, with old values of fields that are not
        given: give every field that steps change on the device."""
        for name, value in values.items():
            self._host[name][row] = value
        self._changed.add(row)

    def _words_to_send(self) -> NDArray[np.int64]:
        """Return ``[2, n]``: index and value of each word of the rows written since they were last sent."""
        rows = np.array(sorted(self._changed), dtype=np.int64)
        index = (self._first + rows[:, None] * self._stride).ravel()
        return np.stack([index, self._words[index]])


def send(all_fields: Sequence[RowFields]) -> None:
    """Upload the rows that the host has written. All tables are on the same device."""
    changed = [one for one in all_fields if one._changed]
    if not changed:
        return
    device = changed[0]._buffer.device
    if device.type != "cpu":
        _upload(changed, device)
    for one in changed:
        one._changed.clear()


def _upload(changed: Sequence[RowFields], device: torch.device) -> None:
    changes = [one._words_to_send() for one in changed]
    sent = upload(np.concatenate(changes, axis=1), device)
    start = 0
    for one, words in zip(changed, changes, strict=True):
        index, values = sent[:, start : start + words.shape[1]]
        one._buffer.index_copy_(0, index, values.to(torch.int32))
        start += words.shape[1]
