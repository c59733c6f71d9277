"""What a server's rank 0 tells its other ranks: each call of its engine, in order.

Every rank has an engine of its own that decides for itself; from equal calls in equal order follow equal
decisions, so that no plan, batch or token has to travel.
"""

from __future__ import annotations

from wire.codec import message
from wire.messages.generation import ErrorReply
from wire.messages.handoff import AnyTicket, HandshakeReply, RankMemory, Ticket
from wire.messages.sampling_params import SamplingParams


@message
class AddRequest:
    """:meth:`engine.engine.Engine.add`; the fields are those of :class:`engine.request.Request`."""

    request_id: str
    tokens: tuple[int, ...]
    params: SamplingParams | None
    ticket: AnyTicket | None
    prompt_logprobs_wanted: int | None
    stop_token_ids: tuple[int, ...]
    seed: int
    keeps_state: bool
    cache_salt: str
    client: str
    num_answered: int


@message
class CancelRequest:
    request_id: str


@message
class ReleaseRequest:
    request_id: str


@message
class MoveRequests:
    """All of them, to other servers."""


@message
class EndTransfer:
    """:meth:`engine.engine.Engine.transferred`"""

    request_id: str
    ticket: Ticket | None
    """The whole one, of a request that came with an early one."""
    error: ErrorReply | None
    settled: bool


@message
class SumDigests:
    """:meth:`engine.engine.Engine.digests` of a request that is held."""

    request_id: str


@message
class GrammarNews:
    """What may come next in one answer, or why it can't go on."""

    request_id: str
    masks: bytes
    """Bits ``[n, W]`` int32 of the tokens that may follow the answer and each draft behind it."""
    error: ErrorReply | None = None


@message
class RunStep:
    """:meth:`engine.engine.Engine.step_with`"""

    news: tuple[GrammarNews, ...] = ()


@message
class Stop:
    pass


@message
class Introduce:
    """Which life of the server the ranks are, as peers know it; before anything of the handoff."""

    incarnation: str


@message
class RankMet:
    """From a rank to the process of its host: it has met all other ranks."""


@message
class LeaveServer:
    """To a rank, from the process of its host: that was told to stop."""


@message
class RankLeaves:
    """From a rank of another host: its processes are to stop. They compute until the server has stopped."""


@message
class RankLog:
    """A line for the log, from another rank to the process that started it."""

    level: int
    logger: str
    text: str


@message
class RankServes:
    """A rank's first report: what others need to read its memory."""

    memory: RankMemory


@message
class ServePeers:
    """Whether others may be reading just now, which takes a rank's polling."""

    is_on: bool


@message
class ConnectRank:
    """Makes a peer's ranks readable that hold something of this rank's."""

    number: int
    address: str
    reply: HandshakeReply


@message
class RankConnected:
    number: int
    error: str | None


@message
class ReadRankPart:
    """Unit ``remote_…[i]`` of the peer's pools is read into unit ``local_…[i]``: of each the rank's share.

    The ranks of a server allocate alike: the indices are the same on all.
    """

    number: int
    incarnation: str
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    local_slots: tuple[int, ...]
    remote_slots: tuple[int, ...]
    deadline_s: float


@message
class RankPartLate:
    """The deadline has passed; bytes may still land until :class:`RankPartEnded` comes."""

    number: int


@message
class RankPartEnded:
    number: int
    num_bytes: int
    num_descriptors: int
    error: str | None
    cause: str
    """Of the error, one of :data:`wire.errors.TransferFailure`."""
