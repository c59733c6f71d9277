"""Writes rest by their bytes, and by their CPU time while anything else runs."""

import pytest

from kv_transfer.files import write_pace
from kv_transfer.files.write_pace import LOOK_S, Times, WritePace

PIECE_BYTES = 1 << 19
PIECE_CPU_S = 2e-3
BY_BYTES_S = PIECE_BYTES / write_pace.WRITE_BYTES_PER_S
BY_CPU_S = PIECE_CPU_S / write_pace.WRITE_CORE_SHARE


class Process:
    """A clock, and the CPU time of the files' thread and of the engine's."""

    def __init__(self):
        self.clock_s = self.files_s = self.engine_s = 0.0
        self.pace = WritePace(lambda: Times(self.clock_s, self.files_s + self.engine_s, self.files_s))

    def write(self, num_bytes=PIECE_BYTES):
        self.clock_s += PIECE_CPU_S
        self.files_s += PIECE_CPU_S
        self.pace.wrote(num_bytes, PIECE_CPU_S)

    def rest(self, share):
        """Rests while the engine uses this share of a core. Returns for how long."""
        start_s = self.clock_s
        while rest_s := self.pace.rest_s():
            self.clock_s += rest_s
            self.engine_s += rest_s * share
        return self.clock_s - start_s


def test_the_first_piece_comes_at_once():
    assert Process().pace.rest_s() == 0.0


def test_an_engine_that_runs_is_left_its_core():
    process = Process()
    for _ in range(3):
        process.write()
        assert process.rest(share=1.0) == pytest.approx(BY_CPU_S)


def test_the_limit_of_cpu_time_does_not_hold_while_nothing_else_runs():
    process = Process()
    for _ in range(3):
        process.write()
        assert process.rest(share=0.01) == pytest.approx(max(BY_BYTES_S, LOOK_S))


def test_a_long_rest_ends_soon_after_the_last_answer():
    process = Process()
    process.write()
    for _ in range(2):
        process.clock_s += LOOK_S
        process.engine_s += LOOK_S
        assert process.pace.rest_s() == pytest.approx(LOOK_S)
    assert process.rest(share=0.0) == pytest.approx(LOOK_S)


def test_the_limit_of_bytes_always_holds():
    process = Process()
    for share in (0.0, 1.0):
        process.write(100 * PIECE_BYTES)
        assert process.rest(share) == pytest.approx(100 * BY_BYTES_S)
