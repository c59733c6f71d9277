"""What a person sees of a running batch: a bar on a terminal, else a line now and then. Both go to stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tqdm import tqdm

from twinfang.batch.answer_line import Answer

LINE_INTERVAL_S = 10.0
NOTE_INTERVAL_S = 10.0
BAR = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} lines  {elapsed}<{remaining}  {rate_fmt}{postfix}"


class Progress:
    """Counts what a batch has done."""

    def __init__(self, total: int, num_answers: int, num_errors: int, out: TextIO | None = None) -> None:
        self.total = total
        self.num_answers = num_answers
        self.num_errors = num_errors
        self._num_before = num_answers + num_errors
        self._num_tokens = 0
        self._out = out or sys.stderr
        self._noted_s = self._shown_s = self._started_s = time.monotonic()
        self._bar: tqdm | None = None

    def start(self) -> None:
        """Shows the first state. Rates count from now on."""
        self._noted_s = self._shown_s = self._started_s = time.monotonic()
        if self._out.isatty():
            tqdm.monitor_interval = 0  # no thread of its own: show() is called every second
            self._bar = tqdm(
                total=self.total,
                initial=self.num_done,
                file=self._out,
                bar_format=BAR,
                dynamic_ncols=True,
                unit=" lines",
            )
        else:
            self.say(self._line())

    @property
    def num_done(self) -> int:
        """Lines that have an answer or an error."""
        return self.num_answers + self.num_errors

    def add(self, answer: Answer) -> None:
        """Counts one more line."""
        self.num_errors += answer.is_error
        self.num_answers += not answer.is_error
        self._num_tokens += answer.num_tokens
        if self._bar is not None:
            self._bar.update()

    def note(self, reason: str) -> None:
        """Says why nothing happens at the moment, at most every ten seconds."""
        if time.monotonic() - self._noted_s >= NOTE_INTERVAL_S:
            self._noted_s = time.monotonic()
            self.say(f"waiting: {reason}")

    def show(self) -> None:
        """Shows the present state, if it is time for it."""
        if self._bar is not None:
            errors = f", {self.num_errors:,} errors" if self.num_errors else ""
            self._bar.set_postfix_str(f"{self._tokens_per_s():,.0f} tokens/s{errors}")
        elif time.monotonic() - self._shown_s >= LINE_INTERVAL_S:
            self._shown_s = time.monotonic()
            self.say(self._line())

    def end(self) -> None:
        """Leaves the last state on the screen."""
        if self._bar is not None:
            self.show()
            self._bar.close()
        elif self.num_done > self._num_before:
            self.say(self._line())

    def _line(self) -> str:
        share = 100 * self.num_done / self.total
        text = f"{self.num_done:,} of {self.total:,} lines ({share:.1f} %), {self.num_errors:,} errors"
        new = self.num_done - self._num_before
        if not new:
            return text
        rate = new / self._elapsed_s()
        left_s = (self.total - self.num_done) / rate
        text += f", {rate:,.1f} lines/s, {self._tokens_per_s():,.0f} tokens/s"
        return text if self.num_done == self.total else f"{text}, {left_s:,.0f} s left"

    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._started_s, 1e-3)

    def _tokens_per_s(self) -> float:
        return self._num_tokens / self._elapsed_s()

    def say(self, text: str) -> None:
        """Shows a line above the bar, if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)
