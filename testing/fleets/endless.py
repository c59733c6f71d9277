"""A ``twinfang`` whose servers and router never finish the teardown of their interpreter: ``python -m
testing.fleets.endless up …``.

On a busy machine the teardown takes many seconds. Here it never ends, on any machine.
"""

from __future__ import annotations

import sys
import threading

from twinfang.__main__ import run
from twinfang.stack import child

MODULE = "testing.fleets.endless"


class Endless:
    """When this object is freed, its process hangs and never ends."""

    def __del__(self) -> None:
        threading.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] in ("up", "serve"):
        child.PROGRAM = (sys.executable, "-m", MODULE)
    else:
        held = Endless()
    run()
