"""How much a router may send to servers: what they have, less what other routers use, but never less than a
fair part.

Requests beyond that would wait on the servers, first come, first served, whatever their priority and client.
A computed prompt also keeps its blocks on a prefill server until there is room to decode it. So such requests
wait in the router instead.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 4
"""For each ``MARGIN`` rows, one request more than there are rows is in flight. Its prompt is computed
meanwhile, so that a row that becomes free finds a prompt that is ready."""
MARGIN_A_PREFILL_SERVER = 2
"""Requests in flight beyond the rows where rows are few, for each prefill server: it should have one prompt
to compute and one to go on with."""
PREFILL_STEPS = 2
"""Full steps for which prompts may be queued on a prefill server; more prompts are sent only while there are
fewer. That keeps the server busy until the next prompts are sent, and a request of high priority has no more
to wait for."""
GUARANTEED_BLOCKS = 0.5
"""The share of a router's fair part of all blocks that its prompts always get. Answers grow into the rest, or
are preempted."""


@dataclass(frozen=True)
class Resource:
    """Something of which a server has a limited amount and which several routers use."""

    total: float
    others: float = 0.0
    """What others than this router use, as the server last reported."""
    own: float = 0.0
    """What this router uses, by its own count."""

    def left(self, guaranteed: float) -> float:
        """Return what is left for this router: what nobody uses, or the rest of ``guaranteed``, whichever is
        more.

        If all routers want more than they get, they approach equal parts as their requests end, though each
        of them knows of the others only by the servers' stats. A router that is alone gets everything.
        """
        return max(self.total - self.others, guaranteed) - self.own


@dataclass(frozen=True)
class Capacity:
    """What the servers of one model have for this router. Each server counts on its own: a frozen one must
    not stand for all."""

    rows: tuple[Resource, ...]
    """Rows of each decode server. Rows of this router's own requests are free here: the gate counts the
    requests."""
    blocks: tuple[Resource, ...]
    """Blocks of each decode server, in tokens. Empty until all of them have reported their stats."""
    prefill: tuple[Resource, ...]
    """Tokens of prompts that may be queued on each prefill server. Empty where decode servers compute
    prompts."""
    num_routers: int = 1
    """Routers that are connected to these servers, this one included."""

    @property
    def places(self) -> int:
        """The number of choices that this router may have in flight."""
        rows = int(sum(server.left(server.total / self.num_routers) for server in self.rows))
        if not self.prefill:
            return rows
        return rows + max(rows // MARGIN, MARGIN_A_PREFILL_SERVER * len(self.prefill))

    def lets_in(self, num_tokens: int, *, just_sent: int = 0) -> bool:
        """Return whether prompts of ``num_tokens`` tokens should be sent now, if there are places for them.

        ``just_sent``: tokens of prompts that are on their way to a server and not in any stats yet.
        """
        if not self.has_prefill(just_sent):
            return False
        part = GUARANTEED_BLOCKS / self.num_routers
        free = sum(max(0.0, server.left(part * server.total)) for server in self.blocks)
        return not self.blocks or free >= num_tokens + just_sent

    def has_prefill(self, just_sent: int) -> bool:
        """Return whether some prefill server has few enough prompts queued, or there are no prefill
        servers."""
        return not self.prefill or any(
            server.left(server.total / self.num_routers) > just_sent for server in self.prefill
        )
