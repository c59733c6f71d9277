"""The gate in front of one model's servers. It limits how many choices run and how many requests wait;
requests beyond these limits are refused."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from router.admission.fair_queue import ANSWER_WEIGHT, FairQueue, QueuedRequest
from router.admission.place import RESERVED, Place, Residence, first_places
from router.config import RouterConfig
from router.fleet.links.capacity import Capacity
from wire.errors import DeadlineError, OverloadedError, UnavailableError

LOOK_INTERVAL_S = 0.01
"""Time between two looks at the servers while a request waits. When a request of this router ends, its places
are passed on at once, without waiting for the next look."""


@dataclass(frozen=True)
class GateLimits:
    max_in_flight: int
    """The maximum number of choices in flight, even if the servers have more room."""
    max_queue: int
    """The maximum number of requests that wait."""
    hold_s: float = 0.0
    """How long each request waits, at most, while no server serves the model."""


class Gate:
    """Lets requests in one by one, in the queue's order, as long as there is room.

    Each choice needs one place, because it takes a row on a decode server. A request gets all its places at
    once, except a request of many choices, which gets them bit by bit (:class:`Place`). A request overtakes
    others only if its client has less than its share. The share is an equal part of all places. Such a
    request is let in even if other clients hold all places, because decode servers give it rows that other
    clients have.

    ``room`` returns the servers' room; None while no request could be served at all. Then requests wait for
    ``hold_s``, as long as ``may_return`` says that a server may come back. After that they get the error that
    ``problem`` returns.
    """

    def __init__(
        self,
        limits: GateLimits,
        room: Callable[[], Capacity | None],
        problem: Callable[[], UnavailableError],
        may_return: Callable[[], bool] = lambda: False,
    ) -> None:
        self.limits = limits
        self.num_in_flight = 0
        """Places that are taken."""
        self._held: Counter[str] = Counter()
        """How many of the taken places each client has."""
        self.residence = Residence()
        self._room = room
        self._problem = problem
        self._may_return = may_return
        self._queue = FairQueue()
        self._admissions: dict[QueuedRequest, asyncio.Future[Place]] = {}
        self._growing: dict[Place, None] = {}
        """The places of requests with choices that have not begun, oldest first."""
        self._look: asyncio.TimerHandle | None = None
        self._empty_since_s: float | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_held(self) -> int:
        """How many of the waiting requests wait because no server serves the model: all or none."""
        return self.num_waiting if self._room() is None else 0

    @property
    def places(self) -> int:
        """How many choices may run now."""
        room = self._room()
        return 0 if room is None else min(self.limits.max_in_flight, room.places)

    def use_limits(self, config: RouterConfig) -> None:
        """Use the limits of ``config`` from now on. Requests that were let in stay, and so do those in a
        queue that is now too long."""
        self.limits = GateLimits(config.max_requests_in_flight, config.max_queue, config.hold_s)
        self.look()

    def refuse_early(self, client: str, priority: int) -> None:
        """If the queue is full, raise the error that :meth:`wait` would raise at once. To be called before
        any work is done for the request, because an overloaded router must not waste work."""
        if not self._is_full:
            return
        room = self._room_or_hold()
        has_to_wait = (
            room is None
            or len(self._queue)
            or self.num_in_flight >= min(self.limits.max_in_flight, room.places)
        )
        has_to_wait = has_to_wait and not (room and self._unused_share(client, room))
        if has_to_wait and self._queue.displaced_by(client, priority) is None:
            raise self._overloaded()

    def admit(self, queued: QueuedRequest) -> Place | None:
        """Let a request in if it need not wait, and return its places, which it holds until :meth:`leave`.
        None: it has to :meth:`wait`.

        Raises :class:`UnavailableError` (503) without servers.
        """
        room = self._room_or_hold()
        if room is None or len(self._queue):
            return None
        return self._placed(queued, room)

    async def wait_for_servers(self, client: str, priority: int, *, deadline: float) -> None:
        """Wait in the queue until servers are there, without taking a place. For requests that can't be
        checked before a server has reported its limits. Raises what :meth:`admit` and :meth:`wait` raise."""
        queued = QueuedRequest(client, priority, num_places=0, num_tokens=0, since_s=time.monotonic())
        if self.admit(queued) is None:
            await self.wait(queued, deadline=deadline)

    def choice_ended(self, place: Place) -> None:
        """Pass on the place of a choice that has ended while other choices of its request have not. Another
        choice of the request takes the place, or a waiting request does."""
        if place.num_left and (not len(self._queue) or place.num_places == 1):
            place.num_places -= 1
            place.grow(1)
        elif place.num_places > 1:
            place.num_places -= 1
            self._give_back(place.queued.client, 1)
            self.look()

    # --- letting requests in -------------------------------------------------------------------------

    def _room_or_hold(self) -> Capacity | None:
        """Return the servers' room; None if no server serves, but a request may wait for one. Raises
        :class:`UnavailableError` if it may not wait."""
        room = self._room()
        if room is None and not (self.limits.hold_s > 0 and self._may_return()):
            raise self._problem()
        return room

    def _placed(self, queued: QueuedRequest, room: Capacity, just_sent: int = 0) -> Place | None:
        """Let a request in if there is room, and return its places; None: there is no room."""
        places = min(self.limits.max_in_flight, room.places)
        wanted = first_places(queued, places=places, taken=self.num_in_flight)
        if self.num_in_flight:  # otherwise a request that never fits would never run
            num_tokens = queued.num_tokens * wanted // max(1, queued.num_places)
            if self.num_in_flight + wanted > places or not room.lets_in(num_tokens, just_sent=just_sent):
                return self._placed_in_share(queued, room, just_sent)
        return self._place(queued, wanted)

    def _placed_in_share(self, queued: QueuedRequest, room: Capacity, just_sent: int) -> Place | None:
        """Let a request in with as many places as its client's share still has, even if all places are taken.
        Return its places; None: its share is used up, or no prefill server has room."""
        wanted = min(queued.num_places, self._unused_share(queued.client, room))
        if wanted < 1 or not room.has_prefill(just_sent):
            return None
        return self._place(queued, wanted)

    def _place(self, queued: QueuedRequest, num_places: int) -> Place:
        self._take(queued.client, num_places)
        place = Place(queued, num_places)
        if place.num_left:
            self._growing[place] = None
        return place

    def _take(self, client: str, num_places: int) -> None:
        self.num_in_flight += num_places
        if num_places:  # requests in wait_for_servers take no place
            self._held[client] += num_places

    def _give_back(self, client: str, num_places: int) -> None:
        self.num_in_flight -= num_places
        self._held[client] -= num_places
        if not self._held[client]:
            del self._held[client]

    def _unused_share(self, client: str, room: Capacity) -> int:
        """Return how many places of its share a client may still take, even if all places are taken: none if
        there is no other client.

        The k-th client that comes gets at most a k-th part of all places. So if the first client had all
        places, 1 + 1/2 + 1/3 + … times as many choices as places may be in flight. With 80 places, this is
        five times as many, because the share of an 81st client is less than one place.
        """
        clients = {client, *self._held, *self._queue.clients}
        share = min(self.limits.max_in_flight, room.places) // len(clients) if len(clients) > 1 else 0
        return max(0, min(share - self._held[client], self.limits.max_in_flight - self.num_in_flight))

    async def wait(self, queued: QueuedRequest, *, deadline: float) -> Place:
        """Wait until a request is let in, and return its places, which it holds until :meth:`leave`.

        Raises :class:`OverloadedError` (429) if the queue is full, or if it becomes full and, to be fair,
        another client's request must get this request's place in the queue; :class:`UnavailableError` (503)
        without servers; and :class:`DeadlineError` (504) if ``deadline``, on the event loop's clock, passes.
        """
        if self._is_full:
            displaced = self._queue.displaced_by(queued.client, queued.priority)
            if displaced is None:
                raise self._overloaded()
            self._give_up(displaced, self._overloaded())
        admission: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._admissions[queued] = admission
        self._queue.push(queued)
        self._let_in()
        try:
            async with asyncio.timeout_at(deadline):
                return await admission
        except BaseException as error:
            if queued in self._admissions:
                self._forget(queued)
                self._let_in()  # smaller requests may have waited for this one to go first
            elif admission.done() and not admission.cancelled() and admission.exception() is None:
                self._release(admission.result())  # it was let in at the same moment as it left
            if isinstance(error, TimeoutError):
                raise DeadlineError.told(
                    f"the request waited for its turn until its deadline: {self.num_in_flight} choices are "
                    f"in flight and {len(self._queue)} requests wait: send it again later"
                ) from error
            raise

    def look(self) -> None:
        """Let requests in if there is new room. To be called whenever there may be new room."""
        if len(self._queue) or self._growing:
            self._let_in()

    def _let_in(self) -> None:
        """Let waiting requests in, in turn, as long as there is room."""
        room = self._room()
        if room is None:
            self._without_servers()
        else:
            self._empty_since_s = None
            just_sent = 0
            while (queued := self._queue.next()) is not None:
                if self._admissions[queued].done():  # cancelled, but its task has not run since
                    self._forget(queued)
                    continue
                place = self._placed(queued, room, just_sent) or self._overtaking(room, just_sent)
                if place is None:
                    break
                self._queue.serve(place.queued)
                just_sent += place.queued.num_tokens
                self._admissions.pop(place.queued).set_result(place)
            if not len(self._queue):
                self._grow(min(self.limits.max_in_flight, room.places))
        self._look_again()

    def _overtaking(self, room: Capacity, just_sent: int) -> Place | None:
        """Let in a request of the first waiting client that has less than its share; return its places, or
        None."""
        if min(self.limits.max_in_flight, room.places) < len(self._queue.clients):
            return None  # no client's share is as much as one place
        waiting = (queued for queued in self._queue.heads() if not self._admissions[queued].done())
        places = (self._placed_in_share(queued, room, just_sent) for queued in waiting)
        return next((place for place in places if place is not None), None)

    def _grow(self, places: int) -> None:
        """Give free places to requests with choices that have not begun, except places kept for new requests.
        To be called when no request waits."""
        for place in list(self._growing):
            count = min(place.num_left, places - places // RESERVED - self.num_in_flight)
            if count > 0:
                self._take(place.queued.client, count)
                place.grow(count)
            if not place.num_left:
                del self._growing[place]

    def _look_again(self) -> None:
        """Look at the servers again soon: room also appears when servers join, finish prompts, or end other
        routers' requests."""
        if (len(self._queue) or self._growing) and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._on_look)

    def _on_look(self) -> None:
        self._look = None
        self._let_in()

    # --- letting requests go -------------------------------------------------------------------------

    def leave(self, place: Place) -> None:
        """Give back the places of a request that has ended."""
        self.residence.left(time.monotonic() - place.since_s)
        self._queue.charge(place.queued, ANSWER_WEIGHT * place.num_answer_tokens)
        self._release(place)

    def _release(self, place: Place) -> None:
        self._growing.pop(place, None)
        self._give_back(place.queued.client, place.num_places)
        self.look()

    def _without_servers(self) -> None:
        """Give up the requests that have waited long enough for servers. :attr:`_admissions` has the oldest
        first."""
        now, hold_s = time.monotonic(), self.limits.hold_s if self._may_return() else 0.0
        if self._empty_since_s is None:
            self._empty_since_s = now
        while (queued := next(iter(self._admissions), None)) is not None:
            if now - max(queued.since_s, self._empty_since_s) < hold_s:
                return
            self._give_up(queued, self._problem())

    def _give_up(self, queued: QueuedRequest, error: OverloadedError | UnavailableError) -> None:
        admission = self._admissions[queued]
        self._forget(queued)
        if not admission.done():
            admission.set_exception(error)

    def _forget(self, queued: QueuedRequest) -> None:
        del self._admissions[queued]
        self._queue.remove(queued)

    @property
    def _is_full(self) -> bool:
        return len(self._queue) >= self.limits.max_queue

    def _overloaded(self) -> OverloadedError:
        retry_after_s = self.residence.retry_after_s(self._queue.num_places, self.num_in_flight)
        return OverloadedError(
            f"{self.num_in_flight} choices are in flight and {len(self._queue)} requests wait, the limit is "
            f"{self.limits.max_queue}: send the request again in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )
