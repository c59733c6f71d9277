"""The servers of one model, and the choice among those that can be reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
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
from wire.messages.neighbours import Neighbour
from wire.messages.sessions import SessionNews, TendSession

Server = TypeVar("Server", PrefillClient, DecodeStream)

UNREAD = Load()
"""Stands for the load of a server if the policy does not read it."""
ANY = Demand()
"""The demand of a request about which nothing is known."""


UNDRAIN = "end that for one with POST /admin/v1/workers/{id}/undrain, or add a server"


@dataclass(frozen=True)
class ModelLimits:
    """What every connected decode server can take: the smallest of each limit, and the EOS tokens of all."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class ModelServers:
    """The servers that serve one model. A prefill and a decode server are paired only if their fingerprints
    agree.

    ``prefill`` and ``decode`` are the pool's own lists: changes there are seen here.
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
        """The limits at the last time when a decode server was connected."""
        self._limits_of: list[ServerInfo] = []
        """What the decode servers said that had these limits."""
        # Each model has its own policies, which may remember whose turn it is, and its own conversations.
        self.use_policies(config)
        self.conversations = Conversations(time.monotonic) if config.conversation_return else None

    def use_policies(self, config: RouterConfig) -> None:
        """Use the policies of ``config`` from now on. They know nothing of what earlier policies chose."""
        has_sessions = bool(config.session_header)
        self.prefill_policy = make_policy(config.prefill_policy, has_sessions=has_sessions)
        self.decode_policy = make_policy(config.decode_policy, has_sessions=has_sessions)

    @property
    def has_limits(self) -> bool:
        """Whether any decode server has ever reported its limits."""
        return self._limits is not None or bool(self._connected(self._decode))

    def limits(self) -> ModelLimits:
        """Return the limits of the connected decode servers. While no decode server is connected, return the
        limits of the servers that were connected last, as these are expected back. Raises
        :class:`NobodyServesError` if no decode server was ever connected."""
        infos = [info for _, info in self._connected(self._decode)]
        if infos and infos != self._limits_of:
            self._limits_of = infos
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
        """Choose the decode server for the next request. After a prefill, ``fingerprint`` is the prefill
        server's, and the chosen server can read its state.

        A server whose address is in ``avoid`` is taken only if there are no other servers, and then the first
        in ``avoid`` is tried first. Servers whose circuit breaker is open are taken only if all breakers are
        open.
        """

        candidates = self._decode_for(demand, fingerprint)
        if not candidates:
            raise self._unavailable("decode", self._misfit(demand))
        return _chosen(self.decode_policy, candidates, avoid, demand)

    def can_take(self, demand: Demand) -> bool:
        """Return whether there is a decode server for the request and, if the decode server needs one, a
        prefill server."""
        return bool(self._decode_for(demand))

    def may_return(self) -> bool:
        """Return whether requests could be served once the servers that are away are back.

        When a server comes back, everything but its role may have changed. A server that an operator has
        drained or removed is not expected back.
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
        """Return the decode servers for a request. With ``fingerprint``, return those that can read the state
        that a prefill server of this fingerprint has computed."""

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
        """Return whether a decode server of ``fingerprint`` can read the state of some prefill server whose
        circuit breaker allows requests."""
        taking = _taking(self._prefill_of(fingerprint), ANY)
        return any(client.assignments.breaker.allows() for client in taking)

    def choose_prefill(
        self, fingerprint: str, *, avoid: Sequence[str] = (), demand: Demand = ANY
    ) -> PrefillClient:
        candidates = _taking(self._prefill_of(fingerprint), demand)
        if not candidates:
            raise self._unavailable("prefill", "no prefill server fits the decode server")
        return _chosen(self.prefill_policy, candidates, avoid, demand)

    def neighbour(self, chosen: PrefillClient, fingerprint: str, demand: Demand) -> Neighbour | None:
        """Return the prefill server with the longest start of a prompt, if it is longer than what the chosen
        server has and the chosen server may read it. Draining servers count too. None: there is none."""
        own = chosen.assignments.prefixes
        if not (self.prefill_policy.reads_prefixes and own.is_shared):
            return None
        best, longest = None, own.longest_start(demand)
        for client in self._prefill_of(fingerprint):
            known = client.assignments
            if client is chosen or not known.prefixes.is_shared or not known.breaker.allows():
                continue
            length = known.prefixes.longest_start(demand)
            if length > longest:
                best, longest = client, length
        return None if best is None else Neighbour(best.address, longest)

    def heirs(self, leaving: PrefillClient) -> list[str]:
        """Return the addresses of prefill servers that stay and can use what a leaving one has cached."""
        info = leaving.info or leaving.last_info
        if info is None or not leaving.assignments.prefixes.is_shared:
            return []
        stay = [one for one in self._prefill_of(info.fingerprint) if one is not leaving]
        return [one.address for one in _taking(stay, ANY) if one.assignments.prefixes.is_shared]

    async def tend_session(self, wanted: TendSession) -> list[SessionNews]:
        """Let all servers that compute prompts, and so cache them, do something with a session's starts.
        Return their answers."""
        prefill = [client for client, _ in self._connected(self._prefill)]
        both = [stream for stream, info in self._connected(self._decode) if _computes_prompts(info)]
        told = await asyncio.gather(*(server.tend_session(wanted) for server in (*prefill, *both)))
        return [news for news in told if news is not None]

    def room(self) -> Capacity | None:
        """Return what the servers have for further requests. None while no request could be served.

        Decode servers whose circuit breaker is open count only if all breakers are open.
        """
        decode = [
            stream.assignments
            for stream, info in self._connected(self._decode)
            if not stream.drain.is_draining and self._is_usable(info, ANY)
        ]
        if not decode:
            return None
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
        """Return why no request can be served. None if one can."""
        connected = self._connected(self._decode)
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
        if not self._connected(self._prefill):
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
        """Return the error for a request that no server can take, though other requests may be served."""
        return (self.not_ready_reason() or self._lacks(role, detail)).error()

    def _connected(self, servers: Sequence[Server]) -> list[tuple[Server, ServerInfo]]:
        is_only_model, model = self._is_only_model, self.model
        return [
            (server, info)
            for server in servers
            if (info := server.info) is not None and (is_only_model or info.served_model_name == model)
        ]

    def _prefill_of(self, fingerprint: str) -> list[PrefillClient]:
        return [c for c, info in self._connected(self._prefill) if info.fingerprint == fingerprint]

    def _is_usable(self, info: ServerInfo, demand: Demand) -> bool:
        """Return whether a request can be sent to this decode server and, if needed, a prefill server can run
        its prompt."""
        if _computes_prompts(info):
            return True
        return bool(_taking(self._prefill_of(info.fingerprint), demand))


def _computes_prompts(info: ServerInfo) -> bool:
    return info.role == "both" or info.local_prefill


def _taking(servers: list[Server], demand: Demand) -> list[Server]:
    """Return the servers that do not drain. If there are none, a request that has begun may use those that
    drain."""
    taking = [server for server in servers if not server.drain.is_draining]
    return taking or (servers if demand.has_begun else [])


def _problems(servers: Sequence[PrefillClient] | Sequence[DecodeStream]) -> str:
    """Return why each of the unused servers is not in use. Any of them may be the server that a request
    needs."""
    problems = "; ".join(f"{server.address}: {server.problem}" for server in servers if server.info is None)
    return f" ({problems})" if problems else ""


def _chosen(policy: Policy, candidates: Sequence[Server], avoid: Sequence[str], demand: Demand) -> Server:
    by_address = {server.address: server for server in _preferred(candidates, avoid)}
    decision = policy.choose(
        [
            Candidate(
                address,
                server.assignments.load() if policy.reads_load else UNREAD,
                server.assignments.prefixes.cached_tokens(demand) if policy.reads_prefixes else 0,
                server.location.distance(demand.near),
            )
            for address, server in by_address.items()
        ],
        demand,
    )
    chosen = by_address[decision.candidate.address]
    chosen.assignments.chosen_by[decision.policy] += 1
    return chosen


def _preferred(candidates: Sequence[Server], avoid: Sequence[str]) -> Sequence[Server]:
    """Return the candidates that are not in ``avoid``. If all are in ``avoid``, return the one that failed
    the longest time ago.

    Servers whose breaker is open are left out as long as there are others. The last server is never left out:
    if all breakers are open, the server whose backoff ends first is tried.
    """
    serving = [server for server in candidates if server.assignments.breaker.allows()]
    others = [server for server in serving or candidates if server.address not in avoid]
    if not others:
        return [min(serving or candidates, key=lambda server: avoid.index(server.address))]
    return others if serving else [min(others, key=lambda server: server.assignments.breaker.retry_at)]
