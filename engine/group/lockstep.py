"""How the ranks of a group compute each step together, and sleep together.

Experts are spread over all ranks, so a rank's forward pass needs every other rank in the same pass. Steps are
numbered rounds. In each round a rank sends a *wish*, the shape of the step that it has to compute:

    rank with work       wish(7) ─────▶ all others        waits for the others' wishes of round 7
    rank without work    asleep; wakes ─▶ wish(7, nothing)  waits for the others' wishes of round 7
    all                  shape = largest of the wishes; one forward pass of that shape; round 8

The exchange of wishes is the only collective operation of a round that runs on the host. A wish also wakes
sleeping ranks. No rank can miss a wish: the wish's number says for which round it is, and no rank enters a
round twice. When no rank has work, no wish is sent and all ranks sleep.
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
"""How long a round waits for a rank that is alive but sends no wish, since it still computes its last
step."""


class Lockstep(Protocol):
    """Agrees on the shape of each step, after the plan is made and before it is launched."""

    def agree(self, wish: StepShape) -> StepShape:
        """Returns the shape that all ranks compute now; :data:`NOTHING` if no rank is known to have work."""

    def settle(self, compute: Callable[[StepShape], None]) -> None:
        """Returns once every rank has called this method. Until then calls ``compute`` for each step that
        another rank has to compute."""


class Alone:
    """Lockstep of a server that has no other rank to agree with."""

    def agree(self, wish: StepShape) -> StepShape:
        return wish

    def settle(self, compute: Callable[[StepShape], None]) -> None:
        pass


class GroupLockstep(Listener):
    """Lockstep of a rank in a group. Only the engine's thread calls :meth:`agree` and :meth:`settle`."""

    def __init__(
        self,
        mesh: GroupMesh,
        leads: tuple[int, ...],
        *,
        on_lost: Callable[[GroupLostError], None],
        on_leaving: Callable[[int], None],
    ) -> None:
        """Joins the rounds of the processes ``leads``.

        ``leads`` has, for each data-parallel rank, the process that sends its wishes; this process is one of
        them. The mesh's thread calls ``on_leaving`` with each other data-parallel rank that is about to end,
        and ``on_lost`` with the reason why the group is lost.
        """
        self.mesh = mesh
        self._leads = leads
        self._others = tuple(rank for rank in leads if rank != mesh.rank)
        self._round = 0
        self._heard: dict[int, dict[int, StepShape]] = {}
        """Other ranks' wishes, first by round, then by rank. A faster rank may already have sent its wish for
        the next round."""
        self._changed = threading.Condition()
        self._is_inside = False
        """Whether the engine's thread waits for wishes of this round. A wish for which it does not wait calls
        ``wake``."""
        self._wake: Callable[[], None] = lambda: None
        self._on_lost = on_lost
        self._on_leaving = on_leaving

    def on_wake(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, on another thread, when another rank has work and this rank may be asleep."""
        with self._changed:
            self._wake = wake
            has_heard = bool(self._heard)
        if has_heard:
            wake()

    def agree(self, wish: StepShape) -> StepShape:
        """See :meth:`Lockstep.agree`.

        Raises :class:`GroupLostError` if the group is lost, and :class:`DeadlineError` if another rank sends
        no wish for :data:`PROGRESS_S`.
        """
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
        """Takes another rank's wish. Called on the mesh's thread."""
        with self._changed:
            if not self._round <= wish.number <= self._round + 1:
                raise WireError(f"a wish for round {wish.number}; this rank is in round {self._round}")
            self._heard.setdefault(wish.number, {})[rank] = wish.shape
            is_awaited = self._is_inside and wish.number == self._round
            self._changed.notify_all()
        if not is_awaited:
            self._wake()

    def leaving(self, rank: int) -> None:
        if rank in self._leads:
            self._on_leaving(self._leads.index(rank))

    def lost(self, error: GroupLostError) -> None:
        with self._changed:  # the engine's thread must not wait for wishes any more
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
    """Lockstep of a server with several tensor-parallel ranks: rank 0 agrees and tells the other ranks."""

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
    """Lockstep of a tensor-parallel rank other than 0. Rank 0 sends it the shapes that were agreed on."""

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
