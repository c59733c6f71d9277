"""What has to be done before torch is imported, in a server's process and in one that forks servers."""

from __future__ import annotations

import os

from twinfang.commands.kernel_seed import SEED, seed_caches
from twinfang.commands.meta_kernels import put_off_meta_kernels

DEFAULTS = {
    # OpenMP's idle threads spin for milliseconds after each parallel loop and wait for the next one. If
    # several servers share cores, the others lose this time.
    "OMP_WAIT_POLICY": "PASSIVE",
    # No server multiplies with numpy. Its threads would start at its import, and a process with several
    # threads can't be forked safely.
    "OPENBLAS_NUM_THREADS": "1",
    # torch warns of a lost peer in pages of text; we log one line.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Variables that libraries read when they are loaded."""


def prepare_libraries() -> None:
    """Sets what is not set of :data:`DEFAULTS`, fills the kernels' caches from the installation, and makes
    torch's import shorter."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    seed_caches(SEED, os.environ)
    put_off_meta_kernels()
