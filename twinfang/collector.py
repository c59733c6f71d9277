"""Python's garbage collector while a process starts.

Importing torch makes some hundred thousand objects, all of which live as long as the process. The collector
would look at all of them many times: a quarter of the time that a server's imports take.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Makes no garbage collection inside the block. Later collections do not look at what exists at its end.

    Only for imports: garbage that other work leaves would never be freed.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
