"""All servers that a router knows, and the choice among those it can reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.background import OnFatal
from router.config import RouterConfig
from router.conversations import Conversations
from router.decode_stream import DecodeStream
from router.policies.round_robin import RoundRobin
from router.prefill_client import PrefillClient
from wire.errors import UnavailableError
from wire.generation import ServerInfo, ServerStats

Server = TypeVar("Server", PrefillClient, DecodeStream)


@dataclass(frozen=True)
class ModelLimits:
    """What the connected decode servers can take, the smallest of each."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class ServerPool:
    """Owns the connections. Prefill and decode servers are paired only if their fingerprints agree."""

    def __init__(self, config: RouterConfig) -> None:
        self._prefill = [
            PrefillClient(
                address, probe_interval_s=config.probe_interval_s, on_appear=self._introduce_to_decode
            )
            for address in config.prefill_addresses
        ]
        self._decode = [
            DecodeStream(
                address,
                probe_interval_s=config.probe_interval_s,
                prefill_addresses=lambda: [p.address for p in self._prefill if p.info is not None],
            )
            for address in config.decode_addresses
        ]
        self.conversations = Conversations(time.monotonic) if config.conversation_return else None
        self._prefill_policy = RoundRobin()
        self._decode_policy = RoundRobin()

    def start(self, on_fatal: OnFatal) -> None:
        for client in self._prefill:
            client.start(on_fatal)
        for stream in self._decode:
            stream.start(on_fatal)

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._decode))
        await asyncio.gather(*(client.close() for client in self._prefill))

    def limits(self) -> ModelLimits:
        """Raises :class:`UnavailableError` while no decode server is connected."""
        infos = [stream.info for stream in self._decode if stream.info is not None]
        if not infos:
            raise UnavailableError(self.not_ready_reason() or "no decode server is connected")
        return ModelLimits(
            vocab_size=min(info.vocab_size for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
            eos_token_ids=frozenset(i for info in infos for i in info.eos_token_ids),
        )

    def choose_decode(self, fingerprint: str | None = None, *, avoid: Sequence[str] = ()) -> DecodeStream:
        """The server for the next request; after a prefill, one that can read from it.

        Addresses to ``avoid`` are taken only where no other will do, the first of them first.
        """
        if fingerprint is None:
            candidates = [stream for stream in self._decode if self._is_usable(stream.info)]
        else:
            candidates = [
                stream
                for stream in self._decode
                if stream.info is not None
                and stream.info.role == "decode"
                and stream.info.fingerprint == fingerprint
            ]
        if not candidates:
            raise UnavailableError(self.not_ready_reason() or "no decode server fits the prefill server")
        return self._decode_policy.choose(_preferred(candidates, avoid))

    def has_prefill(self, fingerprint: str) -> bool:
        """Whether a prefill server can be asked whose state a decode server of ``fingerprint`` can read."""
        return any(p.info is not None and p.info.fingerprint == fingerprint for p in self._prefill)

    def choose_prefill(self, fingerprint: str, *, avoid: Sequence[str] = ()) -> PrefillClient:
        candidates = [p for p in self._prefill if p.info is not None and p.info.fingerprint == fingerprint]
        if not candidates:
            raise UnavailableError(self.not_ready_reason() or "no prefill server fits the decode server")
        return self._prefill_policy.choose(_preferred(candidates, avoid))

    def not_ready_reason(self) -> str | None:
        """Why no request can be served; None if one can."""
        infos = [stream.info for stream in self._decode]
        if any(self._is_usable(info) for info in infos):
            return None
        if not any(infos):
            problems = "; ".join(f"{stream.address}: {stream.problem}" for stream in self._decode)
            return f"no decode server is connected ({problems})"
        if not self._prefill:
            return (
                "no prefill server is configured, and no connected server does both: add --prefill host:port"
            )
        if not any(client.info for client in self._prefill):
            problems = "; ".join(f"{client.address}: {client.problem}" for client in self._prefill)
            return f"no prefill server is connected ({problems})"
        return "no prefill server has the fingerprint (config, dtype, weights) of a connected decode server"

    def num_connected(self) -> dict[str, int]:
        """Servers in use, by the role they were configured for."""
        return {
            "prefill": sum(client.info is not None for client in self._prefill),
            "decode": sum(stream.info is not None for stream in self._decode),
        }

    async def stats(self) -> tuple[dict[str, ServerStats], dict[str, ServerStats]]:
        """Figures of the prefill and of the decode servers that answer in time, by address."""
        servers: list[PrefillClient | DecodeStream] = [*self._prefill, *self._decode]
        answers = await asyncio.gather(*(server.stats() for server in servers))
        found = [(server.address, stats) for server, stats in zip(servers, answers, strict=True)]
        prefill, decode = found[: len(self._prefill)], found[len(self._prefill) :]
        return _known(prefill), _known(decode)

    def _is_usable(self, info: ServerInfo | None) -> bool:
        """Whether a request can be sent to this decode server and, if needed, run by a prefill server."""
        if info is None:
            return False
        return info.role == "both" or info.local_prefill or self.has_prefill(info.fingerprint)

    def _introduce_to_decode(self, client: PrefillClient) -> None:
        for stream in self._decode:
            stream.connect_peers([client.address])


def _known(stats: Sequence[tuple[str, ServerStats | None]]) -> dict[str, ServerStats]:
    return {address: answer for address, answer in stats if answer is not None}


def _preferred(candidates: Sequence[Server], avoid: Sequence[str]) -> Sequence[Server]:
    """The candidates not to be avoided, else the one that failed the longest time ago."""
    others = [server for server in candidates if server.address not in avoid]
    return others or [min(candidates, key=lambda server: avoid.index(server.address))]
