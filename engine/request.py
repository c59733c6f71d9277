"""One request's life on the host: its tokens, what it owns, how far it has come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.memory.index_pool import NULL_INDEX
from engine.memory.prefix_cache import CachedBlock, CachedState
from wire.messages.generation import FinishReason, RequestStats, TokenLogprobs
from wire.messages.handoff import AnyTicket
from wire.messages.sampling_params import SamplingParams


class Matcher(Protocol):
    """Follows the grammar of one answer, as :class:`engine.grammar.follower.Follower` does."""

    masks: NDArray[np.int32] | None
    """Bits ``[n, W]`` of what may follow the answer and each of its drafts; None: they are not there yet."""


@dataclass(frozen=True, slots=True)
class StateBoundary:
    """The state after ``length`` tokens is to be written to ``slot``, to be kept there."""

    length: int
    slot: int


@dataclass(slots=True)
class Memory:
    """What a request owns of the pools and the prefix cache. See
    :class:`engine.schedule.ownership.Ownership`."""

    block_ids: list[int] = field(default_factory=list)
    nodes: list[CachedBlock] = field(default_factory=list)
    """Held nodes of the prefix cache, one for each full block from the prompt's start."""
    slots: list[int] = field(default_factory=list)
    """Speculative slots: where a step leaves the state after each of its ``1 + k`` positions. None where the
    model has no recurrent state: all that names one then is the null slot."""
    state_index: int = 0
    """Which of ``slots`` holds the newest state, unless ``read_slot`` does."""
    read_slot: int = NULL_INDEX
    """Holds the newest state, h(num_computed), where that is none of ``slots``; null otherwise."""
    read_state: CachedState | None = None
    """The prefix cache's state in ``read_slot``, held; None if that slot is the request's own."""
    boundary: StateBoundary | None = None
    """Where decoding will next pass a state that is to be kept, and the slot it is written to."""

    @property
    def state_slot(self) -> int:
        """Slot that holds the newest state."""
        return self.read_slot or (self.slots[self.state_index] if self.slots else NULL_INDEX)

    @property
    def chunk_slot(self) -> int:
        """Slot that a chunk of the prompt leaves its state in, unless that is kept."""
        return self.slots[0] if self.slots else NULL_INDEX

    @property
    def own_blocks(self) -> list[int]:
        """Blocks that nobody else has, the prefix cache neither."""
        nodes = self.nodes
        return [
            block_id
            for i, block_id in enumerate(self.block_ids)
            if i >= len(nodes) or nodes[i].block_id != block_id
        ]


@dataclass(slots=True)
class Measured:
    """When a request got how far, and what it moved. Times are monotonic, 0 while they have not come."""

    arrived_s: float = field(default_factory=time.monotonic)
    admitted_s: float = 0.0
    landed_s: float = 0.0
    """When what its ticket names had been read."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_cached: int = 0
    """Tokens that were not computed because the prefix cache had them."""
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    early_bytes: int = 0
    """Of ``transfer_bytes``, those that had landed before the prompt was prefilled."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts that became tokens of the answer."""

    def stats(self) -> RequestStats:
        """How long its parts took and what it moved, for whoever gets its answer."""
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
    """Whoever lets other servers read a request's memory."""

    def revoke(self, request: Request) -> None:
        """The memory is about to be free, and nobody else can have it yet."""


@dataclass(eq=False)
class Request:
    """State of one request. The scheduler moves it, the engine fills in tokens.

    ``tokens`` holds prompt and answer. ``num_computed`` of them have their KV and their Mamba state,
    h(num_computed), in ``memory``: as far as steps have been read back. Steps that are
    launched but not read back (``num_in_flight``) will bring it to ``num_planned`` at least.
    """

    request_id: str
    tokens: list[int]
    params: SamplingParams | None
    """None in a request that is only prefilled."""
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
    """Whose it is, by any name: see :mod:`engine.schedule.fair_share`."""
    num_answered: int = 0
    """Tokens at the end of ``tokens`` that are the answer's already: another server generated them."""
    follower: Matcher | None = None
    """Follows the answer, as far as steps are read back, where it has a grammar."""

    lender: Lender | None = field(init=False, default=None)
    """Of a request whose memory may be read."""
    num_given: int = field(init=False)
    """Tokens known from the start: what lies behind them is decoded here."""
    num_prompt: int = field(init=False)
    chunks_until: int = field(init=False, default=0)
    """Tokens before this place are computed in chunks, if a chunk has only one as well."""
    num_computed: int = field(init=False, default=0)
    num_planned: int = field(init=False, default=0)
    num_in_flight: int = field(init=False, default=0)
    memory: Memory = field(init=False, default_factory=Memory)
    planned_slot: int = field(init=False, default=NULL_INDEX)
    """Where the step in flight leaves a prompt's newest state; a decoding row's is chosen on the device."""
    calm_until: int = field(init=False, default=-1)
    """With at most so many tokens computed, its next decode row needs no further block, no slot for a state
    that is kept, and does not lie beyond its end; -1: nobody has looked."""
    branch: int = field(init=False, default=0)
    """Tokens up to where cached KV reached beyond every cached state; 0 if it did not."""
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
        """Whether it is not known yet what its grammar allows next: it takes part in no step that samples."""
        return self.follower is not None and self.follower.masks is None

    @property
    def target(self) -> int:
        """Tokens to compute with what is known now: N-1 for a request that is only prefilled."""
        return self.num_prompt - 1 if self.prefill_only else len(self.tokens)

    @property
    def is_prompt_planned(self) -> bool:
        """Whether all that was given is computed or in flight: what follows is decoding."""
        return self.num_planned >= self.num_given

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def next_state_slot(self) -> int:
        """Slot that the next chunk of the prompt starts from, once all that is in flight has landed."""
        return self.planned_slot if self.num_in_flight else self.memory.state_slot

    @property
    def max_total_tokens(self) -> int:
        """Most tokens whose KV is ever kept; the last sampled one is never fed back."""
        if self.params is None:
            return self.num_prompt - 1
        return self.num_prompt + self.params.max_tokens - 1
