"""How much a router may send to servers: their capacity minus what other routers use, but never less than
its guaranteed part. Of rows and queues, this is the router's fair part; of blocks, half of its fair part.

Requests beyond this limit would wait on the servers in the order of their arrival, without regard to priority
and client. A computed prompt also keeps its blocks on a prefill server until there is room to decode it. So
requests beyond the limit wait in the router instead.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 4
"""For every ``MARGIN`` rows, one request is in flight in addition to those that fill the rows. The prompt of
this request is computed while all rows are busy, so that it is ready when a row becomes free."""
MARGIN_A_PREFILL_SERVER = 2
"""Minimum number of requests in flight beyond the number of rows, for each prefill server. It matters where
there are few rows. Each prefill server should have one prompt to compute and one to compute next."""
PREFILL_STEPS = 2
"""A router's limit for the prompts that are queued on a prefill server, in full steps. Its guaranteed part of
them is always its own. This keeps the server busy until the next prompts are sent, and limits how long a
request of high priority waits."""
GUARANTEED_BLOCKS = 0.5
"""A router's fair part is the number of all blocks divided by the number of routers. Its prompts always get
this share of its fair part. Answers grow into the rest, or are preempted."""


@dataclass(frozen=True)
class Resource:
    """Something of which a server has a limited amount and which several routers use."""

    total: float
    others: float = 0.0
    """The amount that other routers use, as the server last reported."""
    own: float = 0.0
    """The amount that this router uses, by its own count."""

    def left(self, guaranteed: float) -> float:
        """Return what is left for this router: what no router uses, or the unused part of ``guaranteed``,
        whichever is more.

        If all routers want more than they get, they approach equal parts as their requests end, though each
        router knows of the other routers only from the servers' stats. A router that is alone gets
        everything.
        """
        return max(self.total - self.others, guaranteed) - self.own


@dataclass(frozen=True)
class Capacity:
    """What the servers of one model have for this router. Each server is listed by itself, so that a frozen
    server does not affect the numbers of the other servers."""

    rows: tuple[Resource, ...]
    """Rows of each decode server. Rows that this router's own requests occupy count as free here, because the
    gate (:mod:`router.admission.gate`) counts these requests itself."""
    blocks: tuple[Resource, ...]
    """Blocks of each decode server, in tokens. Empty until all of them have reported their stats, and for
    models without KV."""
    prefill: tuple[Resource, ...]
    """Tokens of prompts that may be queued on each prefill server. Empty where decode servers compute
    prompts."""
    num_routers: int = 1
    """Number of routers that are connected to these servers, this router included."""

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
