"""Links between rank 0 and ranks on other hosts: these ranks read rank 0's address in the server's store and
connect to it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator

import torch.distributed as dist

from engine.group.connections import ONE_RELEASE, Reception, call
from engine.group.nodes import MEETING_TIMEOUT_S, Nodes, rank_names
from engine.group.rank_link import RankLink
from engine.group.store import first_line, publish, published
from wire.errors import ConfigError, DeadlineError, WireError
from wire.messages.group import Hello

log = logging.getLogger(__name__)

_SECRET = "line/secret"
_ADDRESS = "line/address"


class NodeLinks:
    """Rank 0's side of the links."""

    def __init__(self, nodes: Nodes, tp_size: int) -> None:
        """Opens the store, listens on a port, and publishes its address in the store.

        Raises :class:`ConfigError` if this process can't listen at the store's address, or if another host 0
        uses that store.
        """
        self._nodes = nodes
        self._names = rank_names(nodes, tp_size)
        self._store = nodes.store.open(is_first=True, timeout_s=MEETING_TIMEOUT_S)
        self._hello = _hello(secrets.token_hex(16), nodes, 0, tp_size)
        secret = self._store.compare_set(_SECRET, "", self._hello.secret).decode()
        if secret != self._hello.secret:
            raise ConfigError(
                f"another host 0 is at `{nodes.store.setting}` {nodes.store.address}: give this one another "
                "`nodes.rank`, or another address if it belongs to another server"
            )
        self._listening = nodes.store.listen(tp_size)
        publish(self._store, _ADDRESS, self._listening)

    def accept(self) -> Iterator[tuple[int, RankLink]]:
        """Yields each rank of another host, with the link to it, when that rank connects.

        Raises :class:`DeadlineError` if ranks have not connected after :data:`MEETING_TIMEOUT_S`, and
        :class:`ConfigError` if a rank was started for another number of ranks or hosts than rank 0.
        """
        tp_size = len(self._names)
        missing = {rank: self._names[rank] for rank in range(self._nodes.ranks(tp_size).stop, tp_size)}
        deadline_s = time.monotonic() + MEETING_TIMEOUT_S
        log.info("host 0 of %d waits for the others at %s", self._nodes.size, self._nodes.store.address)
        identity = self._nodes.store.own_identity()
        with self._listening, Reception(self._listening, self._hello, identity) as reception:
            while missing:
                caller, connection = reception.next(missing, deadline_s=deadline_s)
                del missing[caller]
                yield caller, RankLink.over(connection)
                host = self._nodes.host_of(caller, tp_size)
                if not any(self._nodes.host_of(rank, tp_size) == host for rank in missing):
                    log.info("all ranks of host %d are there", host)


def call_rank_0(nodes: Nodes, rank: int, tp_size: int) -> RankLink:
    """Waits for rank 0 and connects to it.

    Raises :class:`ConfigError` if rank 0 refuses this rank, or has not opened the store in time, and
    :class:`DeadlineError` if rank 0 ends, or can't be reached at the address in the store.
    """
    store = nodes.store.open(is_first=False, timeout_s=MEETING_TIMEOUT_S)
    try:
        hello = _hello(store.get(_SECRET).decode(), nodes, rank, tp_size)
        connection = call(published(store, _ADDRESS), hello, nodes.store.own_identity())
    except (dist.DistError, OSError, EOFError, WireError) as error:
        raise DeadlineError(
            f"host 0 was found at `{nodes.store.setting}` {nodes.store.address} but could not be reached: "
            f"{first_line(error)}; it has ended, or it already has all its hosts, one with this `nodes.rank`"
        ) from error
    return RankLink.over(connection)


def _hello(secret: str, nodes: Nodes, rank: int, tp_size: int) -> Hello:
    terms = ONE_RELEASE | {"`tensor_parallel`": str(tp_size), "`nodes.size`": str(nodes.size)}
    return Hello(secret, rank, terms, rank_names(nodes, tp_size)[rank])
