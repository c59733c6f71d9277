"""Returns memory that the process has freed, but still holds, to the operating system."""

from __future__ import annotations

import ctypes
import linecache
from collections.abc import Callable

LARGE_BYTES = 256 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_back() -> None:
    """Return the free memory of the C library's heap to the operating system. To be called after work that
    used much memory for a short time. Source lines that Python keeps for tracebacks go too: they were read
    at some time, and may lie in the middle of memory that is otherwise free.

    By itself, glibc returns free memory only if it lies at the end of the heap. For example, after one text
    of 8 MB was tokenized, the process held 0.9 GB of free memory for good. The call takes milliseconds and
    does not hold the GIL. It has no effect with a C library that lacks ``malloc_trim``.
    """
    linecache.clearcache()
    if _malloc_trim is not None:
        _malloc_trim(0)


def fitted(data: bytes) -> bytes:
    """Return a copy of ``data`` that takes just the memory of its bytes. To be kept instead of what orjson
    returns: that keeps the buffer it was written in, 4 KB for three characters, a megabyte for 100 KB."""
    return bytes(memoryview(data))


def keep_small() -> None:
    """Have the C library return large pieces of memory as soon as they are freed. To be called at the start.

    By itself, glibc learns from the first large piece that is freed that it should keep such pieces: up to
    64 MiB at the end of each thread's heap, which ``malloc_trim`` does not return. It has no effect with
    another C library.
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        _mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES)


_malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Found at the start: objects that are made while a large body is parsed would keep its memory."""
_mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
