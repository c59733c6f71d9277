"""The store of a group with mutual TLS. torch's own key-value server has no TLS.

The first process keeps the entries. Each process has one connection to it, which carries one question and one
answer at a time: lists in msgpack, after their length in four bytes.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import msgpack
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from wire.tls.identity import Identity
from wire.tls.relay import answered, called

log = logging.getLogger(__name__)

POLL_S = 0.02
CALL_AGAIN_S = 0.2
LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 64 << 20


class TlsStore(Store):
    """One process's side of the store."""

    def __init__(self, connection: socket.socket, timeout: timedelta) -> None:
        super().__init__()
        self._connection = connection
        self._connection.settimeout(None)
        self._timeout = timeout
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._ask("get", key)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        found: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(desired))
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("num"))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Ask again and again, so that another thread's questions don't wait for this one's entries."""
        limit = (timeout or self._timeout).total_seconds()
        deadline_s = time.monotonic() + limit
        while not self.check(keys):
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"wait timeout after {limit:g} s, keys: {', '.join(keys)}")
            time.sleep(POLL_S)

    def _ask(self, *question: Any) -> Any:
        with self._lock:
            try:
                _send(self._connection, question)
                return _receive(self._connection)
            except (OSError, EOFError) as error:
                raise dist.DistNetworkError(f"the group's store is gone: {error}") from error


def open_store(address: tuple[str, int], identity: Identity, *, opens: bool, timeout: timedelta) -> TlsStore:
    """Open the store, or connect to it as soon as it is there. Raises :class:`dist.DistError` if it can't be
    opened, or is not there in time, and :class:`ConfigError` if no server of ours answers."""
    if opens:
        host, port = address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise dist.DistNetworkError(str(error)) from error
        ours, near = socket.socketpair()
        _Keeper(listening, near, identity).start()
        return TlsStore(ours, timeout)
    deadline_s = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return TlsStore(called(socket.create_connection(address, CALL_AGAIN_S * 10), identity), timeout)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise dist.DistNetworkError(str(error)) from error
            time.sleep(CALL_AGAIN_S)


class _Keeper:
    """Keeps the entries, and answers each process on a thread of its own, to the end of the process."""

    def __init__(self, listening: socket.socket, own: socket.socket, identity: Identity) -> None:
        self._listening = listening
        self._own = own
        self._identity = identity
        self._entries: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        _in_thread(self._serve, self._own)
        _in_thread(self._listen)

    def _listen(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _in_thread(self._serve, answered(connection, self._identity))

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while True:
                    question = _receive(connection)
                    with self._lock:
                        answer = self._answer(*question)
                    _send(connection, answer)
            except (OSError, EOFError) as error:
                log.debug("a process has left the store: %s", error)

    def _answer(self, what: str, *rest: Any) -> Any:
        entries = self._entries
        match what, *rest:
            case "set", str(key), bytes(value):
                entries[key] = value
                return None
            case "get", str(key):
                return entries.get(key, b"")
            case "add", str(key), int(amount):
                total = int(entries.get(key, b"0")) + amount
                entries[key] = str(total).encode()
                return total
            case "compare_set", str(key), bytes(expected), bytes(desired):
                if entries.get(key, b"") == expected:
                    entries[key] = desired
                return entries.get(key, expected)
            case "check", list(keys):
                return all(key in entries for key in keys)
            case "delete", str(key):
                return entries.pop(key, None) is not None
            case ["num"]:
                return len(entries)
        raise EOFError(f"unknown question {what!r}")


def _in_thread(run: Any, *arguments: Any) -> None:
    threading.Thread(target=run, args=arguments, name="store", daemon=True).start()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _send(connection: socket.socket, message: Any) -> None:
    data = msgpack.packb(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)


def _receive(connection: socket.socket) -> Any:
    length = int.from_bytes(_exactly(connection, LENGTH_BYTES), "big")
    if length > MAX_MESSAGE_BYTES:
        raise EOFError(f"a message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
    return msgpack.unpackb(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return bytes(data)
