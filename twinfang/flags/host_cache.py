"""The flags for cached prompts in host memory, this server's and other servers'."""

from __future__ import annotations

from twinfang.flags.flag import Flag
from twinfang.flags.values import gibibytes, zero_or_more

HOST_CACHE_SIZE = Flag(
    *("--host-cache-size", "GIB", gibibytes),
    "host memory of each rank for cached prompts that its device has no room for, such as 8 or 8G; 0: none. "
    "For servers that run prompts: decode servers of --role decode have none",
    default=0.0,
    setting="host_cache_bytes",
)
NEIGHBOUR_WAIT = Flag(
    *("--neighbour-wait", "SECONDS", zero_or_more("seconds")),
    "a request waits so long for its cached prompt from another prefill server's host memory, even if "
    "computing it may be faster",
    default=0.0,
    setting="neighbour_wait_s",
)
