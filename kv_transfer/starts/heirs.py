"""Which of the servers that stay gets which start of a server that leaves. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Heirs:
    """Divides starts among servers, so that starts of one conversation go to one server.

    A start whose path is for the greater part the path of an earlier one goes where that one went: only the
    rest of it has to be read there. All others go to the servers in turn.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._turn = 0
        self._owners: dict[bytes, str] = {}
        """The server that has got each block."""

    def choose(self, keys: Sequence[bytes]) -> str:
        """Returns the server for the start with these keys of blocks."""
        for num_blocks in range(len(keys), len(keys) // 2, -1):
            owner = self._owners.get(keys[num_blocks - 1])
            if owner is not None:
                break
        else:
            owner = self._addresses[self._turn % len(self._addresses)]
            self._turn += 1
        for key in keys:
            self._owners.setdefault(key, owner)
        return owner
