"""How ranks on other hosts get a line to rank 0: its address is in the server's store, and they call it."""

from __future__ import annotations

import logging
import secrets
import time

import torch.distributed as dist

from engine.group_connections import answer, call
from engine.group_store import first_line, publish, published
from engine.nodes import MEETING_TIMEOUT_S, Nodes, rank_names
from engine.rank_link import RankLink
from wire.errors import DeadlineError, WireError
from wire.lockstep import Hello

log = logging.getLogger(__name__)

_SECRET = "line/secret"
_ADDRESS = "line/address"


class NodeLinks:
    """Rank 0's side. Opens the store."""

    def __init__(self, nodes: Nodes, tp_size: int) -> None:
        """Raises :class:`ConfigError` where nobody can listen at the store's address."""
        self._nodes = nodes
        self._names = rank_names(nodes, tp_size)
        self._store = nodes.store.open(is_first=True, timeout_s=MEETING_TIMEOUT_S)
        self._hello = Hello(secrets.token_hex(16), 0, {})
        self._listening = nodes.store.listen(tp_size)
        self._store.set(_SECRET, self._hello.secret)
        publish(self._store, _ADDRESS, self._listening)

    def accept(self) -> dict[int, RankLink]:
        """A line to each rank of another host, by its number, once all have called.

        Raises :class:`DeadlineError` for ranks that have not after :data:`MEETING_TIMEOUT_S`.
        """
        tp_size = len(self._names)
        missing = list(range(self._nodes.ranks(tp_size).stop, tp_size))
        deadline_s = time.monotonic() + MEETING_TIMEOUT_S
        links: dict[int, RankLink] = {}
        log.info("waiting for %d other hosts at %s", self._nodes.size - 1, self._nodes.store.address)
        while missing:
            connection, theirs = answer(
                self._listening, self._hello, missing, names=self._names, deadline_s=deadline_s
            )
            missing.remove(theirs.rank)
            links[theirs.rank] = RankLink.over(connection)
            host = self._nodes.host_of(theirs.rank, tp_size)
            if not any(self._nodes.host_of(rank, tp_size) == host for rank in missing):
                log.info("all ranks of host %d are there", host)
        self._listening.close()
        return links


def call_rank_0(nodes: Nodes, rank: int) -> RankLink:
    """Waits for rank 0 and calls it. Raises :class:`DeadlineError` if it does not come."""
    store = nodes.store.open(is_first=False, timeout_s=MEETING_TIMEOUT_S)
    try:
        hello = Hello(store.get(_SECRET).decode(), rank, {})
        connection, _ = call(published(store, _ADDRESS), hello)
    except (dist.DistStoreError, OSError, EOFError, WireError) as error:
        raise DeadlineError(
            f"rank 0 was met at {nodes.store.flag} {nodes.store.address} and then not reached: "
            f"{first_line(error)}"
        ) from error
    return RankLink.over(connection)
