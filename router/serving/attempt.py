"""Chooses the two servers of one attempt to run a choice, and decides which of them is blamed for a
failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.fleet.links.assignments import Assignment
from router.fleet.links.decode_stream import DecodeStream
from router.fleet.links.prefill_client import PrefillClient
from router.fleet.model_servers import ModelServers
from router.observe.choice_timeline import ChoiceTimeline
from router.policies.policy import Demand
from wire.errors import (
    HandshakeError,
    LeaseError,
    SanitizerError,
    TransferError,
    TwinfangError,
    UnavailableError,
    WireError,
    error_from_code,
)
from wire.messages.generation import PrefillReply, RequestOutput
from wire.messages.neighbours import Neighbour

HANDOFF_FAULTS = frozenset(e.code for e in (TransferError, HandshakeError, LeaseError, SanitizerError))
"""Failures of a handoff. The router can't see which of the two servers failed, so both are blamed. Other
handoffs that succeed clear the server that is not at fault."""
SERVER_FAULTS = frozenset(e.code for e in (UnavailableError, WireError, TwinfangError))
"""Failures of a server. A missed deadline is not among them, because it may only mean that the server's queue
is too long. If the router then avoided that server, the other servers' queues would grow as well."""


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A prompt that a prefill server computes, and the decode server chosen for it."""

    prefill: PrefillClient
    request_id: str
    decode: DecodeStream
    fingerprint: str
    """That of both servers."""
    called_s: float


class Attempt:
    """Chooses servers, and records for each when its part has begun, made progress, failed or ended.

    ``on_prefilled`` is called when a prefill server has computed a prompt and so has room for another one.
    """

    def __init__(
        self, pool: ModelServers, timeline: ChoiceTimeline, *, on_prefilled: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._on_prefilled = on_prefilled
        self._timeline = timeline
        self._prefill: Assignment | None = None
        self._decode: Assignment | None = None

    def choose_decode(
        self, demand: Demand, fingerprint: str | None = None, *, avoid: Sequence[str] = ()
    ) -> DecodeStream:
        stream = self._pool.choose_decode(fingerprint, avoid=avoid, demand=demand)
        self.use_decode(stream, demand)
        return stream

    def use_decode(self, stream: DecodeStream, demand: Demand) -> None:
        """Note that the choice goes to this decode server."""
        if self._decode is not None:
            self._decode.ended()
        self._decode = stream.assignments.begin(len(demand.token_ids))

    def choose_prefill(self, demand: Demand, fingerprint: str, *, avoid: Sequence[str]) -> PrefillClient:
        client = self._pool.choose_prefill(fingerprint, avoid=avoid, demand=demand)
        if self._prefill is not None:
            self._prefill.ended()
        num_cached = client.assignments.prefixes.cached_tokens(demand)
        self._prefill = client.assignments.begin(len(demand.token_ids) - num_cached)
        self._timeline.prefill_called(client.worker_id)
        return client

    def neighbour(self, chosen: PrefillClient, demand: Demand, fingerprint: str) -> Neighbour | None:
        """Return a server that has more of the prompt cached than the chosen one; None: none is known."""
        return self._pool.neighbour(chosen, fingerprint, demand)

    def prefilled(self, reply: PrefillReply) -> None:
        """Note that the prefill server has computed the prompt. The server now keeps the prompt's state until
        a decode server has read it."""
        self._timeline.prefilled(queue_s=reply.queue_s, prefill_s=reply.prefill_s)
        if self._prefill is not None:
            self._prefill.unload()
            self._on_prefilled()

    def progressed(self) -> None:
        """Note that a token has come. So the decode server works, and the state from the prefill server was
        good."""
        self._timeline.progressed()
        if self._decode is not None:
            self._decode.progressed()
        if self._prefill is not None:
            self._prefill.progressed()
            self._prefill.ended()

    def scored(self) -> None:
        """Note that the attempt has succeeded with the prefill server's reply, because the client wants no
        answer."""
        if self._prefill is not None:
            self._prefill.progressed()
        self.ended()

    def prefill_failed(self, error: TwinfangError) -> None:
        if self._prefill is not None and error.code in SERVER_FAULTS:
            self._prefill.failed()

    def decode_failed(self, error: TwinfangError) -> None:
        """Note that the decode server answered with ``error``, or that it was lost."""
        if self._decode is not None and error.code in HANDOFF_FAULTS | SERVER_FAULTS:
            self._decode.failed()
        if self._prefill is not None and error.code in HANDOFF_FAULTS:
            self._prefill.failed()

    def ended(self) -> None:
        """Note that neither server works for the attempt any more, for whatever reason."""
        for assignment in (self._decode, self._prefill):
            if assignment is not None:
                assignment.ended()
        self._decode = self._prefill = None


def error_of(output: RequestOutput) -> TwinfangError | None:
    """Return the error that ends a request; None if the output is no error."""
    if output.error is not None:
        return error_from_code(output.error.code, output.error.message)
    if output.finish_reason == "error":
        return TwinfangError("the decode server failed on this request and did not say why")
    return None
