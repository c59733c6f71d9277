"""``twinfang purge``: deletes cached prompts from the files of servers that do not run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twinfang.commands.command import Command
from twinfang.flags import purge as flags
from twinfang.flags import table
from twinfang.flags.file_cache import FILE_CACHE_DIR, HOUR_S
from wire.errors import ConfigError, TwinfangError

if TYPE_CHECKING:
    from wire.messages.purge import PurgePrefixes


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares the command. Raises :class:`ConfigError` if it is not said where and what to delete."""
    if values.file_cache_dir is None:
        raise ConfigError("where are the files? Give the directory: twinfang purge DIR")
    if not values.file_cache_dir.is_dir():
        raise ConfigError(f"--file-cache-dir {values.file_cache_dir}: there is no such directory")
    given = [flag.name for flag in flags.TARGETS if getattr(values, flag.dest) != flag.default]
    if len(given) != 1:
        names = ", ".join(flag.name for flag in flags.TARGETS)
        raise ConfigError(f"give one of {names}: what is to be deleted? Got {', '.join(given) or 'none'}")
    return partial(_run, values.file_cache_dir, _wanted(values), values.file_cache_key_file)


def _wanted(values: argparse.Namespace) -> PurgePrefixes:
    from wire.messages.cache_salt import owner_of_given, owner_of_key
    from wire.messages.purge import PurgePrefixes

    if values.of_key is not None:
        return PurgePrefixes(owner_of_key(values.of_key))
    if values.of_salt is not None:
        return PurgePrefixes(owner_of_given(values.of_salt))
    return PurgePrefixes(older_than_s=None if values.older_than is None else values.older_than * HOUR_S)


def _run(directory: Path, wanted: PurgePrefixes, key_file: Path | None) -> None:
    from kv_transfer.files.offline_purge import folders, purge_folder
    from kv_transfer.files.seal import Sealer

    sealer, problems, num_found = Sealer.from_file(key_file), [], 0
    for path in folders(directory):
        try:
            purged = purge_folder(path, wanted, sealer)
        except (ConfigError, OSError) as error:
            problems.append(str(error))
            continue
        if purged is None:
            problems.append(
                f"{path} is in use by a server: call POST /admin/v1/purge of its router, or stop the server"
            )
            continue
        records = "" if wanted.owner is None else f"{purged.num_records} cached prompts, "
        num_found += purged.num_records
        print(f"{path}: deleted {records}{purged.num_bytes} bytes")
        if purged.error:
            problems.append(purged.error)
    if wanted.owner is not None and not num_found and not problems:
        print(
            "nothing here is of that key or cache_salt: check how it is spelled. Prompts that came through a "
            "router with --cache-isolation none belong to no key: use --older-than or --everything for them"
        )
    if problems:
        raise TwinfangError(f"something may be left: {'; '.join(problems)}")


PURGE = Command(
    "purge",
    "delete cached prompts from the files of stopped servers",
    "Deletes cached prompts from a --file-cache-dir whose servers do not run: those of one API key, of one "
    "cache_salt, of an age, or all. Folders that a server uses are named and left alone; then it ends "
    "with 1. To delete from running servers, call POST /admin/v1/purge of their router.",
    (*flags.GROUPS, table.LOGS),
    "twinfang purge /var/cache/twinfang --of-key alice",
    prepare,
    arguments=(FILE_CACHE_DIR,),
)
