"""Decides whether a step waits a moment for masks. It does not wait if masks have been late too often."""

from __future__ import annotations

MOST_STEPS = 16


class Patience:
    """After a wait in vain, the next step begins without waiting. With each further wait in vain, the number
    of such steps doubles, up to :data:`MOST_STEPS`. When masks come in time, every step may wait again.

    If the processors are busy with other work, lanes are late with all masks, and each step would lose the
    whole waiting time. If steps do not wait, only the rows whose masks are late miss steps.
    """

    def __init__(self) -> None:
        self._num_to_pass = 0
        self._num_steps = 0
        """Number of steps that begin without a wait after the last wait in vain."""

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
