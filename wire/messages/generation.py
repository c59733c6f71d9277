"""Messages of a request's life: prefill call, decode stream, and what servers say of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

from wire.codec import message
from wire.messages.handoff import AnyTicket, PartialTicket, Role, Ticket
from wire.messages.sampling_params import SamplingParams
from wire.messages.traceparent import check_traceparent

FinishReason = Literal["stop", "length", "cancelled", "error", "moved"]
"""``moved``: this server lets the request go before its end; another can go on with what ``ticket`` names."""

DrainState = Literal["serving", "draining", "drained"]
"""``draining``: it gets no new requests; ``drained``: and nothing is left of earlier ones."""


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
class PrefillRequest:
    """Run ``token_ids`` up to the last but one and keep the state for a decode server."""

    request_id: str
    token_ids: tuple[int, ...]
    """The whole prompt, N ≥ 2 tokens; the server computes N-1 of them."""
    prompt_logprobs: int | None = None
    """As :attr:`SamplingParams.logprobs`, for tokens 2 … N of the prompt."""
    cache_salt: str = ""
    """Only requests with the same salt share cached blocks and states."""
    resume: Ticket | None = None
    """State of a beginning of the prompt that a decode server keeps from an earlier answer."""
    traceparent: str = ""
    """Trace and span that this is part of (:mod:`wire.messages.traceparent`); empty: none."""

    def __post_init__(self) -> None:
        check_traceparent(self.traceparent)


@message
class PrefillStarted:
    """Comes before the reply of a prompt that takes several chunks, once the first one is computed."""

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
class Submit:
    """A request for a decode server. Without a ticket the server computes the prompt itself.

    A decode-only server takes a request without a ticket only if the prompt is one token long
    (there is nothing to hand over); a server of both roles takes any.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    ticket: AnyTicket | None
    prompt_logprobs: int | None = None
    """Only where there is no ticket: with one, the prefill server has answered it already."""
    cache_salt: str = ""
    keeps_state: bool = False
    """After the answer keep blocks and state for a while, and give a ticket for them."""
    num_answered: int = 0
    """Tokens at the end of ``token_ids`` that the answer has already: another server generated them."""
    traceparent: str = ""
    """As :attr:`PrefillRequest.traceparent`."""
    timeout_s: float | None = None
    """How long anybody waits for the answer; then the server ends it by itself. None: no matter how long."""
    client: str = ""
    """Whose request it is, by any name: rows are shared fairly between clients."""

    def __post_init__(self) -> None:
        check_traceparent(self.traceparent)


@message
class Cancel:
    request_id: str


@message
class ConnectPeers:
    """Prefill servers to shake hands with now, so that no request pays for the first contact."""

    addresses: tuple[str, ...]


@message
class ErrorReply:
    """An error as it crosses the wire; see :func:`wire.errors.error_from_code`."""

    code: str
    message: str


@message
class RequestStats:
    """What a finished request cost on the decode server. Times in seconds."""

    queue_s: float = 0.0
    transfer_s: float = 0.0
    """From when there was room and the prompt was prefilled, whichever came last, to when all had landed."""
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    first_token_s: float = 0.0
    """From having room and state to the first token: the recompute of token N, or the whole prompt."""
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that became tokens of the answer."""
    early_bytes: int = 0
    """Of ``transfer_bytes``, those that had landed before the prompt was prefilled."""
    decode_s: float = 0.0
    """From the first token to the last."""


@message
class RequestOutput:
    """One request's news of one step."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the answer, if one did; it is the last of ``token_ids``."""
    error: ErrorReply | None = None
    """Set exactly if ``finish_reason`` is ``error``."""
    stats: RequestStats | None = None
    """Set in the last output of a request."""
    ticket: AnyTicket | None = None
    """For what is kept of a finished request, if it asked for that: all tokens but the last. One that is let
    go (``moved``) before it has read gives on the ticket that it came with."""

    @property
    def num_logprobs(self) -> int:
        """Of its tokens, the prompt's too, and of the alternatives to each."""
        return sum(
            len(told) * (1 + len(told[0].top)) for told in (self.logprobs, self.prompt_logprobs) if told
        )

    @property
    def is_plain(self) -> bool:
        """Whether it brings tokens and nothing else."""
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

    It is the routers that send none: a server that drains still serves what comes, since what comes has begun
    before its router knew, or has nowhere else to go on.
    """

    is_draining: bool
    lets_go: bool = False
    """Whether a decode server lets its requests go to others (``moved``); else they end where they are."""


@message
class DrainNews:
    """Tells each router on its stream, first and whenever it changes, whether a decode server drains."""

    is_draining: bool
    incarnation: str
    """Of the process that has the stream: maybe not the one that was asked who it is just before."""


@message
class StepOutputs:
    """All news of one engine step, or several, for the router at the other end of the stream.

    :class:`wire.outbox.Outbox` makes them of single outputs.
    """

    token_ids: dict[str, tuple[int, ...]]
    """By request, of those that first have plain outputs: their tokens, which come before ``outputs``."""
    outputs: tuple[RequestOutput, ...] = ()

    def __len__(self) -> int:
        """How many outputs they are."""
        return len(self.token_ids) + len(self.outputs)

    def __iter__(self) -> Iterator[RequestOutput]:
        """All news as outputs, in an order in which they may be taken."""
        for request_id, token_ids in self.token_ids.items():
            yield RequestOutput(request_id, token_ids)
        yield from self.outputs


@message
class Describe:
    """Asks a server who it is."""


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
    """Whether a decode server computes prompts itself when no prefill server's state can be had."""
    is_draining: bool = False
    """Whether it was asked to take no new requests."""
    max_batch_tokens: int = 2048
    """Most tokens of one step."""


@message
class GetStats:
    """Asks a server for its load."""


@message
class ServerStats:
    """Load and memory of one server at one moment. The null entries do not count.

    What only the prefix cache holds is free, since it is given up for any request that needs room.
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
    """Requests moved to host memory since the start, for want of blocks."""
    given_rows: int
    """The same, so that another client's request got a row."""
    num_steps: int
    prefill_tokens: int
    """Prompt tokens computed since the start."""
    decode_tokens: int
    """Tokens sampled since the start."""
    quarantined_blocks: int
    """Destinations of reads that were given up: not free until nothing can land there any more."""
    quarantined_slots: int
    drafted_by_position: tuple[int, ...] = ()
    """Drafts tried since the start: item i counts the i-th draft (from 0) of all rows and steps."""
    accepted_by_position: tuple[int, ...] = ()
    """Of those, the ones that were accepted."""
    leases_held: int = 0
    leases_ended: dict[str, int] = field(default_factory=dict)
    """Since the start: read (``done``), given back (``ended``), or not read in time (``expired``)."""
    transfers_in_flight: int = 0
    transfer_bytes: int = 0
    """Bytes read from other servers since the start."""
    early_bytes: int = 0
    """Of ``transfer_bytes``, those that had landed before their prompt was prefilled."""
    transfer_parts: int = 0
    """Parts of prompts that have landed since the start, of transfers under way and failed ones too."""
    transfer_failures: dict[str, int] = field(default_factory=dict)
    """Tickets since the start whose state did not come, by :data:`wire.errors.TransferFailure`."""
    queued_tokens: int = 0
    """Tokens of prompts, of waiting requests and of running ones, that are not computed or read yet."""
    drain: DrainState = "serving"
    num_routers: int = 1
    """Whose streams a decode server has open."""
    prefix_version: int | None = None
    """Of the prefixes that the cache can serve; who has this version need not ask for news."""


@message
class Empty:
    """An answer with nothing to say."""
