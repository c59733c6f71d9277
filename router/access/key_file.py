"""The file of API keys. Each line has one key: its name, its digest, then options.

    # name         sha256 of the key                                                        options
    alice          sha256:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90
    nightly-batch  sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9  min_priority=10
    trial          sha256:5d41402abc4b2a76b9719d911017c592ae4b725b84d1e0b4cfd9ec58ce9f3a11  tokens_total=5000
    prometheus     sha256:486ea46224d1bb4fb680f34f7c9ad96a8f24ec88be73ea8e5a6c65260e9cb8a7  role=view

Several keys may have the same name, so that a key can be replaced while both are valid. A line may
contain a key that somebody has put there by mistake. So no message repeats any part of a line, except a
number or role that was read as the value of an option.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

from router.access.api_keys import NAME, ApiKey, ApiKeys
from router.access.key_limits import LIMIT_NAMES, MAX_LIMIT, KeyLimits
from router.access.role import ROLES, Role
from wire.errors import ConfigError

log = logging.getLogger(__name__)

DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
ROLE = re.compile(rf"role=({'|'.join(ROLES)})")
OPTION = re.compile(rf"(min_priority|{'|'.join(LIMIT_NAMES)})=(-?\d{{1,16}})")
PRIORITIES = range(-(2**31) + 1, 2**31)
"""The priorities that a key may have."""
LIMITS = range(1, MAX_LIMIT + 1)
LOOK_INTERVAL_S = 1.0


def key_line(key: ApiKey) -> str:
    """Return the line of the file for ``key``."""
    options: list[tuple[str, int | str]] = []
    options += [] if key.min_priority is None else [("min_priority", key.min_priority)]
    options += key.limits or ()
    options += [] if key.role is None else [("role", key.role)]
    return " ".join(
        [f"{key.name} sha256:{key.digest.hex()}", *(f"{name}={value}" for name, value in options)]
    )


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
    roles: list[str] = [found[1] for found in map(ROLE.fullmatch, fields[2:]) if found]
    if len(roles) > 1:
        raise ConfigError(f"{where}: role is given twice; remove one of them")
    options = _options_of([field for field in fields[2:] if not ROLE.fullmatch(field)], where)
    min_priority = options.pop("min_priority", None)
    limits = KeyLimits(**options) if options else None
    role = cast(Role, roles[0]) if roles else None
    return ApiKey(fields[0], bytes.fromhex(digest[1]), min_priority, limits, role)


def _options_of(fields: list[str], where: str) -> dict[str, int]:
    options: dict[str, int] = {}
    for field in fields:
        option = OPTION.fullmatch(field)
        if option is None:
            raise ConfigError(
                f"{where}: only min_priority=<integer>, role={'|'.join(ROLES)} and limits "
                f"({', '.join(LIMIT_NAMES)}, each with = and an integer) are allowed after the digest"
            )
        name, value = option[1], int(option[2])
        allowed = PRIORITIES if name == "min_priority" else LIMITS
        if value not in allowed:
            raise ConfigError(f"{where}: {name} must be from {allowed[0]} to {allowed[-1]}, got {value}")
        if name in options:
            raise ConfigError(f"{where}: {name} is given twice; remove one of them")
        options[name] = value
    return options


OnChange = Callable[[ApiKeys, ApiKeys], None]


class KeyFile:
    """The keys that are valid now. Raises :class:`ConfigError` if the file can't be read at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = self._stat()
        self.keys = read_keys(path)
        if not len(self.keys):
            log.warning("%s holds no API key: every request will be refused", path)

    async def watch(self, on_change: OnChange) -> None:
        """Read the file again whenever it changes, until this task is cancelled. An added or removed key
        takes effect within about a second. ``on_change`` gets the keys before and after."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            before = self.keys
            self.look()
            if self.keys is not before:
                on_change(before, self.keys)

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
