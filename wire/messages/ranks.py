"""Messages between the ranks of a server, and between a rank and the process that started it.

Rank 0 sends each call of its engine, in order, and the other ranks send reports.

Every rank has its own engine, which decides by itself. Equal calls in equal order lead to equal decisions, so
no plan, batch or token has to be sent.
"""

from __future__ import annotations

from wire.codec import message
from wire.messages.generation import ErrorReply, ForkedChoice
from wire.messages.handoff import AnyTicket, HandshakeReply, RankMemory, Ticket
from wire.messages.purge import PurgePrefixes
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
    forks: tuple[ForkedChoice, ...] = ()
    """They differ from the request in their ids and seeds, and have no ticket."""
    session: str = ""


@message
class CancelRequest:
    request_id: str


@message
class ReleaseRequest:
    request_id: str


@message
class MoveRequests:
    """Moves all requests to other servers."""


@message
class EndTransfer:
    """:meth:`engine.engine.Engine.transferred`"""

    request_id: str
    ticket: Ticket | None
    """The whole ticket, for a request that came with an early ticket."""
    error: ErrorReply | None
    settled: bool


@message
class SumDigests:
    """:meth:`engine.engine.Engine.digests` for a request that is held."""

    request_id: str


@message
class GrammarNews:
    """The tokens that may come next in one answer, or the reason why the answer can't continue."""

    request_id: str
    masks: bytes
    """Bits ``[n, W]`` int32: the tokens that may follow the answer and each of its n - 1 drafts. W is the
    number of 32-bit words that hold one bit for each token id."""
    error: ErrorReply | None = None


@message
class FileJobEnded:
    """A read or a write of a cached prefix has ended: on all ranks in rank 0's news, on the rank itself in
    another rank's report."""

    number: int
    is_done: bool
    place: int = 0
    """Of a prefix that was read: why its state was kept."""


@message
class ReadFromFiles:
    """A request waits for the first ``num_blocks`` blocks of its prompt, which are read under this number."""

    number: int
    request_id: str
    num_blocks: int
    address: str = ""
    """The server from whose host memory they are read; empty: they are in files."""


@message
class WriteToFiles:
    """Write the start behind the block with this key. Files have its first ``num_known`` blocks."""

    number: int
    key: bytes
    num_known: int


@message
class FileNews:
    """What rank 0 has decided about cached prefixes in files before a step."""

    ended: tuple[FileJobEnded, ...] = ()
    late: tuple[int, ...] = ()
    """Reads that no request waits for any longer."""
    reads: tuple[ReadFromFiles, ...] = ()
    write: WriteToFiles | None = None


@message
class RunStep:
    """:meth:`engine.engine.Engine.step_with`"""

    news: tuple[GrammarNews, ...] = ()
    files: FileNews | None = None


@message
class TakeFolder:
    """Rank 0 has locked the folder with this number; another rank takes the one with the same number."""

    number: int


@message
class PurgeFiles:
    """Asks a rank to delete its shares of cached prompts from files."""

    wanted: PurgePrefixes


@message
class RankPurged:
    """What a rank has deleted for the oldest :class:`PurgeFiles` that it had not answered."""

    num_records: int
    num_bytes: int
    error: str


@message
class RankFileNews:
    """From another rank: what has changed in its files. All sums are since the rank's start."""

    ended: tuple[FileJobEnded, ...]
    added: tuple[bytes, ...]
    """Names of blocks and states that can be read now. A name says which write has left them."""
    lost: tuple[bytes, ...]
    """Names of those that can't be read any more."""
    used_bytes: int
    read_bytes: int
    written_bytes: int
    failures: dict[str, int]
    bytes_per_s: float
    """How fast it reads."""
    pause_reads_s: float = 0.0
    """For how long it does not read from now on, since its disk has failed."""
    pause_writes_s: float = 0.0
    purged: tuple[RankPurged, ...] = ()
    """Purges that have ended since the last message."""


@message
class Stop:
    pass


@message
class Introduce:
    """Gives the ranks the server's incarnation, as peers know it. Sent before any message of the handoff."""

    incarnation: str


@message
class RankMet:
    """From a rank to the process that started it, on a host without rank 0: the rank has met all other
    ranks."""


@message
class LeaveServer:
    """From the process that starts the ranks of a host without rank 0, to the first of these ranks: the
    process was asked to stop."""


@message
class RankLeaves:
    """From a rank on another host to rank 0: that host's processes were asked to stop. Rank 0 then stops the
    whole server; until that is done, the host's ranks still compute."""


@message
class RankLog:
    """A log line from another rank to the process that started it."""

    level: int
    logger: str
    text: str


@message
class RankServes:
    """A rank's first report: all that other servers need to read its memory."""

    memory: RankMemory


@message
class ServePeers:
    """Whether other servers may be reading now: their reads progress only if the rank polls."""

    is_on: bool


@message
class ConnectRank:
    """Asks a rank to connect to those ranks of a peer that hold data for it."""

    number: int
    address: str
    reply: HandshakeReply


@message
class RankConnected:
    number: int
    error: str | None


@message
class ReadRankPart:
    """Asks a rank to read its share of unit ``remote_…[i]`` of the peer's pools into unit ``local_…[i]``.

    All ranks of a server allocate in the same way, so the indices are the same on all ranks.
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
    """The deadline has passed. Bytes may still land until :class:`RankPartEnded` is sent."""

    number: int


@message
class RankPartEnded:
    number: int
    num_bytes: int
    num_descriptors: int
    error: str | None
    cause: str
    """The error's cause, one of :data:`wire.errors.TransferFailure`; empty without an error."""
