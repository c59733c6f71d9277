"""Functions that numba compiles: one process compiles, all others on the machine find the machine code."""

import fcntl
import os
import subprocess
import sys
import time

from kernels.cpu import compiler
from kernels.cpu.jit import cpu_jit
from testing.repository import ROOT

PROGRAM = """
import numpy as np
from tests.kernels.cpu.test_compiler import _double
dispatcher = _double.dispatcher
print("ready", flush=True)
input()
_double(np.ones(3), 0, 3)
print(dispatcher.stats.cache_misses.total(), flush=True)
"""


@cpu_jit
def _double(x, begin, end):
    for i in range(begin, end):
        x[i] *= 2.0


def test_of_processes_that_need_a_function_at_the_same_time_one_compiles_it(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("now\n")
        process.stdin.flush()
    compiled = [int(process.communicate(timeout=100)[0]) for process in processes]
    assert sorted(compiled) == [0, 0, 1]


def test_nobody_waits_for_ever_for_a_process_that_compiles(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compiler, "LOCK_S", 0.05)
    path = tmp_path / "function.lock"
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        began_s = time.monotonic()
        with compiler._locked(path):
            assert time.monotonic() - began_s >= 0.05
    assert f"another process has held {path} for 0.05 s" in caplog.text


def test_no_lock_is_needed_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with compiler._locked(tmp_path / "file" / "function.lock"):
        pass
