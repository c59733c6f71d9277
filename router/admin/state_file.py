"""Keeps operators' changes in an SQLite file, so that a router uses them again after a restart.

Calls of SQLite block while the disk works. So a running router makes them on a separate thread. The processes
of ``--workers N`` share one file: a transaction of one process never replaces what another process has
changed later.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from router.admin.ledger import Entry
from router.config import RouterConfig, with_changes
from router.fleet.links.server_link import AddedBy, PoolRole
from wire.errors import ConfigError

log = logging.getLogger(__name__)

VERSION = 1
APPLICATION_ID = 0x7F1A06
SCHEMA = (
    "CREATE TABLE workers (role TEXT NOT NULL, address TEXT NOT NULL, state TEXT NOT NULL, "
    "added_by TEXT NOT NULL, PRIMARY KEY (role, address)) STRICT",
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
STAMPS = "CREATE TABLE IF NOT EXISTS stamps (place TEXT PRIMARY KEY, stamp INTEGER NOT NULL) STRICT"
"""When each row was changed. An earlier release neither reads nor writes this table, but can use the file."""
BUSY_TIMEOUT_S = 5.0
RETRY_S = 10.0
"""Time between two attempts to save what could not be saved."""

SavedState = Literal["serving", "draining", "removed"]
T = TypeVar("T")

Rows = dict[tuple[str, ...], Entry]
"""What the database's rows should be, by table and key."""


@dataclass(frozen=True)
class SavedWorker:
    """A server that was added, drained or removed. Servers that are not saved are used as the flags say."""

    role: PoolRole
    address: str
    state: SavedState
    added_by: AddedBy
    """A server that a flag had named is not added again if no flag names it any longer."""


@dataclass(frozen=True)
class SavedChanges:
    workers: tuple[SavedWorker, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    """The same, with stamps."""

    def applied_to(self, config: RouterConfig) -> RouterConfig:
        """Return ``config`` with the changes, which override flags. Raises :class:`ConfigError` for a change
        that does not fit the flags."""
        for name, value in self.settings.items():
            if getattr(config, name, value) != value:
                log.info("%s is %s, as it was set through the admin API", name, value)
        try:
            return with_changes(config, self.settings)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"a setting in {config.state_file} can't be used: {error}") from error


class StateFile:
    """The file of one router only, because the changes of two routers would mix. A router's processes share
    it."""

    def __init__(self, path: Path) -> None:
        self.warning = ""
        """Why changes would be lost if the router restarted now. Empty if they would not."""
        self._rows: Rows = {}
        """Everything that the file should hold. If somebody deletes the file, it is written again from these
        rows."""
        self._unsaved: Rows = {}
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-file")

    def load(self) -> SavedChanges:
        """Return the saved changes; none if there is no file yet. Blocks, so call it before the event loop
        runs.

        Raises :class:`ConfigError` for a file that is not a router's state file, or can't be written.
        """
        try:
            saved = self._with_connection(_load)
        except (sqlite3.Error, ValueError) as error:
            raise ConfigError(
                f"the state file {self._path} can't be used: {error}; give another --state-file, or "
                "delete it to start with what the flags say"
            ) from error
        self._rows = {entry.place: entry for entry in saved.entries}
        return saved

    async def save(self, entries: Iterable[Entry]) -> None:
        await self._save({entry.place: entry for entry in entries})

    async def keep_trying(self) -> None:
        """Try again, every ``RETRY_S``, to save what could not be saved. If the file is gone, save
        everything."""
        while True:
            await asyncio.sleep(RETRY_S)
            is_there = await asyncio.get_running_loop().run_in_executor(self._thread, self._path.exists)
            if self._unsaved or not is_there:
                await self._save({})

    def close(self) -> None:
        self._thread.shutdown()

    async def _save(self, changed: Rows) -> None:
        """Save all that is not saved yet, in one transaction. A change takes effect even if it can't be
        saved."""
        self._rows |= changed
        self._unsaved |= changed
        rows, all_rows = dict(self._unsaved), dict(self._rows)

        def save(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute("BEGIN IMMEDIATE")  # so no other process writes between a look and a write
                is_new = _is_new(connection)
                if is_new:
                    _create(connection)
                connection.execute(STAMPS)
                for entry in (all_rows if is_new else rows).values():
                    _write(connection, entry)

        try:
            await self._run(save)
        except sqlite3.Error as error:
            had_warned = bool(self.warning)
            self.warning = (
                "the change holds, but it will be lost when the router restarts: it can't be saved in "
                f"{self._path}: {error}; the router goes on trying"
            )
            if not had_warned:
                log.warning("%s", self.warning)
            return
        for key, values in rows.items():
            if self._unsaved.get(key) is values:
                del self._unsaved[key]
        if self.warning and not self._unsaved:
            self.warning = ""
            log.info("all changes are saved in %s again", self._path)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` on the thread, with a connection. Connections are cheap and changes rare, so none is
        left open."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._with_connection, work)

    def _with_connection(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with suppress(OSError):  # SQLite says what is wrong; only the owner of a new file can use it
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
            return work(connection)


def _load(connection: sqlite3.Connection) -> SavedChanges:
    with connection:  # so a file that can't be written is found now, not at the first change
        connection.execute("BEGIN IMMEDIATE")
        if _is_new(connection):
            _create(connection)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        found_id = connection.execute("PRAGMA application_id").fetchone()[0]
        if (found_id, version) != (APPLICATION_ID, VERSION):
            raise ValueError(
                f"it is a database of another kind or version (application id {found_id:#x}, version "
                f"{version}; expected {APPLICATION_ID:#x}, version {VERSION})"
            )
        connection.execute(STAMPS)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        stamps = dict(connection.execute("SELECT place, stamp FROM stamps"))
        workers = connection.execute(
            "SELECT role, address, state, added_by FROM workers ORDER BY rowid"
        ).fetchall()
        settings = connection.execute("SELECT name, value FROM settings ORDER BY rowid").fetchall()

    def entry(table: str, key: tuple[str, ...], values: tuple[Any, ...]) -> Entry:
        return Entry(table=table, key=key, values=values, stamp=stamps.get(_place(table, key), 0))

    changed = [entry("workers", (role, address), values) for role, address, *values in workers]
    changed += [entry("settings", (name,), (json.loads(value),)) for name, value in settings]
    return SavedChanges(
        workers=tuple(SavedWorker(*row) for row in workers),
        settings={name: json.loads(value) for name, value in settings},
        entries=tuple(changed),
    )


def _is_new(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def _create(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA:
        connection.execute(statement)


def _write(connection: sqlite3.Connection, entry: Entry) -> None:
    """Write one row, unless the file has a newer one."""
    place = _place(entry.table, entry.key)
    found = connection.execute("SELECT stamp FROM stamps WHERE place = ?", (place,)).fetchone()
    if found is not None and found[0] > entry.stamp:
        return
    values = (json.dumps(entry.values[0]),) if entry.table == "settings" else entry.values
    marks = ", ".join("?" * (len(entry.key) + len(values)))
    connection.execute(f"INSERT OR REPLACE INTO {entry.table} VALUES ({marks})", (*entry.key, *values))
    connection.execute("INSERT OR REPLACE INTO stamps VALUES (?, ?)", (place, entry.stamp))


def _place(table: str, key: tuple[str, ...]) -> str:
    return json.dumps([table, *key])
