"""The settings of the tiers behind the device, and the servers that may have them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from wire.errors import ConfigError


@dataclass(frozen=True)
class FileCache:
    """Where and how cached prefixes are kept in files."""

    directory: Path
    """Each server takes a folder of its own in it."""
    num_bytes: int
    """What the files of one server may take. Its ranks share it equally."""
    max_age_s: float | None = None
    """Files older than this are deleted; None: age alone deletes nothing."""
    wait_s: float = 0.0
    """A request waits this long for its prefix from files, even if computing it would take less time."""
    key_file: Path | None = None
    """A file with the key that encrypts the files; None: they are not encrypted."""

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise ConfigError(
                f"`file_cache_dir` {self.directory} needs a size: `file_cache_bytes` is {self.num_bytes}; "
                "set it, for example to 100 GiB, or leave `file_cache_dir` out"
            )
        if self.max_age_s is not None and not 0 < self.max_age_s < math.inf:
            raise ConfigError(f"`file_cache_max_age` must be positive, got {self.max_age_s}")
        if not 0 <= self.wait_s < math.inf:
            raise ConfigError(f"`file_cache_wait` must be at least 0, got {self.wait_s}")

    def of_rank(self, num_ranks: int) -> FileCache:
        """Returns the settings of one of a server's ranks."""
        return replace(self, num_bytes=self.num_bytes // num_ranks)


def check_tiers(role: str, cache_mode: str, host_bytes: int, files: FileCache | None) -> None:
    """Raises :class:`ConfigError` for tiers that a server can't use."""
    if host_bytes < 0:
        raise ConfigError(f"`host_cache_bytes` must be at least 0, got {host_bytes}")
    if host_bytes and role == "decode":
        raise ConfigError(
            f"`host_cache_bytes` {host_bytes} means nothing for a decode server, whose states come from "
            "prefill servers; set it there, and leave it out here"
        )
    if host_bytes and cache_mode == "none":
        raise ConfigError(
            f"`host_cache_bytes` {host_bytes} means nothing in `cache_mode` none, which keeps no prefixes; "
            "leave it out, or choose mode all"
        )
    if files is not None and not host_bytes:
        raise ConfigError(
            f"`file_cache_dir` {files.directory} needs `host_cache_bytes`: files are written from host "
            "memory and read into it; set it, for example to 8 GiB, or leave `file_cache_dir` out"
        )
