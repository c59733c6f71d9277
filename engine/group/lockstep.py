"""How the ranks of a group compute each step together, and sleep together.

Experts are spread over all ranks, so a rank's forward pass needs every other rank in the same pass. Steps are
numbered rounds:

    rank with work       wish(7) ─────▶ all others        waits for their wishes of round 7
    rank without         asleep; wakes ─▶ wish(7, nothing)  waits for the others'
    all                  shape = largest of the wishes; one forward pass of that shape; round 8

The wishes of a round are its one collective on the host. A wish is also what wakes a sleeping rank, so nobody
can miss being woken: the number says which round it is for, and one that was entered is not entered again.
When no rank has work no wish is sent and all sleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from engine.group.mesh import GroupMesh, Listener
from engine.group.rank_link import RankLink
from wire.errors import DeadlineError, GroupLostError, WireError
from wire.messages.group import NOTHING, StepShape, Wish, largest

PROGRESS_S = 300.0
"""How long a round waits for a rank that lives and does not come: it is inside its last step."""


class Lockstep(Protocol):
    """Asked once a step, behind the plan and before its launch."""

    def agree(self, wish: StepShape) -> StepShape:
        """The shape that every rank computes now; :data:`NOTHING` if none has work, as far as is known."""

    def settle(self, compute: Callable[[StepShape], None]) -> None:
        """Returns once every rank has called it; until then others' steps are computed with them."""


class Alone:
    """Nobody to agree with."""

    def agree(self, wish: StepShape) -> StepShape:
        return wish

    def settle(self, compute: Callable[[StepShape], None]) -> None:
        pass


class GroupLockstep(Listener):
    """A rank among others. :meth:`agree` and :meth:`settle` are the engine's thread's."""

    def __init__(
        self,
        mesh: GroupMesh,
        leads: tuple[int, ...],
        *,
        on_lost: Callable[[GroupLostError], None],
        on_leaving: Callable[[int], None],
    ) -> None:
        """``leads``: of each data-parallel rank the process that agrees for it, this one included.

        On the mesh's thread ``on_leaving`` gets each other data-parallel rank that is about to end,
        ``on_lost`` why there is no group any more.
        """
        self.mesh = mesh
        self._leads = leads
        self._others = tuple(rank for rank in leads if rank != mesh.rank)
        self._round = 0
        self._heard: dict[int, dict[int, StepShape]] = {}
        """Wishes of others by round and rank: of this round, and of those who are in the next already."""
        self._changed = threading.Condition()
        self._is_inside = False
        """Whether the engine's thread waits for wishes of this round; any other wish wakes it."""
        self._wake: Callable[[], None] = lambda: None
        self._on_lost = on_lost
        self._on_leaving = on_leaving

    def on_wake(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, on another thread, when another rank has work and this one may sleep."""
        with self._changed:
            self._wake = wake
            has_heard = bool(self._heard)
        if has_heard:
            wake()

    def agree(self, wish: StepShape) -> StepShape:
        """Raises :class:`GroupLostError` when the group is."""
        with self._changed:
            self._check()
            if wish is NOTHING and self._round not in self._heard:
                return NOTHING
            self._is_inside = True
        return self._enter(wish)

    def settle(self, compute: Callable[[StepShape], None]) -> None:
        while (shape := self._enter(NOTHING)) != NOTHING:
            compute(shape)
        self.mesh.watch_closely()

    def heard(self, rank: int, wish: Wish) -> None:
        """Takes another rank's wish; on the mesh's thread."""
        with self._changed:
            if not self._round <= wish.number <= self._round + 1:
                raise WireError(f"it is in round {wish.number} and this rank in round {self._round}")
            self._heard.setdefault(wish.number, {})[rank] = wish.shape
            is_awaited = self._is_inside and wish.number == self._round
            self._changed.notify_all()
        if not is_awaited:
            self._wake()

    def leaving(self, rank: int) -> None:
        if rank in self._leads:
            self._on_leaving(self._leads.index(rank))

    def lost(self, error: GroupLostError) -> None:
        with self._changed:  # nobody is waited for any more
            self._changed.notify_all()
        self._on_lost(error)

    def _enter(self, wish: StepShape) -> StepShape:
        self.mesh.tell(Wish(self._round, wish), self._others)
        with self._changed:
            heard = self._heard.setdefault(self._round, {})
            came = self._changed.wait_for(
                lambda: self.mesh.lost is not None or len(heard) == len(self._others), PROGRESS_S
            )
            self._check()
            if not came:
                missing = sorted(set(self._others) - set(heard))
                raise DeadlineError(
                    f"ranks {missing} have not entered round {self._round} for {PROGRESS_S} s"
                )
            del self._heard[self._round]
            self._round += 1
            self._is_inside = False
        return largest([wish, *heard.values()])

    def _check(self) -> None:
        if self.mesh.lost is not None:
            raise GroupLostError(self.mesh.lost.message)


class LeadLockstep:
    """Of a server with several tensor-parallel ranks: rank 0 agrees and tells the others."""

    def __init__(self, group: GroupLockstep, tell: Callable[[object], None]) -> None:
        self._group = group
        self._tell = tell

    def agree(self, wish: StepShape) -> StepShape:
        shape = self._group.agree(wish)
        self._tell(shape)
        return shape

    def settle(self, compute: Callable[[StepShape], None]) -> None:
        def compute_all(shape: StepShape) -> None:
            self._tell(shape)
            compute(shape)

        self._group.settle(compute_all)
        self._tell(NOTHING)


class FollowingLockstep:
    """Of such a server's other ranks: what rank 0 has agreed."""

    def __init__(self, mesh: GroupMesh, link: RankLink) -> None:
        self._mesh = mesh
        self._link = link

    def agree(self, wish: StepShape) -> StepShape:
        while True:
            told = self._link.receive(StepShape, *self._link.takers)
            if isinstance(told, StepShape):
                return told
            self._link.takers[type(told)](told)

    def settle(self, compute: Callable[[StepShape], None]) -> None:
        while (shape := self.agree(NOTHING)) != NOTHING:
            compute(shape)
        self._mesh.watch_closely()
