"""Accounts in an SQLite file, which the router processes of one host share.

SQLite blocks while the disk works or another process writes, so a thread of its own makes the calls. Calls
that come meanwhile wait, and then share one transaction.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from router.quota.account import Account
from router.quota.limit_store import KEPT_S, Ask, LimitStoreError, Settlement, Verdict
from wire.errors import ConfigError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]

VERSION = 1
APPLICATION_ID = 0x7F1A08
COLUMNS = tuple(field.name for field in fields(Account))
SCHEMA = (
    f"CREATE TABLE accounts (name TEXT PRIMARY KEY, {', '.join(f'{name} NUMERIC' for name in COLUMNS)})",
    """
    CREATE TABLE reservations (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, num_tokens INTEGER NOT NULL, ends_s REAL NOT NULL,
        has_lapsed INTEGER NOT NULL DEFAULT 0
    ) STRICT
    """,
    "CREATE INDEX by_end ON reservations (has_lapsed, ends_s)",
    "CREATE TABLE charges (id TEXT PRIMARY KEY, at_s REAL NOT NULL) STRICT",
    "CREATE INDEX by_time ON charges (at_s)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
SETTINGS = (
    "PRAGMA journal_mode = WAL",
    # A crash of the machine may lose the last seconds of what was counted, but leaves the file intact.
    "PRAGMA synchronous = NORMAL",
)
READ = f"SELECT {', '.join(COLUMNS)} FROM accounts WHERE name = ?"
WRITE = f"INSERT OR REPLACE INTO accounts VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"
BUSY_TIMEOUT_S = 0.8
"""How long a transaction waits for those of other processes. Below the deadline of a call, so that a call
which is given up does not keep the thread."""
OPEN_TIMEOUT_S = 5.0
"""The same for the settings of a file that several processes open at once."""
BUSY_PAUSE_S = 0.001
"""Time between two attempts to begin a transaction. SQLite itself would wait up to 100 ms between two, and a
process could be unlucky for seconds."""
CALLS_AT_ONCE = 64
"""How many calls share one transaction at most."""
LAPSED_AT_ONCE = 64
"""How many reservations one transaction lets lapse, and how many old rows it deletes."""


class SqliteStore:
    """A :class:`LimitStore`."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """Open the file, or make it. Raises :class:`ConfigError` for a file that is not a router's store of
        limits, or can't be written."""
        self._path = path
        self._now = now
        self._connection: sqlite3.Connection | None = None
        """Belongs to the thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="limit-store")
        self._waiting: deque[tuple[Work, asyncio.Future[Any]]] = deque()
        self._is_working = False
        try:
            self._thread.submit(self._connected).result()
        except (sqlite3.Error, OSError, ValueError) as error:
            self._thread.shutdown(wait=False)
            raise ConfigError(
                f"the limits in {path} can't be used: {error}; give another `limit_store`, or delete the file"
            ) from error

    async def admit(self, ask: Ask) -> Verdict:
        return await self._run(lambda connection: self._admit(connection, ask))

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        def settle_all(connection: sqlite3.Connection) -> None:
            for settlement in settlements:
                self._settle(connection, settlement)

        await self._run(settle_all)

    async def check(self) -> None:
        await self._run(lambda connection: None)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    def close_now(self) -> None:
        """Close the file. Blocks."""
        self._thread.submit(self._disconnect).result()
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, result))
        self._work()
        return await result

    def _work(self) -> None:
        """Give the thread the calls that wait, unless it still has others. Calls that were given up are left
        out."""
        if self._is_working:
            return
        calls: list[tuple[Work, asyncio.Future[Any]]] = []
        while self._waiting and len(calls) < CALLS_AT_ONCE:
            call = self._waiting.popleft()
            calls += [] if call[1].cancelled() else [call]
        if calls:
            self._is_working = True
            loop = asyncio.get_running_loop()
            job = loop.run_in_executor(self._thread, self._on_thread, [work for work, _ in calls])
            job.add_done_callback(partial(self._worked, [result for _, result in calls]))

    def _worked(self, results: Sequence[asyncio.Future[Any]], job: asyncio.Future[list[Any]]) -> None:
        self._is_working = False
        error = None if job.cancelled() else job.exception()
        for i, result in enumerate(results):
            if result.done():
                continue
            if job.cancelled():
                result.cancel()
            elif error is None:
                result.set_result(job.result()[i])
            elif isinstance(error, sqlite3.Error | OSError | ValueError):
                result.set_exception(LimitStoreError(f"{self._path}: {error}"))
            else:
                result.set_exception(error)
        self._work()

    def _on_thread(self, works: Sequence[Work]) -> list[Any]:
        connection = self._connected()
        try:
            with _transaction(connection):
                return [work(connection) for work in works]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                self._disconnect()  # the next call opens the file again, which may be another one by now
            raise

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._path.exists():
            return self._connection
        self._disconnect()
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)):
            pass  # only the owner of a new file can read it
        connection = sqlite3.connect(self._path, timeout=OPEN_TIMEOUT_S, isolation_level=None)
        try:
            for setting in SETTINGS:
                connection.execute(setting)
            connection.execute("PRAGMA busy_timeout = 0")  # from here on _begin waits
            _prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _admit(self, connection: sqlite3.Connection, ask: Ask) -> Verdict:
        now_s = self._now()
        self._let_lapse(connection, now_s)
        account = _read(connection, ask.name)
        refused_by = account.admit(ask.limits, ask.num_tokens, now_s)
        _write(connection, ask.name, account)
        if refused_by is None and ask.num_tokens:
            connection.execute(
                "INSERT INTO reservations (id, name, num_tokens, ends_s) VALUES (?, ?, ?, ?)",
                (ask.id, ask.name, ask.num_tokens, now_s + ask.lasts_s),
            )
        return Verdict(account.standing(now_s), refused_by)

    def _settle(self, connection: sqlite3.Connection, settlement: Settlement) -> None:
        row = connection.execute(
            "DELETE FROM reservations WHERE id = ? RETURNING num_tokens, has_lapsed", (settlement.id,)
        ).fetchone()
        if row is None and not settlement.was_reserved:
            charge = (settlement.id, self._now())
            if connection.execute("INSERT OR IGNORE INTO charges VALUES (?, ?)", charge).rowcount:
                row = (0, False)
        if row is not None:
            account = _read(connection, settlement.name)
            account.settle(settlement, row[0], has_lapsed=bool(row[1]))
            _write(connection, settlement.name, account)

    def _let_lapse(self, connection: sqlite3.Connection, now_s: float) -> None:
        """End the reservations of processes that have died, and forget what is too old to be settled."""
        ended = connection.execute(
            "SELECT id, name, num_tokens FROM reservations WHERE has_lapsed = 0 AND ends_s < ? LIMIT ?",
            (now_s, LAPSED_AT_ONCE),
        ).fetchall()
        for reservation_id, name, num_tokens in ended:
            connection.execute("UPDATE reservations SET has_lapsed = 1 WHERE id = ?", (reservation_id,))
            connection.execute(
                "UPDATE accounts SET reserved = reserved - ? WHERE name = ?", (num_tokens, name)
            )
        old = (now_s - KEPT_S, LAPSED_AT_ONCE)
        connection.execute(
            "DELETE FROM reservations WHERE id IN "
            "(SELECT id FROM reservations WHERE has_lapsed = 1 AND ends_s < ? LIMIT ?)",
            old,
        )
        connection.execute(
            "DELETE FROM charges WHERE id IN (SELECT id FROM charges WHERE at_s < ? LIMIT ?)", old
        )


def _read(connection: sqlite3.Connection, name: str) -> Account:
    row = connection.execute(READ, (name,)).fetchone()
    return Account() if row is None else Account(*row)


def _write(connection: sqlite3.Connection, name: str, account: Account) -> None:
    connection.execute(WRITE, (name, *astuple(account)))


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the tables of a new file, and check those of an old one. Raises ValueError for a foreign file."""
    with _transaction(connection):
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in SCHEMA:
                connection.execute(statement)
        found = tuple(
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
    if found != (APPLICATION_ID, VERSION):
        raise ValueError("it is not a router's store of limits, or one of another release")


def _begin(connection: sqlite3.Connection) -> None:
    ends_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > ends_s:
                raise
        time.sleep(BUSY_PAUSE_S)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that may write from its beginning, so that it can't fail in its midst because another
    process has written."""
    _begin(connection)
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
