"""Whether a step waits a moment for masks that are late again and again."""

from __future__ import annotations

MOST_STEPS = 16


class Patience:
    """After each wait in vain twice as many steps begin without one, until masks come in time again.

    Where the processors are busy with other things, lanes are late with all masks, and each step would lose
    the whole wait. Rows whose masks are late just miss steps.
    """

    def __init__(self) -> None:
        self._num_to_pass = 0
        self._num_steps = 0
        """Without a wait, after the last one in vain."""

    def may_wait(self) -> bool:
        """Asked once a step."""
        if self._num_to_pass:
            self._num_to_pass -= 1
            return False
        return True

    def waited(self, have_come: bool) -> None:
        """How the wait ended."""
        self._num_steps = 0 if have_come else min(2 * self._num_steps or 1, MOST_STEPS)
        self._num_to_pass = self._num_steps
