"""What every rank's files have, as rank 0 knows it. Pure.

A start is of use only if all ranks have their shares of its state and of all its blocks, and if the shares
have equal names: they come from the same writes (:mod:`kv_transfer.files.names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Shares:
    """For each name, the ranks whose files have it: one bit a rank.

    ``start_kind`` is the first byte of the names that count as starts.
    """

    def __init__(self, num_ranks: int, start_kind: bytes) -> None:
        self._everybody = (1 << num_ranks) - 1
        self._start_kind = start_kind
        self._holders: dict[bytes, int] = {}
        self.num_incomplete = 0
        """Number of starts that some ranks have and others lack."""

    def is_whole(self, name: bytes) -> bool:
        """Whether all ranks have what has this name."""
        return self._holders.get(name) == self._everybody

    def are_whole(self, names: Iterable[bytes]) -> bool:
        """Whether there are names, and all ranks have what has them."""
        found = False
        for name in names:
            if self._holders.get(name) != self._everybody:
                return False
            found = True
        return found

    def update(self, rank: int, added: Sequence[bytes], lost: Sequence[bytes]) -> None:
        """Notes what the files of a rank have got and lost."""
        bit = 1 << rank
        for name in lost:
            self._set(name, self._holders.get(name, 0) & ~bit)
        for name in added:
            self._set(name, self._holders.get(name, 0) | bit)

    def _set(self, name: bytes, holders: int) -> None:
        before = self._holders.get(name, 0)
        if name.startswith(self._start_kind):
            self.num_incomplete += self._is_part(holders) - self._is_part(before)
        if holders:
            self._holders[name] = holders
        else:
            self._holders.pop(name, None)

    def _is_part(self, holders: int) -> bool:
        return holders not in (0, self._everybody)


class JobEnds:
    """Which jobs have ended on which ranks. A job has ended when it has ended on all."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ended: dict[int, list[bool]] = {}

    def note(self, number: int, is_done: bool) -> bool | None:
        """Notes that a job has ended on one more rank.

        Returns whether it is done on all ranks; None: it has not ended on all of them yet.
        """
        ends = self._ended.setdefault(number, [])
        ends.append(is_done)
        if len(ends) < self._num_ranks:
            return None
        del self._ended[number]
        return all(ends)
