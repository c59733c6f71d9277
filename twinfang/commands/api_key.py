"""``twinfang api-key``: makes a key, shows it once and stores only its hash."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wire.errors import ConfigError, TwinfangError

if TYPE_CHECKING:
    from router.access.api_keys import ApiKey
    from router.audit.chain_file import ChainFile


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares the command. Raises :class:`ConfigError` if the key's name is missing or malformed."""
    from router.access.api_keys import NAME

    if values.key_name is None:
        raise ConfigError("whose key is it? Give a name: twinfang api-key NAME")
    if not NAME.fullmatch(values.key_name):
        raise ConfigError(
            f"--key-name {values.key_name!r}: expected up to 64 letters, digits, dots, dashes and underscores"
        )
    return partial(_run, values)


def _run(values: argparse.Namespace) -> None:
    from router.access.api_keys import ApiKey, digest_of, new_key
    from router.access.key_file import key_line
    from router.access.key_limits import LIMIT_NAMES, KeyLimits
    from router.audit.chain_file import ChainFile

    log = None if values.audit_log is None else ChainFile(values.audit_log)  # an error here makes no key
    key = new_key()
    given = {name: getattr(values, name) for name in LIMIT_NAMES}
    limits = KeyLimits(**given) if any(given.values()) else None
    made = ApiKey(values.key_name, digest_of(key), values.min_priority, limits, values.role)
    line = key_line(made)
    path: Path | None = values.api_keys_file
    if log is not None:
        _note(log, made, path)
    if path is not None:
        _append(path, line)
        print(f"{values.key_name} added to {path}. The key, which is shown only once:", file=sys.stderr)
    else:
        print(f"The line for the router's --api-keys-file:\n{line}", file=sys.stderr)
        print("The key, which is shown only once:", file=sys.stderr)
    print(key, flush=True)


def _note(log: ChainFile, key: ApiKey, path: Path | None) -> None:
    """Notes a key in the audit log, before it is of any use."""
    import getpass

    from router.access.api_keys import ApiKeys
    from router.audit.line import now_text

    record = {"at": now_text(), "event": "key_created", "who": f"user {getpass.getuser()}", "before": None}
    what, after = str(path or "not in a file"), sorted(ApiKeys([key]).described())
    try:
        log.append([record | {"what": what, "after": after}])
    except OSError as error:
        raise TwinfangError(f"the audit log can't be written: {error}; no key was made") from error
    finally:
        log.close()


def _append(path: Path, line: str) -> None:
    """Appends ``line`` in a single write, so that two concurrent commands lose nothing. Only the
    owner of a new file can read it."""
    try:
        text = path.read_bytes() if path.exists() else b""
        start = "" if not text or text.endswith(b"\n") else "\n"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(f"{start}{line}\n")
    except OSError as error:
        raise TwinfangError(f"the key can't be added to {path}: {error.strerror}; no key was made") from error
