"""Decides whether a step waits a moment for masks, or masks have been late too often."""

from __future__ import annotations

MOST_STEPS = 16


class Patience:
    """After each wait in vain, twice as many steps as before begin without waiting, until masks come in time.

    If the processors are busy with other work, lanes are late with all masks, and each step would lose the
    whole wait. Without it, only the rows whose masks are late miss steps.
    """

    def __init__(self) -> None:
        self._num_to_pass = 0
        self._num_steps = 0
        """Steps to begin without a wait, as counted after the last wait in vain."""

    def may_wait(self) -> bool:
        """Whether this step may wait. Must be called once per step."""
        if self._num_to_pass:
            self._num_to_pass -= 1
            return False
        return True

    def waited(self, have_come: bool) -> None:
        """Notes whether the masks had come when the wait ended."""
        self._num_steps = 0 if have_come else min(2 * self._num_steps or 1, MOST_STEPS)
        self._num_to_pass = self._num_steps
