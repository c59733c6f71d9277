"""How much may be sent to the servers: what they have, less what other routers use, but never less than a
fair part.

What is sent beyond that waits on the servers: first come, first served, whatever its priority and whoever's
it is, and a prompt that is computed keeps its blocks on a prefill server until there is room to decode it. So
it had better wait here.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 4
"""One request is in flight beyond the rows for each so many rows: its prompt is computed meanwhile, so that a
row that becomes free finds one that is ready."""
MARGIN_A_PREFILL_SERVER = 2
"""Where rows are few: prefill servers should have one prompt to compute and one to go on with."""
PREFILL_STEPS = 2
"""Prompts may be queued on prefill servers for so many full steps, and are sent as long as there are fewer:
enough to keep them busy until the next are sent, and all that a request of high priority has to wait for."""
GUARANTEED_BLOCKS = 0.5
"""Of a router's fair part of all blocks, for prompts. Answers grow into the rest, or are preempted."""


@dataclass(frozen=True)
class Resource:
    """Something that a server has so much of, and several routers use."""

    total: float
    others: float = 0.0
    """What is used by others than this router, as the server last said."""
    own: float = 0.0
    """What this router uses, as it knows itself."""

    def left(self, guaranteed: float) -> float:
        """For this router: what nobody uses, or what is left of ``guaranteed``, whichever is more.

        Routers that all want more than they get approach equal parts as their requests end, though none knows
        of the others but by the servers' figures; one alone gets everything.
        """
        return max(self.total - self.others, guaranteed) - self.own


@dataclass(frozen=True)
class Capacity:
    """What the servers of one model have for this router, each one's on its own: a frozen one must not stand
    for all."""

    rows: tuple[Resource, ...]
    """Of each decode server. Those of this router's own requests are free here: the gate counts them."""
    blocks: tuple[Resource, ...]
    """In tokens, of each decode server that has told."""
    prefill: tuple[Resource, ...]
    """Tokens of prompts that may be queued on each prefill server; none where decode servers compute
    prompts."""
    num_routers: int = 1
    """That are connected to those servers, this one included."""

    @property
    def places(self) -> int:
        """How many choices of this router may be in flight."""
        rows = int(sum(server.left(server.total / self.num_routers) for server in self.rows))
        if not self.prefill:
            return rows
        return rows + max(rows // MARGIN, MARGIN_A_PREFILL_SERVER * len(self.prefill))

    def lets_in(self, num_tokens: int, *, just_sent: int = 0) -> bool:
        """Whether prompts of so many tokens should be sent now, if there are places for them.

        ``just_sent``: tokens of prompts that are on their way to some server and in no figure yet.
        """
        if not self.has_prefill(just_sent):
            return False
        part = GUARANTEED_BLOCKS / self.num_routers
        free = sum(max(0.0, server.left(part * server.total)) for server in self.blocks)
        return not self.blocks or free >= num_tokens + just_sent

    def has_prefill(self, just_sent: int) -> bool:
        """Whether some prefill server has few enough prompts queued, or there are none."""
        return not self.prefill or any(
            server.left(server.total / self.num_routers) > just_sent for server in self.prefill
        )
