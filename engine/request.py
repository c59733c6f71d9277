"""One request's life on the host: its tokens, what it owns, how far it has come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.prefix_cache import CachedBlock, CachedState
from wire.generation import FinishReason, TokenLogprobs
from wire.handoff import Ticket
from wire.sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """State of one request. The scheduler moves it, the engine fills in tokens.

    ``tokens`` holds prompt and answer. ``num_computed`` of them have their KV in ``block_ids`` and their
    Mamba state, h(num_computed), in ``state_slot``.
    """

    request_id: str
    tokens: list[int]
    params: SamplingParams | None
    """None in a request that is only prefilled."""
    ticket: Ticket | None = None
    prompt_logprobs_wanted: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """End of sequence (unless ignored) and the request's own stop tokens."""
    seed: int = 0
    keeps_state: bool = False
    """Whether blocks and state are held after the answer, for the conversation's next turn."""
    cache_salt: str = ""
    """Only requests with the same salt share cached blocks and states."""

    num_prompt: int = field(init=False)
    num_computed: int = field(init=False, default=0)
    num_cached: int = field(init=False, default=0)
    """Tokens that were not computed because the prefix cache had them."""
    block_ids: list[int] = field(init=False, default_factory=list)
    nodes: list[CachedBlock] = field(init=False, default_factory=list)
    """Held nodes of the prefix cache, one for each full block from the prompt's start."""
    slot: int = field(init=False, default=0)
    """Where the next step leaves the state."""
    read_state: CachedState | None = field(init=False, default=None)
    """Held while the newest state, h(num_computed), is one of the prefix cache's and not in ``slot``."""
    branch: int = field(init=False, default=0)
    """Tokens up to where cached KV reached beyond every cached state; 0 if it did not."""
    row: int = field(init=False, default=-1)
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = field(init=False, default=None)
    arrived_s: float = field(init=False, default_factory=time.monotonic)
    admitted_s: float = field(init=False, default=0.0)
    transfer_s: float = field(init=False, default=0.0)
    transfer_bytes: int = field(init=False, default=0)
    transfer_descriptors: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def prefill_only(self) -> bool:
        return self.params is None

    @property
    def target(self) -> int:
        """Tokens to compute with what is known now: N-1 for a request that is only prefilled."""
        return self.num_prompt - 1 if self.prefill_only else len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def state_slot(self) -> int:
        """Slot that holds h(num_computed)."""
        return self.slot if self.read_state is None else self.read_state.slot

    @property
    def max_total_tokens(self) -> int:
        """Most tokens whose KV is ever kept; the last sampled one is never fed back."""
        if self.params is None:
            return self.num_prompt - 1
        return self.num_prompt + self.params.max_tokens - 1
