"""Grammars that answers must follow. Separate processes, the lanes, compute what a grammar allows next.

Clients write grammars, and a short grammar can keep a processor busy for minutes and fill gigabytes. So no
grammar runs in the server's process. A follower is the server's record of one answer with a grammar. A lane
that only probes tries each new grammar first, to find out whether it is slow. Followers whose masks take
little time share a lane. A slow follower gets a lane of its own, at the lowest priority and with a budget of
processor time and memory, so that only its own request waits for its masks. If the follower needs more than
the budget, the request fails.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.grammar.follower import NOBODY, Asker, Follower
from engine.grammar.known_grammars import Known, KnownGrammars
from engine.grammar.lane import Lane, LaneEnd
from engine.grammar.lane_process import LaneSettings
from engine.grammar.lane_turns import LaneTurns, Used
from engine.grammar.messages import Followed, Job
from engine.grammar.patience import Patience
from engine.grammar.preamble import NoPreamble, ThinkingPreamble, free_mask
from engine.grammar.source import News
from wire.errors import GrammarError, ModelLoadError, OverloadedError, TwinfangError
from wire.messages.sampling_params import Thinking

log = logging.getLogger(__name__)

WAIT_S = 0.001
WAIT_EACH_S = 0.00025
"""A step waits up to ``WAIT_S`` for masks from shared lanes, and ``WAIT_EACH_S`` more for each missing mask,
because rows that miss the step would need another step. A step never waits for slow followers."""
MAX_WAITED_S = 20.0
"""Maximum time that an answer may wait for all its masks together, because meanwhile no other request can use
its row."""
SHARED_JOB_S = 0.25
MAX_JOB_S = 1.0
BASE_S = 2.0
PER_JOB_S = 0.02
"""Processor time of a slow follower: ``BASE_S``, and ``PER_JOB_S`` more for each mask. 20 ms for each mask on
average is 20 times what schemas of hundreds of fields take, with a vocabulary of 128,000 tokens."""
MAX_LANE_BYTES = 512 << 20
MAX_OWN_LANES = 16
MAX_WAITING = 48
"""Maximum number of slow followers that wait for a lane of their own. One client may have half of the lanes,
and half of the places to wait, that others leave. Any further follower is refused."""
MAX_CLIENTS = 1024
"""If more clients are remembered than this, those without answers are forgotten."""
CORES_PER_SHARED_LANE = 8
MAX_SHARED_LANES = 4


class Grammars:
    """The followers and lanes of one model on one server. May be called from any thread."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = model_dir / "tokenizer.json"
        self._eos_token_ids = tuple(eos_token_ids)
        self._shared_settings = LaneSettings(
            tokenizer=self._path,
            vocab_size=vocab_size,
            eos_token_ids=self._eos_token_ids,
            is_shared=True,
            is_probing=False,
            max_job_s=SHARED_JOB_S,
            base_s=0.0,
            per_job_s=0.0,
            max_bytes=MAX_LANE_BYTES,
        )
        self._own_settings = replace(
            self._shared_settings,
            is_shared=False,
            max_job_s=MAX_JOB_S,
            base_s=BASE_S,
            per_job_s=PER_JOB_S,
        )
        self._free = free_mask(self._shared_settings.num_words, self._eos_token_ids)
        self._probing_settings = replace(self._shared_settings, is_probing=True)
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._followers: dict[int, Follower] = {}
        self._known = KnownGrammars()
        self._prober: Lane | None = None
        self._shared: list[Lane] = []
        self._own: dict[int, Lane] = {}
        """Lanes of slow followers, by the key of the lane's only follower."""
        self._turns = LaneTurns()
        self._used: dict[str, Used] = {}
        """What each client has used of the lanes."""
        self._patience = Patience()
        self._waiting: deque[Follower] = deque()
        """Followers that wait for a lane of their own."""
        self._news: deque[tuple[Follower, bytes, TwinfangError | None]] = deque()
        """Masks and errors that :meth:`news` has not returned yet."""
        self._arrived = threading.Condition()
        self._on_news: Callable[[], None] = lambda: None
        self._has_closed = False

    def on_news(self, tell: Callable[[], None]) -> None:
        """``tell`` is called, on any thread, when masks have come that :meth:`news` has not returned yet."""
        self._on_news = tell

    # --- an answer's life ------------------------------------------------------------------------

    def follow(
        self,
        grammar: str,
        answer: Sequence[int] = (),
        thinking: Thinking | None = None,
        asker: Asker = NOBODY,
    ) -> Follower:
        """Begins to follow an answer. ``answer`` has the tokens that another server has already generated.

        With ``thinking``, the grammar begins behind it. The grammar is compiled now all the same, so that a
        wrong one is refused before the answer begins.

        Returns at once. :attr:`Follower.opened` is done when the first masks are there. Its exception is a
        :class:`GrammarError`, a :class:`ModelLoadError` if the model has no tokenizer for grammars, or an
        :class:`OverloadedError` if this server is too busy.
        """
        preamble = NoPreamble() if thinking is None else ThinkingPreamble(thinking, self._free)
        follower = Follower(next(self._keys), grammar, list(preamble.take(answer)), preamble, asker=asker)
        error = self._obstacle(follower)
        if error is not None:
            follower.begun(error)
            return follower
        with self._lock:
            self._followers[follower.key] = follower
            self._ask(follower, ())
        return follower

    def add(self, follower: Follower, request_id: str) -> None:
        """Makes :meth:`news` return the follower's masks, the first masks included. Call it when the engine
        has queued the request."""
        follower.request_id = request_id
        if follower.masks is not None:
            self._tell(follower, follower.masks.tobytes(), None)
            follower.masks = None

    def ask(self, follower: Follower, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Asks which tokens may come after ``token_ids``, the answer's new tokens, and after each draft."""
        follower.masks = None
        with self._lock:
            follower.answer += follower.preamble.take(token_ids)
            self._ask(follower, drafts)

    def drop(self, follower: Follower) -> None:
        """Drops the follower of an answer that has ended, or whose request never began."""
        with self._lock:
            follower.has_ended = True
            self._followers.pop(follower.key, None)
            if follower in self._waiting:
                self._waiting.remove(follower)
            self._leave(follower)

    def news(self, awaited: Sequence[Follower]) -> list[News]:
        """Returns the masks or errors that have come since the last call, each with its request's id.

        Waits a moment for the masks of ``awaited`` if they are likely to come soon.
        """
        quick = [follower for follower in awaited if follower.asked_s and not follower.needs_own_lane]
        if quick and self._patience.may_wait():
            wait_s = WAIT_S + len(quick) * WAIT_EACH_S
            with self._arrived:
                have_come = self._arrived.wait_for(lambda: not any(one.asked_s for one in quick), wait_s)
            self._patience.waited(have_come)
        news = []
        while self._news:
            follower, masks, error = self._news.popleft()
            if not follower.has_ended:
                news.append(News(follower.request_id, masks, error))
        return news

    def close(self) -> None:
        """Ends all processes."""
        with self._lock:
            self._has_closed = True
            lanes = [*self._shared, *self._own.values()]
            lanes += [] if self._prober is None else [self._prober]
            self._shared, self._own, self._prober = [], {}, None
        for lane in lanes:
            lane.end()
        self._turns.close()
        for lane in lanes:
            lane.join()

    def _obstacle(self, follower: Follower) -> TwinfangError | None:
        if not self._eos_token_ids:
            return ModelLoadError(
                "answers can't follow a grammar with this model: its config.json has no end-of-sequence token"
            )
        if not os.access(self._path, os.R_OK):
            return ModelLoadError(
                f"answers can't follow a grammar here: {self._path} can't be read; put the model's "
                "tokenizer.json there and restart this server"
            )
        known = self._known.get(follower)
        return None if known is None else known.error

    # --- lanes; callers hold the lock ------------------------------------------------------------

    def _ask(self, follower: Follower, drafts: Sequence[int]) -> None:
        behind = follower.preamble.ask(drafts)
        if behind is None and follower.opened.done():
            self._answer(follower, b"", None, is_lasting=False)
            return
        follower.asked_s = time.monotonic()
        follower.drafts = tuple(behind or ())
        lane = follower.lane
        if lane is not None and lane.settings.is_shared and follower.needs_own_lane:
            self._leave(follower)
        if follower.lane is None:
            self._enter(follower)
        else:
            self._put(follower)

    def _enter(self, follower: Follower) -> None:
        """Finds a lane for a follower that has none. The lane begins at the answer's start."""
        if self._has_closed:
            return
        known = self._known.get(follower)
        if known is not None and known.is_slow:
            follower.needs_own_lane = True
        if follower.needs_own_lane:
            if not self._may_have_lane(follower):
                self._wait(follower)
                return
            lane = self._own_lane(follower)
        elif known is None:
            lane = self._prober = self._prober or Lane(self._probing_settings, self)
        else:
            lane = self._shared_lane()
        lane.num_followers += 1
        follower.lane, follower.num_followed = lane, -1
        self._put(follower)

    def _wait(self, follower: Follower) -> None:
        """Lets a follower wait for a lane of its own, or refuses it.

        Only a few followers may wait, since no other request can use the rows of waiting requests.
        """
        client = follower.asker.client
        num_waiting = sum(one.asker.client == client for one in self._waiting)
        limit = (MAX_WAITING - len(self._waiting) + num_waiting) // 2
        if num_waiting < limit:
            self._waiting.append(follower)
            return
        error = OverloadedError(
            f"{num_waiting} answers of this client with grammars that are slow to follow wait on this "
            f"server, the limit is {limit}; make the grammar simpler or try again later",
            retry_after_s=1,
        )
        self._answer(follower, b"", error, is_lasting=False)

    def _may_have_lane(self, follower: Follower) -> bool:
        num_lanes = self._num_own(follower.asker.client)
        num_others = len(self._own) - num_lanes
        return num_lanes < (MAX_OWN_LANES - num_others + 1) // 2

    def _num_own(self, client: str) -> int:
        return sum(self._followers[key].asker.client == client for key in self._own if key in self._followers)

    def _own_lane(self, follower: Follower) -> Lane:
        if not self._own:
            for used in self._used.values():  # nobody waits for what others have used before
                used.seconds = 0.0
        lane = Lane(self._own_settings, self, self._turns, self._used_by(follower.asker.client))
        self._own[follower.key] = lane
        return lane

    def _used_by(self, client: str) -> Used:
        used = self._used.get(client)
        if used is None:
            if len(self._used) >= MAX_CLIENTS:
                present = {follower.asker.client for follower in self._followers.values()}
                self._used = {name: one for name, one in self._used.items() if name in present}
            used = self._used[client] = Used()
        return used

    def _shared_lane(self) -> Lane:
        """Returns the shared lane with the fewest followers; makes more lanes while there are cores for
        them."""
        most = min(max(1, (os.cpu_count() or 1) // CORES_PER_SHARED_LANE), MAX_SHARED_LANES)
        emptiest = min(self._shared, key=lambda lane: lane.num_followers, default=None)
        if emptiest is None or (emptiest.num_followers and len(self._shared) < most):
            emptiest = Lane(self._shared_settings, self)
            self._shared.append(emptiest)
        return emptiest

    def _put(self, follower: Follower) -> None:
        assert follower.lane is not None
        begins = follower.num_followed < 0
        token_ids = follower.answer[max(0, follower.num_followed) :]
        follower.num_followed = len(follower.answer)
        grammar = follower.grammar if begins else None
        job = Job(follower.key, grammar, tuple(token_ids), follower.drafts, follower.asker.salt)
        follower.lane.put(job, self._used_by(follower.asker.client))

    def _leave(self, follower: Follower) -> None:
        lane, follower.lane = follower.lane, None
        if lane is None:
            return
        lane.num_followers -= 1
        if not lane.settings.is_shared:
            del self._own[follower.key]
            lane.end()
            self._let_in()
        else:
            lane.drop(follower.key)

    def _let_in(self) -> None:
        """Gives free lanes to followers that wait for a lane of their own, first to those of clients with the
        fewest lanes."""
        while able := [one for one in self._waiting if self._may_have_lane(one)]:
            follower = min(able, key=lambda one: self._num_own(one.asker.client))
            self._waiting.remove(follower)
            self._enter(follower)

    # --- calls from lanes, on their threads ------------------------------------------------------

    def followed(self, lane: Lane, followed: Sequence[Followed]) -> None:
        with self._lock:
            for one in followed:
                follower = self._followers.get(one.key)
                if follower is not None and follower.lane is lane:
                    self._take(follower, one)

    def _take(self, follower: Follower, followed: Followed) -> None:
        if follower.lane is self._prober:
            self._known.remember(follower, Known(None, followed.is_slow))
            self._leave(follower)
            self._enter(follower)
            return
        follower.needs_own_lane |= followed.is_slow
        error: TwinfangError | None = None
        is_lasting = True
        waited_s = time.monotonic() - follower.asked_s
        follower.waited_s += waited_s
        if followed.error is not None:
            error = GrammarError(f"the grammar {followed.error}")
        elif follower.waited_s > MAX_WAITED_S:
            error, is_lasting = _too_busy(follower.waited_s), False
        self._answer(follower, followed.masks, error, is_lasting=is_lasting)

    def _answer(
        self, follower: Follower, masks: bytes, error: TwinfangError | None, *, is_lasting: bool
    ) -> None:
        """Passes on the masks or the error that a follower waits for."""
        if error is not None and is_lasting and not follower.answer:
            self._known.remember(follower, Known(error, True))
        if error is None:
            masks = follower.preamble.complete(masks)
        if follower.opened.done():
            with self._arrived:
                follower.asked_s = 0.0
                self._tell(follower, masks, error)
                self._arrived.notify()
            return
        follower.asked_s = 0.0
        if error is None:
            follower.masks = np.frombuffer(masks, dtype=np.int32)
        follower.begun(error)

    def _tell(self, follower: Follower, masks: bytes, error: TwinfangError | None) -> None:
        self._news.append((follower, masks, error))
        if len(self._news) == 1:  # else the engine was notified already and has not called `news` yet
            self._on_news()

    def may_end(self, lane: Lane) -> bool:
        with self._lock:
            if lane.num_followers or not lane.settings.is_shared:
                return False
            self._forget(lane)
            return True

    def _forget(self, lane: Lane) -> None:
        if lane in self._shared:
            self._shared.remove(lane)
        elif lane is self._prober:
            self._prober = None

    def ended(self, lane: Lane, end: LaneEnd, keys: Sequence[int]) -> None:
        """Moves the followers of a lane that has ended to other lanes, where they begin again.

        The follower that the lane worked on last gets a lane of its own. If it had one already, its request
        fails.
        """
        log.warning("a process that follows grammars has ended: %s", end.why)
        with self._lock:
            self._forget(lane)
            for follower in [one for one in self._followers.values() if one.lane is lane]:
                follower.lane = None
                if not lane.settings.is_shared:
                    self._own.pop(follower.key, None)
                    error = GrammarError(f"the grammar can't be followed: {end.why}; make it simpler")
                    self._answer(follower, b"", error, is_lasting=end.is_of_time)
                elif follower.asked_s:
                    follower.needs_own_lane |= follower.key in keys[:1]
                    self._enter(follower)
            self._let_in()

    def failed(self, lane: Lane, why: str) -> None:
        with self._lock:
            self._forget(lane)
            for follower in [one for one in self._followers.values() if one.lane is lane]:
                follower.lane = None
                follower.begun(
                    ModelLoadError(
                        f"answers can't follow a grammar with this model: {self._path} does not say what "
                        f"bytes its tokens stand for: {why}"
                    )
                )


def _too_busy(waited_s: float) -> OverloadedError:
    return OverloadedError(
        f"the answer waited {waited_s:.0f} s until its grammar's next tokens were known, the limit is "
        f"{MAX_WAITED_S:g} s: this server is too busy; make the grammar simpler or try again later",
        retry_after_s=1,
    )
