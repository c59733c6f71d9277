"""One request on the host: its tokens, the memory it owns, its progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.files.file_tier import Fetch
from engine.memory.cached_start import CachedBlock, CachedState, Place
from engine.memory.index_pool import NULL_INDEX
from wire.messages.generation import FinishReason, RequestStats, TokenLogprobs
from wire.messages.handoff import AnyTicket
from wire.messages.neighbours import Neighbour
from wire.messages.sampling_params import SamplingParams


class Matcher(Protocol):
    """Follows the grammar of one answer, as :class:`engine.grammar.follower.Follower` does."""

    masks: NDArray[np.int32] | None
    """Masks of the tokens that may follow the answer and each of its drafts: ``n`` masks of ``W`` 32-bit
    words, with one bit for each token. None: the masks have not come yet."""


@dataclass(frozen=True, slots=True)
class StateBoundary:
    """A boundary state that is kept: a step writes the state after ``length`` tokens to ``slot``."""

    length: int
    slot: int


@dataclass(slots=True)
class Memory:
    """Blocks and slots of the pools that a request owns, and nodes and states of the prefix cache that it
    holds. See :class:`engine.schedule.ownership.Ownership`."""

    block_ids: list[int] = field(default_factory=list)
    nodes: list[CachedBlock] = field(default_factory=list)
    """Held nodes of the prefix cache, one for each full block from the prompt's start."""
    slots: list[int] = field(default_factory=list)
    """Speculative slots: a step leaves in them the states after each of its ``1 + k`` positions. Where decode
    rows replay (:mod:`engine.step.draft_states`), there is one slot. The list is empty if the model has no
    recurrent state; the null slot is used instead."""
    state_index: int = 0
    """Index in ``slots`` of the newest state if there are several, unless ``read_slot`` holds that state."""
    read_slot: int = NULL_INDEX
    """Slot with the newest state, h(num_computed), if that state is in none of ``slots``; null otherwise."""
    read_state: CachedState | None = None
    """The prefix cache's state in ``read_slot``, which this request holds; None if the slot belongs to the
    request itself."""
    boundary: StateBoundary | None = None
    """The next boundary state that decoding is to keep, and its slot."""

    @property
    def state_slot(self) -> int:
        """Slot that holds the newest state. Where decode rows replay, the state in it may be behind."""
        if self.read_slot or not self.slots:
            return self.read_slot
        return self.slots[self.state_index if len(self.slots) > 1 else 0]

    @property
    def chunk_slot(self) -> int:
        """Slot in which a chunk of the prompt leaves its state. A state that is kept has its own slot
        instead."""
        return self.slots[0] if self.slots else NULL_INDEX

    @property
    def own_blocks(self) -> list[int]:
        """Blocks that belong to this request alone, not to the prefix cache."""
        nodes = self.nodes
        return [
            block_id
            for i, block_id in enumerate(self.block_ids)
            if i >= len(nodes) or nodes[i].block_id != block_id
        ]


@dataclass(slots=True)
class Measured:
    """Times of a request's stages and its counts of tokens and bytes.

    Times are monotonic; 0 means that the request has not reached the stage yet.
    """

    arrived_s: float = field(default_factory=time.monotonic)
    admitted_s: float = 0.0
    landed_s: float = 0.0
    """When the blocks and state of its ticket had been read."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_cached: int = 0
    """Tokens that were not computed because the prefix cache had them."""
    num_promoted: int = 0
    """The last of these tokens, which host memory had and the device had not."""
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    early_bytes: int = 0
    """The part of ``transfer_bytes`` that had landed before the whole prompt was prefilled."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts that became tokens of the answer."""

    def stats(self) -> RequestStats:
        """Returns the stages' durations and the counts, to be sent with the request's answer."""
        return RequestStats(
            queue_s=max(0.0, self.admitted_s - self.arrived_s) if self.admitted_s else 0.0,
            first_token_s=max(0.0, self.first_token_s - max(self.admitted_s, self.landed_s)),
            transfer_s=self.transfer_s,
            transfer_bytes=self.transfer_bytes,
            transfer_descriptors=self.transfer_descriptors,
            cached_tokens=self.num_cached,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            early_bytes=self.early_bytes,
            decode_s=self.last_token_s - self.first_token_s,
        )


class Lender(Protocol):
    """The part of a server that lets other servers read a request's memory."""

    def revoke(self, request: Request) -> None:
        """Ends the lending. Called just before the memory is freed, while no other request can own it."""


@dataclass(eq=False)
class Request:
    """State of one request. The scheduler moves it between queues, the engine appends tokens.

    ``tokens`` holds prompt and answer. The first ``num_computed`` of them have their KV and their Mamba
    state, h(num_computed), in ``memory``; only steps that have been read back count. The ``num_in_flight``
    steps that are launched but not read back will bring ``num_computed`` to ``num_planned`` at least.
    """

    request_id: str
    tokens: list[int]
    params: SamplingParams | None
    """None for a request that is only prefilled."""
    ticket: AnyTicket | None = None
    prompt_logprobs_wanted: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """End of sequence (unless ignored) and the request's own stop tokens."""
    seed: int = 0
    keeps_state: bool = False
    """Whether blocks and state are held after the answer, for the conversation's next turn."""
    cache_salt: str = ""
    """Only requests with the same salt share cached blocks and states."""
    client: str = ""
    """Any name for the client that sent the request: see :mod:`engine.schedule.fair_share`."""
    num_answered: int = 0
    """Tokens at the end of ``tokens`` that already belong to the answer: another server generated them."""
    follower: Matcher | None = None
    """Follows the grammar through the answer's tokens that have been read back; None: the answer has no
    grammar."""
    forks: list[Request] = field(default_factory=list)
    """Further choices of the same prompt. They wait for this request's state after all tokens but the last
    (:mod:`engine.schedule.forks`)."""
    session: str = ""
    """The session that the request belongs to (:mod:`wire.messages.sessions`); empty: none."""
    neighbour: Neighbour | None = None
    """Another server that has more of the prompt cached; None: none is known."""

    lender: Lender | None = field(init=False, default=None)
    """Lets other servers read this request's memory; None: no server may read it."""
    num_given: int = field(init=False)
    """Number of tokens known from the start. This server decodes all later tokens."""
    num_prompt: int = field(init=False)
    chunks_until: int = field(init=False, default=0)
    """Tokens before this place are computed in chunks, even if a chunk has only one token."""
    num_computed: int = field(init=False, default=0)
    num_planned: int = field(init=False, default=0)
    num_in_flight: int = field(init=False, default=0)
    memory: Memory = field(init=False, default_factory=Memory)
    planned_slot: int = field(init=False, default=NULL_INDEX)
    """Slot in which the step in flight leaves a prompt's newest state. While a request decodes, the device
    chooses that slot."""
    calm_until: int = field(init=False, default=-1)
    """While at most this many tokens are computed, the request is not at its end, and its next decode row
    needs no further block and no slot for a boundary state; -1: unknown."""
    quiet_until: int = field(init=False, default=-1)
    """While at most this many tokens are computed, a decode row that has been read back changes only the
    request's tokens and counts, unless it has a boundary or brought a stop token; -1: unknown."""
    block_keys: list[bytes] = field(init=False, default_factory=list)
    """Keys of its full blocks from the start, as far as they were needed (:mod:`wire.messages.prefixes`)."""
    marks: dict[int, Place] = field(init=False, default_factory=dict)
    """Lengths of the prompt at which its state is to be kept, besides the cache mode's regular ones,
    ascending, and what each of them is (:mod:`engine.schedule.cache_modes`)."""
    fetch: Fetch | None = field(init=False, default=None)
    """The cached prefix that is being read from files, or from another server, for this request."""
    row: int = field(init=False, default=-1)
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = field(init=False, default=None)
    measured: Measured = field(init=False, default_factory=Measured)

    def __post_init__(self) -> None:
        self.num_given = len(self.tokens)
        self.num_prompt = self.num_given - self.num_answered

    @property
    def prefill_only(self) -> bool:
        return self.params is None

    @property
    def awaits_masks(self) -> bool:
        """Whether the masks of its grammar have not come yet. Until then no step samples for the request."""
        return self.follower is not None and self.follower.masks is None

    @property
    def target(self) -> int:
        """Number of tokens that can be computed now: all known tokens, or N-1 of a prompt that is only
        prefilled."""
        return self.num_prompt - 1 if self.prefill_only else len(self.tokens)

    @property
    def plannable(self) -> int:
        """Number of tokens that steps may compute now. While forks wait, the last token has to wait, too."""
        return self.target - 1 if self.forks else self.target

    @property
    def is_prompt_planned(self) -> bool:
        """Whether all given tokens are computed or in flight, so that the next row decodes."""
        return self.num_planned >= self.num_given

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def next_state_slot(self) -> int:
        """Slot with the state that the next chunk of the prompt starts from, once all steps in flight have
        landed."""
        return self.planned_slot if self.num_in_flight else self.memory.state_slot

    @property
    def max_total_tokens(self) -> int:
        """Maximum number of tokens whose KV is ever kept. The last sampled token is never fed back to the
        model, so it has no KV."""
        if self.params is None:
            return self.num_prompt - 1
        return self.num_prompt + self.params.max_tokens - 1
