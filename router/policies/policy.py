"""What a policy knows when it chooses: the candidates, their load and what the request asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """One server's load, as far as a router knows it. In tokens, so that long prompts weigh more."""

    queued_tokens: int = 0
    """Tokens of prompts to be computed, or to be read from another server, before a new request's."""
    free_tokens: int = 0
    """Room in blocks that are free or can be made free; below 0 where more was sent than there was room."""
    total_tokens: int = 0
    """Room in all blocks; 0 if it is not known."""


@dataclass(frozen=True)
class Candidate:
    """A server that may take the request."""

    address: str
    load: Load = Load()
    cached_tokens: int = 0
    """Tokens from the prompt's start that it has both KV and a state for."""


@dataclass(frozen=True)
class Demand:
    """What of a request a choice may depend on."""

    token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    session: str | None = None
    """Requests of one session should meet at one server."""
    has_begun: bool = False
    """It was taken once: for want of another, a server that drains goes on with it."""
    fingerprint: str | None = None
    """Of the servers that have computed what the client has of the answer: no others go on with it."""


@dataclass(frozen=True)
class Decision:
    candidate: Candidate
    policy: str
    """Who made it, since policies may stand behind one another."""


class Policy(Protocol):
    """Chooses one of several servers. Pure: no clock, no I/O; what it remembers is its own."""

    @property
    def reads_load(self) -> bool:
        """Whether candidates need to come with their load."""

    @property
    def reads_prefixes(self) -> bool:
        """Whether they need to come with what they have cached."""

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        """One of ``candidates``, which may not be empty."""
