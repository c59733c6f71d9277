"""Copies compiled kernels that came with the installation into the caches on disk, which may be empty.

Container images bring along the machine code of the CPU kernels, for the processor on which the image was
built, or the C module with which Triton launches kernels. The caches are where a server can write.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

SEED = Path(sys.prefix) / "share" / "twinfang" / "kernels"
CACHES = {"numba": "NUMBA_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}
"""The folders of the seed, and the variables that name the caches."""


def seed_caches(seed: Path, environment: Mapping[str, str]) -> None:
    """Copies all files of ``seed`` that the caches lack. Several processes may do this at the same time."""
    for name, variable in CACHES.items():
        cache = environment.get(variable)
        if cache:
            try:
                _copy_missing(seed / name, Path(cache))
            except OSError as error:
                log.warning("%s %s: compiled kernels can't be copied there: %s", variable, cache, error)


def _copy_missing(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_file() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            part = copy.with_name(f"{copy.name}.{os.getpid()}.part")
            shutil.copyfile(path, part)
            part.replace(copy)  # nobody reads half a file
