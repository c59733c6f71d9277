"""Compiles the CPU kernels into their cache on disk, so that the first server starts as fast as the second.

    python -m twinfang.compile_kernels

Set-up steps and builds of container images run this command. On a machine with another processor the kernels
are compiled again.
"""

from __future__ import annotations

import dataclasses
import time

from twinfang.flags.table import BUNDLED_MODEL


def main() -> None:
    """Compiles all kernels by making engines. An engine that is made runs every kind of row that it may get.
    Four engines together use every kernel of default settings: one for prefill, one for both roles, one that
    drafts, and one that keeps its weights in int8."""
    from engine.config import EngineConfig
    from engine.engine import Engine

    started = time.monotonic()
    whole = EngineConfig(BUNDLED_MODEL, "both", device="cpu", cache_memory_bytes=64 << 20, max_model_len=256)
    for changes in (
        {"role": "prefill"},
        {},
        {"num_speculative": 2, "drafter": "ngram"},
        {"weight_dtype": "int8"},
    ):
        Engine(dataclasses.replace(whole, **changes))
    print(f"CPU kernels compiled in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
