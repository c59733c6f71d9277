"""The file of API keys. Each line has one key: its name, its digest, then options.

    # name         sha256 of the key                                                        options
    alice          sha256:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90
    nightly-batch  sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9  min_priority=10

Several keys may have the same name, so that a key can be replaced while both are valid. A line may
contain a key that somebody has put there by mistake. So no message repeats any part of a line, except a
number that was read as ``min_priority``.
"""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

from router.access.api_keys import NAME, ApiKey, ApiKeys
from wire.errors import ConfigError

log = logging.getLogger(__name__)

DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
MIN_PRIORITY = re.compile(r"min_priority=(-?\d{1,10})")
PRIORITIES = range(-(2**31) + 1, 2**31)
"""The priorities that a key may have."""
LOOK_INTERVAL_S = 1.0


def key_line(key: ApiKey) -> str:
    """Return the line of the file for ``key``."""
    line = f"{key.name} sha256:{key.digest.hex()}"
    return line if key.min_priority is None else f"{line} min_priority={key.min_priority}"


def read_keys(path: Path) -> ApiKeys:
    """Read the file. Raises :class:`ConfigError` with the number of the faulty line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API keys can't be read: {path}: {type(error).__name__}") from error
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        key = _key_of(fields, f"{path}, line {number}")
        if key.digest in keys:
            raise ConfigError(f"{path}, line {number}: another line has the same key; remove one of them")
        keys[key.digest] = key
    return ApiKeys(keys.values())


def _key_of(fields: list[str], where: str) -> ApiKey:
    if not NAME.fullmatch(fields[0]):
        raise ConfigError(
            f"{where}: a key's name, before its digest, must be at most 64 letters, digits, dots, dashes and "
            "underscores, beginning with a letter or digit"
        )
    digest = DIGEST.fullmatch(fields[1]) if len(fields) > 1 else None
    if digest is None:
        raise ConfigError(
            f"{where}: expected sha256: and 64 lower-case hexadecimal digits after the name; `twinfang "
            "api-key` makes such a line. If a key itself stands there, replace it: it is no longer secret"
        )
    min_priority = None
    for field in fields[2:]:
        option = MIN_PRIORITY.fullmatch(field)
        if option is None:
            raise ConfigError(f"{where}: only min_priority=<integer> is allowed after the digest")
        min_priority = int(option[1])
        if min_priority not in PRIORITIES:
            raise ConfigError(
                f"{where}: min_priority must be from {PRIORITIES[0]} to {PRIORITIES[-1]}, got {min_priority}"
            )
    return ApiKey(fields[0], bytes.fromhex(digest[1]), min_priority)


class KeyFile:
    """The keys that are valid now. Raises :class:`ConfigError` if the file can't be read at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = self._stat()
        self.keys = read_keys(path)
        if not len(self.keys):
            log.warning("%s holds no API key: every request will be refused", path)

    async def watch(self) -> None:
        """Read the file again whenever it changes, until this task is cancelled. An added or removed key
        takes effect within about a second."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed. If it can't be read, the keys stay as they were."""
        version = self._stat()
        if version == self._version:
            return
        self._version = version
        try:
            self.keys = read_keys(self._path)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error.message)
        else:
            log.info("API keys read again: %d", len(self.keys))

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
