"""The flag for cached prompts in host memory."""

from __future__ import annotations

from twinfang.flags.flag import Flag
from twinfang.flags.values import gibibytes

HOST_CACHE_SIZE = Flag(
    *("--host-cache-size", "GIB", gibibytes),
    "host memory of each rank for cached prompts that its device has no room for, such as 8 or 8G; 0: none. "
    "For servers that run prompts: decode servers of --role decode have none",
    default=0.0,
    setting="host_cache_bytes",
)
