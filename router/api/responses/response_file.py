"""The store of responses in an SQLite file, which several router processes may share.

Calls of SQLite block while the disk works, so a thread of its own makes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from router.api.responses.response_store import StoredResponse
from router.http.openai_errors import shown
from wire.errors import (
    ConfigError,
    InvalidRequestError,
    PreviousResponseError,
    UnavailableError,
    UnknownIdError,
)
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

T = TypeVar("T")

VERSION = 1
APPLICATION_ID = 0x7F1A07
SCHEMA = (
    """
    CREATE TABLE responses (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous_id TEXT, num_bytes INTEGER NOT NULL,
        used_at REAL NOT NULL
    ) STRICT
    """,
    """
    CREATE TABLE contents (
        id TEXT PRIMARY KEY, response BLOB NOT NULL, input BLOB NOT NULL, output BLOB NOT NULL
    ) STRICT
    """,
    "CREATE INDEX by_use ON responses (used_at)",
    "CREATE INDEX by_owner ON responses (owner, used_at)",
    "CREATE TABLE owners (owner TEXT PRIMARY KEY, num INTEGER NOT NULL, num_bytes INTEGER NOT NULL) STRICT",
    """
    CREATE TRIGGER added AFTER INSERT ON responses BEGIN
        INSERT OR IGNORE INTO owners VALUES (new.owner, 0, 0);
        UPDATE owners SET num = num + 1, num_bytes = num_bytes + new.num_bytes WHERE owner = new.owner;
    END
    """,
    """
    CREATE TRIGGER removed AFTER DELETE ON responses BEGIN
        DELETE FROM contents WHERE id = old.id;
        UPDATE owners SET num = num - 1, num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
        DELETE FROM owners WHERE num = 0;
    END
    """,
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
"""``used_at`` is when a response was made or last continued. ``contents`` is a table of its own because
SQLite writes a whole row again whenever one of its values changes. ``owners`` has each owner's sums, so that
nothing has to be counted."""
SETTINGS = (
    "PRAGMA journal_mode = WAL",
    # A crash of the machine may lose the last responses, but leaves the file intact.
    "PRAGMA synchronous = NORMAL",
    # What is deleted is overwritten, so that it can't be found in the file any more.
    "PRAGMA secure_delete = ON",
)
CHAIN = """
    WITH RECURSIVE chain (id, previous_id, num_bytes, depth) AS (
        SELECT id, previous_id, num_bytes, 0 FROM responses
        WHERE id = :id AND owner = :owner AND used_at > :oldest
        UNION ALL
        SELECT r.id, r.previous_id, r.num_bytes, depth + 1
        FROM responses r JOIN chain ON r.id = chain.previous_id
        WHERE r.owner = :owner AND r.used_at > :oldest AND depth <= :max_depth
    )
    SELECT id, previous_id, num_bytes FROM chain ORDER BY depth DESC
"""
CONTENT = """
    SELECT id, previous_id, response, input, output FROM responses JOIN contents USING (id)
    WHERE id = :id AND owner = :owner AND used_at > :oldest
"""
OLDEST = """
    DELETE FROM responses WHERE id = (
        SELECT id FROM responses WHERE id != :new AND owner = (
            SELECT owner FROM owners
            WHERE EXISTS (SELECT 1 FROM responses r WHERE r.owner = owners.owner AND r.id != :new)
            ORDER BY CASE WHEN :by_number THEN num ELSE num_bytes END DESC LIMIT 1
        ) ORDER BY used_at LIMIT 1
    )
"""

ROW_BYTES = 1024
"""What a response takes in the file besides its own bytes: its rows, and its places in indices."""
MAX_SHARE = 16
"""One response may take this part of the file: a sixteenth. So a single one can't drive out many others."""
MAX_RESPONSES = 1_000_000
MAX_CONVERSATION = 4096
"""The maximum number of responses that continue each other."""
MAX_CONVERSATION_BYTES = 16 << 20
BUSY_TIMEOUT_S = 5.0
BUSY_INTERVAL_S = 0.01
PURGE_INTERVAL_S = 60.0
PURGED_AT_ONCE = 64
"""How many expired responses one transaction deletes. Other processes can write between two of them."""


class ResponseFile:
    """A file of bounded size. If it is full, the owner with the most bytes loses its oldest responses. So
    nobody can drive out the responses of others.

    Calls wait for each other in the order in which they come; :mod:`router.api.responses.own_responses` has
    clients take turns."""

    keeps = True

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        ttl_s: float,
        max_responses: int = MAX_RESPONSES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._ttl_s = ttl_s
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        """Belongs to the thread, until that has ended."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response-store")

    def open(self) -> None:
        """Open the file, or make it. Blocks, so call it before the event loop runs.

        Raises :class:`ConfigError` for a file that is not a router's store, or can't be written.
        """
        try:
            self._thread.submit(self._on_thread, lambda connection: None).result()
        except (sqlite3.Error, OSError, ValueError) as error:
            raise ConfigError(
                f"the responses in {self._path} can't be used: {error}; give another --response-store, or "
                "delete the file"
            ) from error

    async def save(self, owner: str, response: StoredResponse) -> None:
        parts = (response.response, response.input, response.output)
        num_bytes = sum(map(len, parts)) + ROW_BYTES
        if num_bytes > self._max_bytes // MAX_SHARE:
            lines.write(
                logging.ERROR,
                "response too large",
                "response %s takes %d bytes, the limit is %d, and is not stored: raise "
                "--response-store-size, of which one response may take 1/%d",
                *(response.id, num_bytes, self._max_bytes // MAX_SHARE, MAX_SHARE),
            )
            return
        row = (response.id, owner, response.previous_id, num_bytes, self._clock())

        def save(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                self._delete_expired(connection)
                connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)
                connection.execute("INSERT INTO contents VALUES (?, ?, ?, ?)", (response.id, *parts))
                self._make_room(connection, response.id)

        try:
            await self._run(save)
        except UnavailableError as error:
            lines.write(
                logging.ERROR,
                "response not stored",
                "response %s is not stored: %s",
                *(response.id, error.message),
            )

    async def find(self, owner: str, response_id: str) -> StoredResponse:
        names = {"id": response_id, "owner": owner, "oldest": self._oldest}

        def find(connection: sqlite3.Connection) -> StoredResponse | None:
            row = connection.execute(CONTENT, names).fetchone()
            return None if row is None else StoredResponse(*row)

        found = await self._run(find)
        if found is None:
            raise _unknown(response_id)
        return found

    async def conversation(self, owner: str, response_id: str) -> list[StoredResponse]:
        names = {"id": response_id, "owner": owner, "oldest": self._oldest, "max_depth": MAX_CONVERSATION}
        now = self._clock()

        def read(connection: sqlite3.Connection) -> list[StoredResponse]:
            with _transaction(connection):
                chain = connection.execute(CHAIN, names).fetchall()
                _check_chain(chain, response_id)
                contents = (connection.execute(CONTENT, names | {"id": row[0]}).fetchone() for row in chain)
                found = [StoredResponse(*content) for content in contents]
                ids = [(now, one.id) for one in found]
                connection.executemany("UPDATE responses SET used_at = ? WHERE id = ?", ids)
                return found

        return await self._run(read)

    async def delete(self, owner: str, response_id: str) -> None:
        where = (response_id, owner, self._oldest)

        def delete(connection: sqlite3.Connection) -> int:
            query = "DELETE FROM responses WHERE id = ? AND owner = ? AND used_at > ?"
            return connection.execute(query, where).rowcount

        if not await self._run(delete):
            raise _unknown(response_id)

    async def keep_purging(self) -> None:
        while True:
            try:
                await self.purge()
            except UnavailableError as error:
                message = "expired responses can't be deleted: %s"
                lines.write(logging.ERROR, "responses not purged", message, error.message)
            await asyncio.sleep(PURGE_INTERVAL_S)

    async def purge(self) -> None:
        """Delete what has expired, also from the log that SQLite writes changes to first."""

        def checkpoint(connection: sqlite3.Connection) -> None:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        while await self._run(self._delete_expired) == PURGED_AT_ONCE:
            pass
        await self._run(checkpoint)

    def close(self) -> None:
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _oldest(self) -> float:
        return self._clock() - self._ttl_s

    def _delete_expired(self, connection: sqlite3.Connection) -> int:
        query = "SELECT id FROM responses WHERE used_at <= ? ORDER BY used_at LIMIT ?"
        expired = f"DELETE FROM responses WHERE id IN ({query})"
        return connection.execute(expired, (self._oldest, PURGED_AT_ONCE)).rowcount

    def _make_room(self, connection: sqlite3.Connection, new_id: str) -> None:
        """Delete responses until the rest fits: the oldest of the owner that has the most bytes, or the most
        responses if there are too many of these. But not the one that has just come."""
        while True:
            num, num_bytes = connection.execute("SELECT sum(num), sum(num_bytes) FROM owners").fetchone()
            if num <= self._max_responses and num_bytes <= self._max_bytes:
                return
            by_number = num_bytes <= self._max_bytes
            connection.execute(OLDEST, {"new": new_id, "by_number": by_number})

    # --- the thread --------------------------------------------------------------------------------

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` on the thread. Raises :class:`UnavailableError` if the file can't be used."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._on_thread, work)
        except (sqlite3.Error, OSError, ValueError) as error:
            raise UnavailableError.told(
                "stored responses can't be used now; send the request again, or without them",
                detail=f"the responses in {self._path} can't be used: {error}",
            ) from error

    def _on_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            self._connection = _opened(self._path)
        try:
            return work(self._connection)
        except sqlite3.Error:  # the next call opens the file again, whatever has become of it
            self._connection.close()
            self._connection = None
            raise


def _opened(path: Path) -> sqlite3.Connection:
    """Open the file for its owner alone. Raises :class:`sqlite3.Error`, :class:`OSError`, and
    :class:`ValueError` for a file of another kind."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare_in_time(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare_in_time(connection: sqlite3.Connection) -> None:
    """Prepare a file that other processes may be preparing, too. SQLite does not wait for others by itself
    where it changes how a file is written."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _prepare(connection)
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
        time.sleep(BUSY_INTERVAL_S)


def _prepare(connection: sqlite3.Connection) -> None:
    if not _is_new(connection):
        found_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (found_id, version) != (APPLICATION_ID, VERSION):
            raise ValueError(
                f"it is a database of another kind or version (application id {found_id:#x}, version "
                f"{version}; expected {APPLICATION_ID:#x}, version {VERSION})"
            )
    for setting in SETTINGS:
        connection.execute(setting)
    with _transaction(connection):
        if _is_new(connection):  # otherwise another process has been faster
            for statement in SCHEMA:
                connection.execute(statement)


def _is_new(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that may write from its beginning, so that it can't fail in its midst because another
    process has written."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _check_chain(chain: list[tuple[str, str | None, int]], response_id: str) -> None:
    """Raise an error unless the rows are all of a conversation, from its beginning."""
    if not chain:
        raise PreviousResponseError(
            f"no response {shown(response_id)} is stored: it never was, or was deleted, or has expired. Send "
            "the items of the earlier turns in input instead",
            param="previous_response_id",
        )
    num_bytes = sum(row[2] for row in chain)
    if len(chain) > MAX_CONVERSATION or num_bytes > MAX_CONVERSATION_BYTES:
        raise InvalidRequestError(
            f"response {shown(response_id)} and those that it continues are {len(chain)}, with {num_bytes} "
            f"bytes; the limits are {MAX_CONVERSATION} and {MAX_CONVERSATION_BYTES}: begin a new "
            "conversation, with a shorter input",
            param="previous_response_id",
        )
    if (missing := chain[0][1]) is not None:
        raise PreviousResponseError(
            f"response {shown(response_id)} continues {shown(missing)}, which is no longer stored. Send the "
            "items of the earlier turns in input instead",
            param="previous_response_id",
        )


def _unknown(response_id: str) -> UnknownIdError:
    return UnknownIdError(
        f"no response {shown(response_id)} is stored: it never was, or was deleted, or has expired"
    )
