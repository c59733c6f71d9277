"""``twinfang`` whose servers and router would take for ever to take their interpreter apart:
``python -m testing.fleets.endless up …``.

On a busy machine that step takes many seconds. Here it never ends, however fast the machine is.
"""

from __future__ import annotations

import sys
import threading

from twinfang.__main__ import run
from twinfang.stack import child

MODULE = "testing.fleets.endless"


class Endless:
    """Once it is freed, its process stands still."""

    def __del__(self) -> None:
        threading.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] in ("up", "serve"):
        child.PROGRAM = (sys.executable, "-m", MODULE)
    else:
        held = Endless()
    run()
