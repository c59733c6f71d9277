"""Whose fault it is when a line is not answered: the line's, or that of an endpoint which answers nobody.

| a try ended with | and meanwhile | then |
|---|---|---|
| 429 | | the line waits, as often as it takes |
| no connection | | all lines wait |
| any other failure | other lines were answered | the line is sent again, up to ``max_retries`` times |
| any other failure | no line was answered | all lines wait: a proxy's 502 must not turn a file into errors |
"""

from __future__ import annotations

from twinfang.batch.outcome import Meaning, Outcome
from twinfang.batch.pace import Pace, pause_s


class Tries:
    """The tries of one line."""

    def __init__(self, pace: Pace, max_retries: int) -> None:
        self._pace = pace
        self._max_retries = max_retries
        self._num_answered = pace.num_answered
        self._num_busy = self._num_failed = self._num_sent = 0

    @property
    def are_many(self) -> bool:
        """Whether the endpoint has had the line so often that it may be the cause."""
        return self._num_sent > self._max_retries

    def failed(self, outcome: Outcome) -> float | None:
        """Notes a failed try. Returns the seconds that this line has to wait, or None if it is not tried
        again."""
        self._pace.refused()
        others_answered = self._pace.num_answered > self._num_answered
        self._num_answered = self._pace.num_answered
        if outcome.meaning is Meaning.BUSY:
            self._num_busy += 1
            return pause_s(self._num_busy, outcome.retry_after_s)
        self._num_sent += outcome.was_sent
        if not (outcome.was_sent and others_answered):
            self._pace.away(outcome.retry_after_s)
            return 0.0
        self._num_failed += 1
        if self._num_failed > self._max_retries:
            return None
        return pause_s(self._num_failed, outcome.retry_after_s)
