"""What operators have changed, in an SQLite file, so that a router that starts again goes on from there.

Calls block for as long as a disk does, so while the router runs they have a thread of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from router.config import RouterConfig
from router.live_config import with_changes
from router.worker_id import AddedBy, PoolRole
from wire.errors import ConfigError

log = logging.getLogger(__name__)

VERSION = 1
APPLICATION_ID = 0x7F1A06
SCHEMA = f"""
    CREATE TABLE workers (
        role TEXT NOT NULL, address TEXT NOT NULL, state TEXT NOT NULL, added_by TEXT NOT NULL,
        PRIMARY KEY (role, address)
    ) STRICT;
    CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    PRAGMA application_id = {APPLICATION_ID};
    PRAGMA user_version = {VERSION};
"""
BUSY_TIMEOUT_S = 5.0
RETRY_S = 10.0
"""Between two tries to save what could not be saved."""

SavedState = Literal["serving", "draining", "removed"]
T = TypeVar("T")


@dataclass(frozen=True)
class SavedWorker:
    """A server that was added, drained or removed; those of which nothing is saved are as flags say."""

    role: PoolRole
    address: str
    state: SavedState
    added_by: AddedBy
    """One that a flag named, and no longer does, is not brought back."""


@dataclass(frozen=True)
class SavedChanges:
    workers: tuple[SavedWorker, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def applied_to(self, config: RouterConfig) -> RouterConfig:
        """What was changed beats flags. Raises :class:`ConfigError` for what does not go with them."""
        for name, value in self.settings.items():
            if getattr(config, name, value) != value:
                log.info("%s is %s, as it was set through the admin API", name, value)
        try:
            return with_changes(config, self.settings)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"a setting in {config.state_file} can't be used: {error}") from error


class StateFile:
    """One router's own: two of them would overwrite what the other saved."""

    def __init__(self, path: Path) -> None:
        self.warning = ""
        """Why changes would be lost if the router started again now; empty: they would not."""
        self._unsaved: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Rows by table and key."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-file")

    def load(self) -> SavedChanges:
        """What is saved; nothing if there is no file yet. Before the event loop runs: it blocks.

        Raises :class:`ConfigError` for a file that is none of ours, or can't be written.
        """
        try:
            return self._with_connection(_load)
        except (sqlite3.Error, ValueError) as error:
            raise ConfigError(
                f"the state file {self._path} can't be used: {error}; give another --state-file, or "
                "delete it to start with what the flags say"
            ) from error

    async def save_worker(self, worker: SavedWorker) -> None:
        self._unsaved["workers", worker.role, worker.address] = (worker.state, worker.added_by)
        await self._save()

    async def save_settings(self, settings: Mapping[str, Any]) -> None:
        self._unsaved |= {("settings", name): (json.dumps(value),) for name, value in settings.items()}
        await self._save()

    async def keep_trying(self) -> None:
        """Saves what could not be saved, as soon as that can be."""
        while True:
            await asyncio.sleep(RETRY_S)
            if self._unsaved:
                await self._save()

    def close(self) -> None:
        self._thread.shutdown()

    async def _save(self) -> None:
        """All that is not saved yet, in one transaction. A change holds whether it can be saved or not."""
        rows = dict(self._unsaved)

        def save(connection: sqlite3.Connection) -> None:
            with connection:
                for (table, *key), values in rows.items():
                    places = ", ".join("?" * (len(key) + len(values)))
                    connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({places})", (*key, *values))

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
        """On the thread, with a connection: they are cheap, changes rare, and none is left open."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._with_connection, work)

    def _with_connection(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S)) as connection:
            return work(connection)


def _load(connection: sqlite3.Connection) -> SavedChanges:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if is_new:
        connection.executescript(SCHEMA)
        return SavedChanges()
    found_id = connection.execute("PRAGMA application_id").fetchone()[0]
    if (found_id, version) != (APPLICATION_ID, VERSION):
        raise ValueError(
            f"it is a database of another kind or version (application id {found_id:#x}, version {version}; "
            f"expected {APPLICATION_ID:#x}, version {VERSION})"
        )
    workers = connection.execute(
        "SELECT role, address, state, added_by FROM workers ORDER BY rowid"
    ).fetchall()
    settings = connection.execute("SELECT name, value FROM settings ORDER BY rowid").fetchall()
    with connection:  # a file that can't be written shows now, not at the first change
        connection.execute(f"PRAGMA user_version = {VERSION}")
    return SavedChanges(
        workers=tuple(SavedWorker(*row) for row in workers),
        settings={name: json.loads(value) for name, value in settings},
    )
