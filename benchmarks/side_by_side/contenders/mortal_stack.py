"""``twinfang``, which gets SIGTERM when the program that has started it is killed.

A stack that outlived its benchmark would take cores from the next one.
"""

from __future__ import annotations

import ctypes
import signal

from twinfang.__main__ import run

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    run()
