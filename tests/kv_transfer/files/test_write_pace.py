"""Writes rest by their bytes, and by their CPU time while anything else runs."""

import pytest

from kv_transfer.files import write_pace
from kv_transfer.files.write_pace import Times, WritePace

PIECE_BYTES = 1 << 20
PIECE_CPU_S = 2e-3
BY_BYTES_S = PIECE_BYTES / write_pace.WRITE_BYTES_PER_S
BY_CPU_S = PIECE_CPU_S / write_pace.WRITE_CORE_SHARE


class Process:
    """A clock, and the CPU time of two threads."""

    def __init__(self):
        self.clock_s = self.files_s = self.engine_s = 0.0
        self.pace = WritePace(lambda: Times(self.clock_s, self.files_s + self.engine_s, self.files_s))

    def write(self):
        self.pace.begin()
        self.files_s += PIECE_CPU_S
        self.clock_s += PIECE_CPU_S
        return self.pace.rest_s(PIECE_BYTES)

    def work(self, seconds, share):
        self.clock_s += seconds
        self.engine_s += seconds * share


def test_an_engine_that_runs_is_left_its_core():
    process = Process()
    for _ in range(3):
        assert process.write() == pytest.approx(BY_CPU_S)
        process.work(0.1, share=1.0)


def test_nobody_notices_writes_of_an_idle_process():
    process = Process()
    assert process.write() == pytest.approx(BY_CPU_S), "what ran before is not known"
    for _ in range(3):
        process.work(0.1, share=0.01)
        assert process.write() == pytest.approx(BY_BYTES_S)


def test_the_piece_after_an_answer_begins_is_followed_by_the_long_rest():
    process = Process()
    process.write()
    process.work(0.1, share=0.0)
    process.write()
    process.work(BY_BYTES_S, share=1.0)
    assert process.write() == pytest.approx(BY_CPU_S)


def test_large_pieces_that_cost_little_rest_by_their_bytes():
    process = Process()
    process.pace.begin()
    process.clock_s += 1.0
    assert process.pace.rest_s(100 * PIECE_BYTES) == pytest.approx(100 * BY_BYTES_S)
