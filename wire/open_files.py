"""The number of files and connections that this process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

UNLIMITED = 1 << 20
"""What an unlimited number counts as."""


def raise_open_file_limit() -> int:
    """Raise the soft limit to the hard one, and return it. To be called at the start of each process that
    listens.

    Many systems begin with a soft limit of 1,024 for programs that use ``select``. A thousand connections
    would fill it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has a lower limit than the one that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_file_limit()


def open_file_limit() -> int:
    """Return the soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft
