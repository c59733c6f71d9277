"""All servers that a router knows: their connections, their figures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from router.assignments import Assignments
from router.background import OnFatal, cancel_and_wait, start_background
from router.config import RouterConfig
from router.decode_stream import DecodeStream
from router.load_watch import keep_load, keep_prefixes
from router.model_servers import ModelServers
from router.prefill_client import PrefillClient
from wire.generation import ServerInfo, ServerStats


class ServerPool:
    """Owns the connections; :attr:`models` chooses among them, by the names that servers announce."""

    def __init__(self, config: RouterConfig) -> None:
        names = [source.name for source in config.models]
        served = frozenset(names) if len(names) > 1 else None
        self._prefill = [
            PrefillClient(
                address,
                served_models=served,
                probe_interval_s=config.probe_interval_s,
                on_appear=self._introduce_to_decode,
            )
            for address in config.prefill_addresses
        ]
        self._decode = [
            DecodeStream(
                address,
                served_models=served,
                probe_interval_s=config.probe_interval_s,
                prefill_addresses=self._prefill_addresses,
            )
            for address in config.decode_addresses
        ]
        self.models = {name: ModelServers(name, config, self._prefill, self._decode) for name in names}
        self._load_interval_s = config.probe_interval_s
        self._load_watches: list[asyncio.Task[None]] = []

    def start(self, on_fatal: OnFatal) -> None:
        for client in self._prefill:
            client.start(on_fatal)
        for stream in self._decode:
            stream.start(on_fatal)
        any_model = next(iter(self.models.values()))  # policies are the same for all
        for policy, servers in (
            (any_model.prefill_policy, self._prefill),
            (any_model.decode_policy, self._decode),
        ):
            for server in servers:  # operators look at it, whatever the policy
                watch = keep_load(server, idle_interval_s=self._load_interval_s)
                self._load_watches.append(start_background(watch, f"load of {server.address}", on_fatal))
            for server in servers if policy.reads_prefixes else ():
                watch = keep_prefixes(server, idle_interval_s=self._load_interval_s)
                self._load_watches.append(start_background(watch, f"prefixes of {server.address}", on_fatal))

    async def close(self) -> None:
        await cancel_and_wait(*self._load_watches)
        await asyncio.gather(*(stream.close() for stream in self._decode))
        await asyncio.gather(*(client.close() for client in self._prefill))

    def not_ready_reason(self) -> str | None:
        """Why no request of any model can be served; None if one can."""
        reasons = [servers.not_ready_reason() for servers in self.models.values()]
        return None if None in reasons else "; ".join(filter(None, reasons))

    def num_connected(self) -> dict[str, int]:
        """Servers in use, by the role they were configured for."""
        return {
            "prefill": sum(client.info is not None for client in self._prefill),
            "decode": sum(stream.info is not None for stream in self._decode),
        }

    def workers(self) -> list[PrefillClient | DecodeStream]:
        """All servers, prefill servers first."""
        return [*self._prefill, *self._decode]

    def has_other_decode(self, stream: DecodeStream) -> bool:
        """Whether a server can go on with what this one lets go."""
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

    def assignments(self) -> list[tuple[str, str, Assignments]]:
        """Role that it is configured for, address, and what is known of it, for every server."""
        prefill = [("prefill", client.address, client.assignments) for client in self._prefill]
        return prefill + [("decode", stream.address, stream.assignments) for stream in self._decode]

    def stats(self) -> tuple[dict[str, ServerStats], dict[str, ServerStats]]:
        """What prefill and decode servers that are in use have told last, by address."""
        return _told(self._prefill), _told(self._decode)

    def _prefill_addresses(self, decode: ServerInfo) -> Iterable[str]:
        """Of those whose state a decode server can read."""
        return [c.address for c in self._prefill if c.info and c.info.fingerprint == decode.fingerprint]

    def _introduce_to_decode(self, client: PrefillClient) -> None:
        for stream in self._decode:
            if stream.info and client.info and stream.info.fingerprint == client.info.fingerprint:
                stream.connect_peers([client.address])


def _told(servers: Sequence[PrefillClient | DecodeStream]) -> dict[str, ServerStats]:
    found = ((one.address, one.assignments.stats) for one in servers if one.info is not None)
    return {address: stats for address, stats in found if stats is not None}
