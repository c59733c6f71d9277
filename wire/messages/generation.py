"""Messages of a request's life: the prefill stream, the decode stream, servers' descriptions and stats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from itertools import accumulate, chain
from typing import Literal

from wire.codec import FIRST_VERSION, check_peer, ignorable, message
from wire.errors import WireError
from wire.messages.handoff import AnyTicket, PartialTicket, Role, Ticket
from wire.messages.neighbours import MAX_HEIRS, Neighbour, check_address
from wire.messages.sampling_params import SamplingParams
from wire.messages.sessions import check_session
from wire.messages.traceparent import check_traceparent

FinishReason = Literal["stop", "length", "cancelled", "error", "moved"]
"""``moved``: this server gives the request up before its end. Another server can continue it, with the state
that :attr:`RequestOutput.ticket` names if there is one."""

DrainState = Literal["serving", "draining", "drained"]
"""``draining``: the server gets no new requests; ``drained``: its earlier requests have ended as well."""


@message
class TokenLogprobs:
    """Log-probability of one token and of the best alternatives at its position.

    Natural logarithms of the model's own distribution, before penalties, temperature and filters.
    """

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...]
    """``(token id, logprob)`` of the most likely tokens, best first."""


@message
class ErrorReply:
    """An error as it is sent; see :func:`wire.errors.error_from_code`."""

    code: str
    message: str


@message
class PrefillRequest:
    """Asks to run all of ``token_ids`` except the last, and to keep the state for a decode server."""

    request_id: str
    token_ids: tuple[int, ...]
    """The whole prompt, N ≥ 2 tokens; the server computes N-1 of them."""
    prompt_logprobs: int | None = None
    """Like :attr:`SamplingParams.logprobs`, for tokens 2 … N of the prompt."""
    cache_salt: str = ""
    """Only requests with the same salt share cached blocks and states."""
    resume: Ticket | None = None
    """The ticket for the state after the first part of the prompt. A decode server keeps this state from an
    earlier answer."""
    traceparent: str = ""
    """The request's trace and parent span (:mod:`wire.messages.traceparent`); empty: none."""
    timeout_s: float | None = None
    """How long the client waits for the prompt; then the server gives it up. None: no limit."""
    session: str = ignorable("")
    """The session that the request belongs to (:mod:`wire.messages.sessions`); empty: none."""
    neighbour: Neighbour | None = ignorable(None)
    """A server that has more of the prompt cached than this one; None: none is known."""

    def __post_init__(self) -> None:
        check_traceparent(self.traceparent)
        check_session(self.session)


@message
class PrefillStarted:
    """Sent before the reply if a prompt takes several chunks, once the first chunk is computed."""

    ticket: PartialTicket


@message
class PrefillReply:
    ticket: Ticket
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    """For tokens 2 … N, in order."""
    cached_tokens: int
    queue_s: float
    prefill_s: float


@message
class PrefillNews:
    """What a prefill server says of one request; nothing follows a reply or an error."""

    request_id: str
    news: PrefillStarted | PrefillReply | ErrorReply


@message
class ForkedChoice:
    """A further choice of a submitted prompt, with the parameters of the first one and a seed of its own."""

    request_id: str
    seed: int
    traceparent: str = ""
    """Like :attr:`PrefillRequest.traceparent`."""
    handle: int = 0
    """Like :attr:`Submit.handle`."""

    def __post_init__(self) -> None:
        check_traceparent(self.traceparent)


@message
class Submit:
    """A request for a decode server. Without a ticket the server computes the prompt itself.

    A decode server without local prefill takes a request without a ticket only if the prompt is one token
    long: then there is nothing to hand over.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    ticket: AnyTicket | None
    prompt_logprobs: int | None = None
    """Only set without a ticket: with a ticket, the prefill server has already reported log-probabilities."""
    cache_salt: str = ""
    keeps_state: bool = False
    """Whether to keep blocks and state for a while after the answer, and to return a ticket for them."""
    num_answered: int = 0
    """Tokens at the end of ``token_ids`` that belong to the answer: another server generated them."""
    traceparent: str = ""
    """Like :attr:`PrefillRequest.traceparent`."""
    timeout_s: float | None = None
    """How long the client waits for the answer; then the server ends the request. None: no limit."""
    client: str = ""
    """Any name for the request's client: rows are shared fairly between clients."""
    forks: tuple[ForkedChoice, ...] = ()
    """Further choices, which start from the state that this request reads or computes. They end with it, as
    ``moved``, if it ends before its first token."""
    handle: int = 0
    """The router's number for this request on this stream, by which :class:`StepNews` names it."""
    session: str = ignorable("")
    """Like :attr:`PrefillRequest.session`."""

    def __post_init__(self) -> None:
        check_traceparent(self.traceparent)
        check_session(self.session)
        if self.forks and len({self.request_id, *(fork.request_id for fork in self.forks)}) <= len(
            self.forks
        ):
            raise WireError(f"request {self.request_id!r}: two of its choices have the same id")

    def forked(self) -> list[Submit]:
        """Return the further choices, each as a submission of its own without a ticket."""
        return [
            replace(
                self,
                request_id=fork.request_id,
                params=replace(self.params, seed=fork.seed),
                ticket=None,
                traceparent=fork.traceparent,
                handle=fork.handle,
                forks=(),
            )
            for fork in self.forks
        ]


@message
class Cancel:
    request_id: str


@message
class ConnectPeers:
    """Asks for handshakes with these prefill servers now, so that no request pays for the first contact."""

    addresses: tuple[str, ...]


@message
class RequestStats:
    """The times and amounts of a finished request on the decode server. Times in seconds."""

    queue_s: float = 0.0
    transfer_s: float = 0.0
    """Time until all data had landed. It begins when the request has room and its prompt is prefilled."""
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    first_token_s: float = 0.0
    """Time until the first token. It begins when the request has room and the state that its ticket names has
    been read. In this time token N is computed, or the whole prompt if there is no ticket."""
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that became tokens of the answer."""
    early_bytes: int = 0
    """The part of ``transfer_bytes`` that had landed before the prompt was prefilled."""
    decode_s: float = 0.0
    """From the first token to the last."""


@message
class RequestOutput:
    """What one step has produced for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the answer, if a token did; it is the last of ``token_ids``."""
    error: ErrorReply | None = None
    """Set if and only if ``finish_reason`` is ``error``."""
    stats: RequestStats | None = None
    """Set in the last output of a request."""
    ticket: AnyTicket | None = None
    """The ticket for the state after all tokens except the last, if a finished request asked to keep its
    state or if a request moves. A request that moves before its own ticket is read returns its own ticket."""

    @property
    def num_logprobs(self) -> int:
        """The number of log-probabilities: of the answer's and prompt's tokens and of their alternatives."""
        return sum(
            len(told) * (1 + len(told[0].top)) for told in (self.logprobs, self.prompt_logprobs) if told
        )

    @property
    def is_plain(self) -> bool:
        """Whether this output has tokens and nothing else."""
        return (
            self.finish_reason is None
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.error is None
            and self.stop_token_id is None
            and self.stats is None
            and self.ticket is None
        )


@message
class SetDraining:
    """Asks a server to take no new requests from now on, or to take them again.

    The routers stop sending new requests; the server itself refuses none. A request may still arrive: it
    began before its router knew of the drain, or no other server can continue it.
    """

    is_draining: bool
    lets_go: bool = False
    """Whether a decode server moves its requests to other servers (``moved``); else it finishes them."""
    heirs: tuple[str, ...] = ignorable(())
    """Addresses of prefill servers that stay, to which a prefill server hands over what it has cached."""

    def __post_init__(self) -> None:
        if len(self.heirs) > MAX_HEIRS:
            raise WireError(f"heirs: at most {MAX_HEIRS} addresses, got {len(self.heirs)}")
        for heir in self.heirs:
            check_address(heir)


@message
class DrainNews:
    """Tells each router whether a server drains: at the start of its stream and on every change."""

    is_draining: bool
    incarnation: str
    """The incarnation of the process at the stream's other end. The process that answered :class:`Describe`
    just before may have been another one."""


@message
class StepNews:
    """The outputs of one or several engine steps, for the router at the other end of the stream.

    Nearly all outputs are plain (:attr:`RequestOutput.is_plain`): they have tokens and nothing else. These
    are sent as lists of numbers, which cost a tenth of what a map of request ids costs.
    """

    handles: tuple[int, ...]
    """The requests of the plain outputs. Their tokens come before the same requests' ``outputs``."""
    token_ids: tuple[int, ...]
    """The tokens of all plain outputs, one output after the other."""
    counts: tuple[int, ...] = ()
    """How many of the tokens each plain output has. Empty: one each."""
    outputs: tuple[RequestOutput, ...] = ()

    def __post_init__(self) -> None:
        if self.counts and (len(self.counts) != len(self.handles) or min(self.counts) < 1):
            raise WireError(f"counts: expected {len(self.handles)} numbers of at least 1, got {self.counts}")
        num_tokens = sum(self.counts) if self.counts else len(self.handles)
        if num_tokens != len(self.token_ids):
            raise WireError(f"token_ids: expected {num_tokens} tokens, got {len(self.token_ids)}")

    def plain(self) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Return the handle and the tokens of each plain output."""
        if not self.counts:
            return zip(self.handles, zip(self.token_ids, strict=True), strict=True)
        ends = accumulate(self.counts)
        slices = (self.token_ids[end - count : end] for end, count in zip(ends, self.counts, strict=True))
        return zip(self.handles, slices, strict=True)


@message
class StepOutputs:
    """The outputs of one or several engine steps, by request.

    :class:`wire.outbox.Outbox` makes these from single outputs.
    """

    token_ids: dict[str, tuple[int, ...]]
    """The tokens of plain outputs (:attr:`RequestOutput.is_plain`), by request id. They come before the same
    request's ``outputs``."""
    outputs: tuple[RequestOutput, ...] = ()

    def __len__(self) -> int:
        """The number of outputs."""
        return len(self.token_ids) + len(self.outputs)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yields all outputs, in an order that keeps each request's own order."""
        for request_id, token_ids in self.token_ids.items():
            yield RequestOutput(request_id, token_ids)
        yield from self.outputs

    def news(self, handles: Mapping[str, int]) -> StepNews:
        """Return the message for a router. Plain outputs of requests without a handle are left out."""
        of_requests, tokens = list(map(handles.get, self.token_ids)), list(self.token_ids.values())
        told = [handle for handle in of_requests if handle is not None]
        if len(told) < len(tokens):
            tokens = [ids for handle, ids in zip(of_requests, tokens, strict=True) if handle is not None]
        flat = tuple(chain.from_iterable(tokens))
        counts = () if len(flat) == len(tokens) else tuple(map(len, tokens))  # no output has no tokens
        return StepNews(tuple(told), flat, counts, self.outputs)


@message
class Describe:
    """Asks a server for its :class:`ServerInfo`."""

    protocol: int = FIRST_VERSION
    """The newest protocol version that the sender reads."""

    def __post_init__(self) -> None:
        check_peer(self.protocol)


@message
class ServerInfo:
    role: Role
    incarnation: str
    served_model_name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    local_prefill: bool = False
    """Whether a decode server computes prompts itself if it can't get state from a prefill server."""
    is_draining: bool = False
    """Whether the server was asked to take no new requests."""
    max_batch_tokens: int = 2048
    """Maximum number of tokens in one step."""
    protocol: int = FIRST_VERSION
    """The newest protocol version that the sender reads."""

    def __post_init__(self) -> None:
        check_peer(self.protocol)


@message
class GetStats:
    """Asks a server for its load."""


@message
class ServerStats:
    """Load and memory of one server at one moment. Null entries are not counted.

    Memory that only the prefix cache holds counts as free: any request that needs room gets it.
    """

    num_waiting: int
    """Requests queued for room or for their transfer."""
    num_running: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    num_slots: int
    free_slots: int
    cached_states: int
    preemptions: int
    """Requests moved to host memory since the start because blocks were short."""
    given_rows: int
    """Requests moved to host memory since the start so that another client's request got a row."""
    num_steps: int
    prefill_tokens: int
    """Prompt tokens computed since the start."""
    decode_tokens: int
    """Tokens sampled since the start."""
    quarantined_blocks: int
    """Blocks in quarantine: a given-up read may still write to them. They are free once no byte can land
    there."""
    quarantined_slots: int
    drafted_by_position: tuple[int, ...] = ()
    """Drafts tried since the start: item i counts the i-th draft (from 0) of all rows and steps."""
    accepted_by_position: tuple[int, ...] = ()
    """Accepted drafts, counted in the same way."""
    leases_held: int = 0
    leases_ended: dict[str, int] = field(default_factory=dict)
    """Leases since the start, by the reason of their end: read (``done``), given back or revoked (``ended``),
    or not read in time (``expired``)."""
    transfers_in_flight: int = 0
    transfer_bytes: int = 0
    """Bytes read from other servers since the start."""
    early_bytes: int = 0
    """The part of ``transfer_bytes`` that had landed before the prompt was prefilled."""
    transfer_parts: int = 0
    """Reads of parts of prompts that have landed since the start, including those of running and failed
    transfers. A part is several reads if one of the two servers has several ranks."""
    transfer_failures: dict[str, int] = field(default_factory=dict)
    """Tickets since the start whose state did not arrive, by :data:`wire.errors.TransferFailure`."""
    queued_tokens: int = 0
    """Prompt tokens of waiting and running requests that are not computed or read yet."""
    drain: DrainState = "serving"
    num_routers: int = 1
    """Number of routers that have a stream open to a decode server."""
    prefix_version: int | None = None
    """Version of the prefixes that the cache can serve. A router that has this version need not ask again."""


@message
class Empty:
    """A reply without content."""
