"""The input of a policy's choice: the candidates, their load and the request's demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.policies.location import NOWHERE, Location
from wire.messages.prefixes import block_keys


@dataclass(frozen=True)
class Load:
    """What the router knows of one server's load. Load is counted in tokens, so that long prompts weigh
    more."""

    queued_tokens: int = 0
    """Prompt tokens that the server must compute, or read from another server, before those of a new
    request."""
    free_tokens: int = 0
    """How many tokens have room in blocks that are free or can be made free; below 0 if more tokens were sent
    to the server than it had room for."""
    total_tokens: int = 0
    """How many tokens have room in all blocks; 0: not known."""


@dataclass(frozen=True)
class Candidate:
    """A server that may take the request."""

    address: str
    load: Load = Load()
    cached_tokens: int = 0
    """The number of tokens at the prompt's beginning for which the server has keys, values and a recurrent
    state. If they are not on its device, less the tokens that it computes while it reads them."""
    distance: int = 0
    """The distance to the server with which this one would exchange the request's state."""


@dataclass(frozen=True)
class Demand:
    """The properties of a request that the choice of a server may depend on."""

    token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    session: str | None = None
    """Requests with the same value of the session header go to the same server."""
    session_name: str = ""
    """The session that the request belongs to; empty: none. Its requests should go to the same server, as far
    as load allows that."""
    has_begun: bool = False
    """Whether a server has already taken the request. If so, a draining server may continue the request if no
    other server is left."""
    fingerprint: str | None = None
    """The fingerprint of the servers that computed the part of the answer that the client has. Only servers
    with this fingerprint may continue the answer. None: the client has no part of the answer yet."""
    near: Location = NOWHERE
    """The location of the server with which the chosen one will exchange the request's state."""
    _keys: dict[tuple[str, int], list[bytes]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def block_keys(self, fingerprint: str, block_size: int) -> list[bytes]:
        """Return the keys of the prompt's full blocks, without its last token. They are the same for all
        servers of a model, so they are computed once, and go with the request."""
        found = self._keys.get((fingerprint, block_size))
        if found is None:
            found = block_keys(
                self.token_ids[:-1], block_size=block_size, fingerprint=fingerprint, salt=self.cache_salt
            )
            self._keys[fingerprint, block_size] = found
        return found


@dataclass(frozen=True)
class Decision:
    candidate: Candidate
    policy: str
    """The name of the policy that decided: one policy may leave the decision to another."""


class Policy(Protocol):
    """Chooses one of several servers. Pure: no clock, no I/O, no state outside itself."""

    @property
    def reads_load(self) -> bool:
        """Whether the policy needs the candidates' load."""

    @property
    def reads_prefixes(self) -> bool:
        """Whether the policy needs the number of cached tokens of each candidate."""

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        """Return the decision for one of ``candidates``, which must not be empty."""
