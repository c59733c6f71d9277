"""The servers of one model, and the choice among those that can be reached."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.config import ROLE_LABEL, RouterConfig
from router.fleet.absence import Absence, NobodyServesError
from router.fleet.conversations import Conversations
from router.fleet.links.capacity import Capacity
from router.fleet.links.decode_stream import DecodeStream
from router.fleet.links.prefill_client import PrefillClient
from router.fleet.links.server_link import PoolRole
from router.policies.policy import Candidate, Demand, Load, Policy
from router.policies.policy_names import make_policy
from wire.messages.generation import ServerInfo

Server = TypeVar("Server", PrefillClient, DecodeStream)

ANY = Demand()
"""Of a request of which nothing is known."""


UNDRAIN = "take that back for one with POST /admin/v1/workers/{id}/undrain, or add one"


@dataclass(frozen=True)
class ModelLimits:
    """What the connected decode servers can take, the smallest of each."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class ModelServers:
    """Of all servers those that serve one model. Prefill and decode are paired only if fingerprints agree.

    ``prefill`` and ``decode`` are the pool's own lists: what changes there is seen here.
    """

    def __init__(
        self,
        model: str,
        config: RouterConfig,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeStream],
    ) -> None:
        self.model = model
        self._is_only_model = len(config.models) == 1
        self._remedy = "add --prefill host:port"
        if config.pods is not None:
            self._remedy += f", or a pod with {ROLE_LABEL}=prefill in namespace {config.pods.namespace}"
        self._prefill = prefill
        self._decode = decode
        self._limits: ModelLimits | None = None
        """What they were when a decode server was connected last."""
        # One's turns, and what is kept for one's conversations, are nothing to another.
        self.use_policies(config)
        self.conversations = Conversations(time.monotonic) if config.conversation_return else None

    def use_policies(self, config: RouterConfig) -> None:
        """Those of ``config`` from now on; they know nothing of what others chose before."""
        has_sessions = bool(config.session_header)
        self.prefill_policy = make_policy(config.prefill_policy, has_sessions=has_sessions)
        self.decode_policy = make_policy(config.decode_policy, has_sessions=has_sessions)

    @property
    def has_limits(self) -> bool:
        """Whether any decode server has ever said what it can take."""
        return self._limits is not None or any(self._connected(self._decode))

    def limits(self) -> ModelLimits:
        """While no decode server is connected those of the last ones, which are expected back. Raises
        :class:`NobodyServesError` if there never was one."""
        infos = [info for _, info in self._connected(self._decode)]
        if infos:
            self._limits = ModelLimits(
                vocab_size=min(info.vocab_size for info in infos),
                max_model_len=min(info.max_model_len for info in infos),
                eos_token_ids=frozenset(i for info in infos for i in info.eos_token_ids),
            )
        if self._limits is None:
            raise self._unavailable("decode", "no decode server is connected")
        return self._limits

    def choose_decode(
        self, fingerprint: str | None = None, *, avoid: Sequence[str] = (), demand: Demand = ANY
    ) -> DecodeStream:
        """The server for the next request; after a prefill, one that can read from it.

        Addresses to ``avoid`` are taken only where no other will do, the first of them first; servers whose
        circuit breaker is open only where all are.
        """

        candidates = self._decode_for(demand, fingerprint)
        if not candidates:
            raise self._unavailable("decode", self._misfit(demand))
        return _chosen(self.decode_policy, candidates, avoid, demand)

    def can_take(self, demand: Demand) -> bool:
        """Whether a decode server can, and a prefill server that it may need."""
        return bool(self._decode_for(demand))

    def may_return(self) -> bool:
        """Whether servers that are away can make up for what is missing, once they are back.

        One that is away may come back as anything, but for what its role was. One that drains by somebody's
        wish, or was removed, is not expected.
        """
        decode = [stream for stream in self._decode if self._is_expected(stream)]
        prefill = [client for client in self._prefill if self._is_expected(client)]
        for stream in decode:
            info = stream.info
            if info is None and (prefill or stream.last_info is None):
                return True
            info = info or stream.last_info
            assert info is not None
            if info.role == "both" or info.local_prefill:
                return True
            if any(one.info is None or one.info.fingerprint == info.fingerprint for one in prefill):
                return True
        return False

    def _is_expected(self, server: PrefillClient | DecodeStream) -> bool:
        info = server.last_info
        is_ours = info is None or self._is_only_model or info.served_model_name == self.model
        return is_ours and not server.drain.is_draining

    def _decode_for(self, demand: Demand, fingerprint: str | None = None) -> list[DecodeStream]:
        """Those that can take it; with ``fingerprint`` those that can read what was prefilled."""

        def fits(info: ServerInfo) -> bool:
            if demand.fingerprint not in (None, info.fingerprint):
                return False
            if fingerprint is None:
                return self._is_usable(info, demand)
            return info.role == "decode" and info.fingerprint == fingerprint

        return _taking([stream for stream, info in self._connected(self._decode) if fits(info)], demand)

    def _misfit(self, demand: Demand) -> str:
        if demand.fingerprint is not None:
            return "no decode server has the fingerprint (config, dtype, weights) that the answer began with"
        return "no decode server fits the prefill server"

    def can_prefill(self, fingerprint: str) -> bool:
        """Whether a prefill server serves, as far as circuit breakers tell, whose state a decode server of
        ``fingerprint`` can read."""
        taking = _taking(self._prefill_of(fingerprint), ANY)
        return any(client.assignments.breaker.allows() for client in taking)

    def choose_prefill(
        self, fingerprint: str, *, avoid: Sequence[str] = (), demand: Demand = ANY
    ) -> PrefillClient:
        candidates = _taking(self._prefill_of(fingerprint), demand)
        if not candidates:
            raise self._unavailable("prefill", "no prefill server fits the decode server")
        return _chosen(self.prefill_policy, candidates, avoid, demand)

    def room(self) -> Capacity | None:
        """What the servers have for further requests; None while none could be served.

        Servers whose circuit breaker is open count only where all are.
        """
        if self.not_ready_reason() is not None:
            return None
        decode = [
            stream.assignments
            for stream, info in self._connected(self._decode)
            if not stream.drain.is_draining and self._is_usable(info, ANY)
        ]
        decode = [known for known in decode if known.breaker.allows()] or decode
        blocks = [known.blocks for known in decode]
        prefill = _taking([client for client, _ in self._connected(self._prefill)], ANY)
        return Capacity(
            rows=tuple(known.rows for known in decode),
            blocks=() if None in blocks else tuple(filter(None, blocks)),
            prefill=tuple(client.assignments.prefill_queue for client in prefill),
            num_routers=max(known.num_routers for known in decode),
        )

    def not_ready_reason(self) -> Absence | None:
        """Why no request can be served; None if one can."""
        connected = list(self._connected(self._decode))
        taking = [(stream, info) for stream, info in connected if not stream.drain.is_draining]
        if any(self._is_usable(info, ANY) for _, info in taking):
            return None
        of_model = "" if self._is_only_model else f" of model {self.model!r}"
        if connected and not taking:
            return self._lacks("decode", f"every decode server{of_model} that is connected drains: {UNDRAIN}")
        if not connected:
            problems = _problems(self._decode)
            return self._lacks("decode", f"no decode server{of_model} is connected{problems}")
        return self._lacks("prefill", self._prefill_problem(of_model, [info for _, info in taking]))

    def _prefill_problem(self, of_model: str, decode: Sequence[ServerInfo]) -> str:
        if not self._prefill:
            return f"there is no prefill server, and no connected server does both: {self._remedy}"
        if not any(self._connected(self._prefill)):
            return f"no prefill server{of_model} is connected{_problems(self._prefill)}"
        if any(self._prefill_of(info.fingerprint) for info in decode):
            return f"every prefill server{of_model} that is connected drains: {UNDRAIN}"
        return (
            f"no prefill server{of_model} has the fingerprint (config, dtype, weights) of a connected decode "
            "server"
        )

    def _lacks(self, role: PoolRole, detail: str) -> Absence:
        return Absence(f"no {role} server is ready for model {self.model!r}", detail)

    def _unavailable(self, role: PoolRole, detail: str) -> NobodyServesError:
        """That nobody is there for one request, though others may be served."""
        return (self.not_ready_reason() or self._lacks(role, detail)).error()

    def _connected(self, servers: Sequence[Server]) -> Iterator[tuple[Server, ServerInfo]]:
        for server in servers:
            info = server.info
            if info is not None and (self._is_only_model or info.served_model_name == self.model):
                yield server, info

    def _prefill_of(self, fingerprint: str) -> list[PrefillClient]:
        return [c for c, info in self._connected(self._prefill) if info.fingerprint == fingerprint]

    def _is_usable(self, info: ServerInfo, demand: Demand) -> bool:
        """Whether a request can be sent to this decode server and, if needed, run by a prefill server."""
        if info.role == "both" or info.local_prefill:
            return True
        return bool(_taking(self._prefill_of(info.fingerprint), demand))


def _taking(servers: list[Server], demand: Demand) -> list[Server]:
    """Those that do not drain; what has begun may go on at the others for want of these."""
    taking = [server for server in servers if not server.drain.is_draining]
    return taking or (servers if demand.has_begun else [])


def _problems(servers: Sequence[PrefillClient] | Sequence[DecodeStream]) -> str:
    """Why servers are not in use; any of them may be the one that is missed."""
    problems = "; ".join(f"{server.address}: {server.problem}" for server in servers if server.info is None)
    return f" ({problems})" if problems else ""


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
