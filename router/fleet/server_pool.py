"""All servers that a router knows: their connections, their stats."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterable, Sequence
from typing import TypedDict

from router.background import OnFatal, cancel_and_wait
from router.config import RouterConfig
from router.fleet.absence import Absence
from router.fleet.links.assignments import Assignments
from router.fleet.links.decode_stream import DecodeStream
from router.fleet.links.link_local import require_reachable
from router.fleet.links.prefill_client import PrefillClient
from router.fleet.links.server_connection import Connection, MayConnect, require_nothing
from router.fleet.links.server_link import ROLES, AddedBy, PoolRole
from router.fleet.links.worker_watch import Worker, WorkerWatch
from router.fleet.model_servers import ModelServers
from router.policies.location import NOWHERE, Location
from wire.channels import Channels
from wire.errors import ConfigError, ConflictError, TwinfangError
from wire.messages.generation import ServerInfo, ServerStats
from wire.rpc import open_channel

log = logging.getLogger(__name__)

EXAMINE_TIMEOUT_S = 2.0
"""A server that takes longer to say who it is may be added nevertheless, as a server that is not up yet."""
COLLECT_DELAY_S = 0.1
"""Time from a worker's leaving to the collection of garbage. By then, nothing of its shutdown is still
running."""
LEAVE_POLL_S = 0.1
LEAVE_GRACE_S = 5.0
"""Wait after the last request of a removed server, because a lease of a prefill server may still have to be
given back."""


class _LinkSettings(TypedDict):
    """The settings that links to servers of both roles share."""

    served_models: frozenset[str] | None
    may_connect: MayConnect
    probe_interval_s: float
    added_by: AddedBy
    location: Location
    channels: Channels


class ServerPool:
    """Owns the connections to all servers. Each entry of :attr:`models` chooses among the servers that serve
    its model. If there are several models, servers announce which one they serve.

    Servers may come and go while the router runs. All models see each change of the pool's lists.
    """

    def __init__(self, config: RouterConfig, channels: Channels = open_channel) -> None:
        """``channels`` opens those to servers."""
        self._channels = channels
        names = [source.name for source in config.models]
        self._served = frozenset(names) if len(names) > 1 else None
        self._interval_s = config.probe_interval_s
        self._may_connect = require_nothing if config.allow_link_local_workers else require_reachable
        self._prefill: list[PrefillClient] = []
        self._decode: list[DecodeStream] = []
        self._watches: dict[Worker, WorkerWatch] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._on_fatal: OnFatal | None = None
        self.models = {name: ModelServers(name, config, self._prefill, self._decode) for name in names}
        for address in config.prefill_addresses:
            self.add("prefill", address, added_by="flag")
        for address in config.decode_addresses:
            self.add("decode", address, added_by="flag")

    def start(self, on_fatal: OnFatal) -> None:
        self._on_fatal = on_fatal
        for worker in self.workers():
            self._watch(worker, on_fatal)

    async def close(self) -> None:
        await cancel_and_wait(*self._leaving)
        await asyncio.gather(*(watch.close() for watch in self._watches.values()))

    # --- members ---------------------------------------------------------------------------------

    def add(self, role: PoolRole, address: str, *, added_by: AddedBy, location: Location = NOWHERE) -> Worker:
        """Add a server, which is used as soon as it answers. Raises :class:`ConflictError` if the pool has it
        already."""
        self._require_new(role, address)
        settings: _LinkSettings = {
            "served_models": self._served,
            "may_connect": self._may_connect if added_by == "api" else require_nothing,
            "probe_interval_s": self._interval_s,
            "added_by": added_by,
            "location": location,
            "channels": self._channels,
        }
        worker: Worker
        if role == "prefill":
            worker = PrefillClient(address, on_appear=self._introduce_to_decode, **settings)
            self._prefill.append(worker)
        else:
            worker = DecodeStream(address, prefill_addresses=self._prefill_addresses, **settings)
            self._decode.append(worker)
        if self._on_fatal is not None:
            self._watch(worker, self._on_fatal)
        return worker

    async def examine(self, role: PoolRole, address: str) -> None:
        """Look at a server that the admin API is about to add. A server that is not up yet is allowed.

        Raises :class:`ConfigError` for an address or a server that can't be used, and :class:`ConflictError`
        if the pool has it already.
        """
        self._require_new(role, address)
        connection = Connection(
            address, ROLES[role], self._served, may_connect=self._may_connect, channels=self._channels
        )
        try:
            await connection.examine(EXAMINE_TIMEOUT_S)
        except ConfigError:
            raise
        except TwinfangError as error:
            log.info("%s server %s is not up yet: %s", role, address, error.message)
        finally:
            await connection.close()

    def _require_new(self, role: PoolRole, address: str) -> None:
        if any((one.pool_role, one.address) == (role, address) for one in self.workers()):
            raise ConflictError(f"{address} is a {role} server of this router already")

    def remove(self, worker: Worker) -> None:
        """Send the server nothing more. Its connection is closed at once, or when its requests under way have
        ended."""
        if isinstance(worker, PrefillClient):
            self._prefill.remove(worker)
        else:
            self._decode.remove(worker)
        if worker in self._watches:
            task = asyncio.create_task(self._let_leave(worker))
            self._leaving.add(task)
            task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        """Collect garbage. gRPC keeps a connection as long as anything refers to one of its streams. Streams
        that have ended are parts of reference cycles, and this process collects garbage rarely. So this
        method asks for a collection."""
        self._leaving.discard(task)
        asyncio.get_running_loop().call_later(COLLECT_DELAY_S, gc.collect)

    def use_policies(self, config: RouterConfig) -> None:
        for servers in self.models.values():
            servers.use_policies(config)
        for worker, watch in self._watches.items():
            watch.read_prefixes(self._reads_prefixes(worker))

    def _watch(self, worker: Worker, on_fatal: OnFatal) -> None:
        watch = WorkerWatch(
            worker, idle_interval_s=self._interval_s, on_hang=self._leave_hanging, on_fatal=on_fatal
        )
        watch.read_prefixes(self._reads_prefixes(worker))
        self._watches[worker] = watch

    def _leave_hanging(self, worker: Worker) -> None:
        """Let the answers of a hanging decode server continue on another one. A prefill server is left alone,
        as it may only be slow."""
        if isinstance(worker, DecodeStream) and self.has_other_decode(worker):
            worker.give_up()

    def _reads_prefixes(self, worker: Worker) -> bool:
        any_model = next(iter(self.models.values()))  # policies are the same for all models
        policy = any_model.prefill_policy if worker.pool_role == "prefill" else any_model.decode_policy
        return policy.reads_prefixes

    async def _let_leave(self, worker: Worker) -> None:
        if worker.assignments.num_requests:
            while worker.assignments.num_requests:
                await asyncio.sleep(LEAVE_POLL_S)
            await asyncio.sleep(LEAVE_GRACE_S)
        await self._watches[worker].close()
        del self._watches[worker]

    @property
    def is_letting_go(self) -> bool:
        """Whether there are still connections to servers that were removed."""
        return bool(self._leaving)

    # --- what is known of them -------------------------------------------------------------------

    def not_ready_reason(self) -> Absence | None:
        """Return why no request of any model can be served. None if one can."""
        reasons = []
        for servers in self.models.values():
            reason = servers.not_ready_reason()
            if reason is None:
                return None
            reasons.append(reason)
        return Absence("; ".join(one.missing for one in reasons), "; ".join(one.detail for one in reasons))

    @property
    def is_outnumbered(self) -> bool:
        """Whether more decode servers serve routers of another release than serve this router."""
        taking = [stream for stream in self._decode if not stream.drain.is_draining]
        others = sum(stream.serves_other_release for stream in taking)
        return others > sum(stream.info is not None for stream in taking)

    def num_connected(self) -> dict[str, int]:
        """Return how many servers are in use, for each role that servers are configured for."""
        return {
            "prefill": sum(client.info is not None for client in self._prefill),
            "decode": sum(stream.info is not None for stream in self._decode),
        }

    def num_configured(self) -> dict[str, int]:
        """Return how many servers there should be, for each role that servers are configured for."""
        return {"prefill": len(self._prefill), "decode": len(self._decode)}

    def workers(self) -> list[Worker]:
        """Return all servers, prefill servers first."""
        return [*self._prefill, *self._decode]

    def has_other_decode(self, stream: DecodeStream) -> bool:
        """Return whether another decode server can continue the requests of this one."""
        info = stream.info
        return info is not None and any(
            other is not stream
            and other.info is not None
            and other.info.role == "decode"
            and other.info.fingerprint == info.fingerprint
            and not other.drain.is_draining
            and other.assignments.breaker.allows()
            for other in self._decode
        )

    def heirs(self, worker: Worker) -> list[str]:
        """Return the addresses of prefill servers to which a leaving server hands what it has cached."""
        if not isinstance(worker, PrefillClient):
            return []
        return list(dict.fromkeys(one for of in self.models.values() for one in of.heirs(worker)))

    def assignments(self) -> list[tuple[str, str, Assignments]]:
        """Return configured role, address and assignments of every server."""
        prefill = [("prefill", client.address, client.assignments) for client in self._prefill]
        return prefill + [("decode", stream.address, stream.assignments) for stream in self._decode]

    def stats(self) -> tuple[dict[str, ServerStats], dict[str, ServerStats]]:
        """Return the last stats of the prefill servers and of the decode servers in use, by address."""
        return _told(self._prefill), _told(self._decode)

    def _prefill_addresses(self, decode: ServerInfo) -> Iterable[str]:
        """Return addresses of the prefill servers whose state the decode server can read."""
        return [c.address for c in self._prefill if c.info and c.info.fingerprint == decode.fingerprint]

    def _introduce_to_decode(self, client: PrefillClient) -> None:
        for stream in self._decode:
            if stream.info and client.info and stream.info.fingerprint == client.info.fingerprint:
                stream.connect_peers([client.address])


def _told(servers: Sequence[PrefillClient | DecodeStream]) -> dict[str, ServerStats]:
    found = ((one.address, one.assignments.stats) for one in servers if one.info is not None)
    return {address: stats for address, stats in found if stats is not None}
