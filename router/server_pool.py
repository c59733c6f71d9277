"""All servers that a router knows, and the choice among those it can reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.assignments import Assignments
from router.background import OnFatal, cancel_and_wait, start_background
from router.config import RouterConfig
from router.conversations import Conversations
from router.decode_stream import DecodeStream
from router.load_watch import keep_load, keep_prefixes
from router.policies.policy import Candidate, Demand, Load, Policy
from router.policies.policy_names import make_policy
from router.prefill_client import PrefillClient
from wire.errors import UnavailableError
from wire.generation import ServerInfo, ServerStats

Server = TypeVar("Server", PrefillClient, DecodeStream)

ANY = Demand()
"""Of a request of which nothing is known."""


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
        has_sessions = bool(config.session_header)
        self._prefill_policy = make_policy(config.prefill_policy, has_sessions=has_sessions)
        self._decode_policy = make_policy(config.decode_policy, has_sessions=has_sessions)
        self._load_interval_s = config.probe_interval_s
        self._load_watches: list[asyncio.Task[None]] = []

    def start(self, on_fatal: OnFatal) -> None:
        for client in self._prefill:
            client.start(on_fatal)
        for stream in self._decode:
            stream.start(on_fatal)
        for policy, servers in ((self._prefill_policy, self._prefill), (self._decode_policy, self._decode)):
            for server in servers if policy.reads_load else ():
                watch = keep_load(server, idle_interval_s=self._load_interval_s)
                self._load_watches.append(start_background(watch, f"load of {server.address}", on_fatal))
            for server in servers if policy.reads_prefixes else ():
                watch = keep_prefixes(server, idle_interval_s=self._load_interval_s)
                self._load_watches.append(start_background(watch, f"prefixes of {server.address}", on_fatal))

    async def close(self) -> None:
        await cancel_and_wait(*self._load_watches)
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

    def choose_decode(
        self, fingerprint: str | None = None, *, avoid: Sequence[str] = (), demand: Demand = ANY
    ) -> DecodeStream:
        """The server for the next request; after a prefill, one that can read from it.

        Addresses to ``avoid`` are taken only where no other will do, the first of them first; servers whose
        circuit breaker is open only where all are.
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
        return _chosen(self._decode_policy, candidates, avoid, demand)

    def has_prefill(self, fingerprint: str) -> bool:
        """Whether a prefill server can be asked whose state a decode server of ``fingerprint`` can read."""
        return any(p.info is not None and p.info.fingerprint == fingerprint for p in self._prefill)

    def can_prefill(self, fingerprint: str) -> bool:
        """Whether one of those serves, as far as circuit breakers tell."""
        return any(
            p.info is not None and p.info.fingerprint == fingerprint and p.assignments.breaker.allows()
            for p in self._prefill
        )

    def choose_prefill(
        self, fingerprint: str, *, avoid: Sequence[str] = (), demand: Demand = ANY
    ) -> PrefillClient:
        candidates = [p for p in self._prefill if p.info is not None and p.info.fingerprint == fingerprint]
        if not candidates:
            raise UnavailableError(self.not_ready_reason() or "no prefill server fits the decode server")
        return _chosen(self._prefill_policy, candidates, avoid, demand)

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

    def assignments(self) -> list[tuple[str, str, Assignments]]:
        """Role that it is configured for, address, and what is known of it, for every server."""
        prefill = [("prefill", client.address, client.assignments) for client in self._prefill]
        return prefill + [("decode", stream.address, stream.assignments) for stream in self._decode]

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


def _chosen(policy: Policy, candidates: Sequence[Server], avoid: Sequence[str], demand: Demand) -> Server:
    by_address = {server.address: server for server in _preferred(candidates, avoid)}
    decision = policy.choose(
        [
            Candidate(
                address,
                server.assignments.load() if policy.reads_load else Load(),
                server.assignments.prefixes.cached_tokens(demand) if policy.reads_prefixes else 0,
            )
            for address, server in by_address.items()
        ],
        demand,
    )
    chosen = by_address[decision.candidate.address]
    chosen.assignments.chosen_by[decision.policy] += 1
    return chosen


def _preferred(candidates: Sequence[Server], avoid: Sequence[str]) -> Sequence[Server]:
    """The candidates not to be avoided, else the one that failed the longest time ago.

    Servers whose breaker is open stay out as long as there are others. The last one is never taken away:
    where all are open, the one whose backoff ends first is tried.
    """
    serving = [server for server in candidates if server.assignments.breaker.allows()]
    others = [server for server in serving or candidates if server.address not in avoid]
    if not others:
        return [min(serving or candidates, key=lambda server: avoid.index(server.address))]
    return others if serving else [min(others, key=lambda server: server.assignments.breaker.retry_at)]
