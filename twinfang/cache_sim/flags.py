"""The flags of ``twinfang cache-sim``."""

from __future__ import annotations

from dataclasses import replace

from twinfang.flags import table
from twinfang.flags.flag import Flag, FlagGroup
from twinfang.flags.values import existing_file, integer, one_of, positive_gibibytes

NAMES = ("lru", "value", "value+placement", "served", "marconi", "clairvoyant")
"""The caches that are compared. A test compares the names with those of twinfang/cache_sim/contenders.py."""

TRACE = Flag(
    *("--trace", "TRACE", existing_file),
    "the log: a JSON object a line, with timestamp, input_length, output_length and hash_ids, as in the "
    "Mooncake traces",
)
TRACE_BLOCK = Flag(
    *("--trace-block", "TOKENS", integer(1)), "tokens of a block, to which each id belongs", default=512
)
BUDGET = Flag(
    *("--budget", "GIB", positive_gibibytes),
    "memory for cached blocks and states, such as 8, 8G or 512M; repeat to compare",
    default_text="2, 5, 10, 20 and 50 percent of what everything in the log would take",
    repeatable=True,
)
CACHES = Flag(
    *("--cache", "|".join(NAMES), one_of(*NAMES)),
    "a cache to simulate; repeat to compare",
    default_text="all",
    repeatable=True,
)
STATE_BLOCK = replace(
    table.STATE_BLOCK_SIZE,
    help="tokens between two states at fixed distances; rounded up to a multiple of --trace-block",
    default=512,
    default_text=None,
)
GPU_TFLOPS = replace(table.GPU_TFLOPS, default=400.0)
GPU_BANDWIDTH = replace(table.GPU_BANDWIDTH, default=2500.0)

LOG = FlagGroup("log", (TRACE, TRACE_BLOCK))
CACHE = FlagGroup("caches", (BUDGET, CACHES, STATE_BLOCK))
DEVICE = FlagGroup("times to the first token", (GPU_TFLOPS, GPU_BANDWIDTH, table.MAX_BATCH_TOKENS))
