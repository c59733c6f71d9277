"""The flags for cached prompts in files, behind host memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from twinfang.flags.flag import Flag
from twinfang.flags.values import existing_file, gibibytes, positive, zero_or_more
from wire.errors import ConfigError

if TYPE_CHECKING:
    from engine.files.tier_settings import FileCache

GIB = 1 << 30
HOUR_S = 3600


def _directory(text: str) -> Path:
    """Returns the absolute path of a directory, which need not exist."""
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ValueError("expected a directory")
    return path


FILE_CACHE_DIR = Flag(
    *("--file-cache-dir", "DIR", _directory),
    "directory for cached prompts that are written from host memory to files, so that they are there after a "
    "restart; each server takes a folder of its own in it. Needs --host-cache-size and --file-cache-size",
)
FILE_CACHE_SIZE = Flag(
    *("--file-cache-size", "GIB", gibibytes),
    "what the files of one server may take in --file-cache-dir, such as 200 or 200G",
    default=0.0,
    setting="file_cache_bytes",
)
FILE_CACHE_MAX_AGE = Flag(
    *("--file-cache-max-age", "HOURS", positive("hours")),
    "cached prompts in files are deleted before they are older than this; by default only size deletes them",
)
FILE_CACHE_WAIT = Flag(
    *("--file-cache-wait", "SECONDS", zero_or_more("seconds")),
    "a request waits so long for its cached prompt from files, even if computing it may be faster",
    default=0.0,
)
FILE_CACHE_KEY_FILE = Flag(
    *("--file-cache-key-file", "FILE", existing_file),
    "file with a key of 32 bytes, or of 64 hex digits: files are encrypted with it (AES-256-GCM)",
)
FILE_CACHE = (FILE_CACHE_DIR, FILE_CACHE_SIZE, FILE_CACHE_MAX_AGE, FILE_CACHE_WAIT, FILE_CACHE_KEY_FILE)


def file_cache(values: argparse.Namespace) -> FileCache | None:
    """Builds the settings of the files; None: there are none. Raises :class:`ConfigError` for flags that
    contradict one another."""
    from engine.files.tier_settings import FileCache

    if values.file_cache_dir is None:
        for flag in FILE_CACHE[1:]:
            if getattr(values, flag.dest) != flag.default:
                raise ConfigError(f"{flag.name} needs --file-cache-dir: give a directory, or leave it out")
        return None
    hours = values.file_cache_max_age
    return FileCache(
        values.file_cache_dir,
        int(values.file_cache_size * GIB),
        max_age_s=None if hours is None else hours * HOUR_S,
        wait_s=values.file_cache_wait,
        key_file=values.file_cache_key_file,
    )
