"""A process that must not wait for its GPU ends at once, whatever its threads and exit handlers do."""

import subprocess
import sys
import textwrap

import psutil

from testing.conditions import PROMPT_S, wait_until

STUCK = """
    import atexit, multiprocessing, threading, time
    from telemetry.process_end import leave_at_once, leave_within

    def wait():
        threading.Event().wait()

    atexit.register(wait)
    threading.Thread(target=wait).start()
"""


def run(code):
    command = [sys.executable, "-c", textwrap.dedent(STUCK) + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROMPT_S, check=False)


def test_neither_threads_nor_exit_handlers_are_waited_for():
    ended = run("print('said'); leave_at_once(71)")
    assert (ended.returncode, ended.stdout) == (71, "said\n")


def test_child_processes_are_killed():
    """A new process needs the GPUs of the ranks that this one has started."""
    ended = run("""
        child = multiprocessing.get_context("fork").Process(target=wait)
        child.start()
        print(child.pid)
        leave_at_once(71)
    """)
    assert ended.returncode == 71
    wait_until(lambda: not psutil.pid_exists(int(ended.stdout)), "the child has ended")


def test_a_process_that_does_not_stop_in_time_is_ended():
    ended = run("leave_within(0.1, 70); wait()")
    assert ended.returncode == 70
    assert ended.stderr == "no clean stop within 0.1 s; ending\n"
