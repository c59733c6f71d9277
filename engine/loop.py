"""The engine's thread: it runs events, computes steps and passes on their results. While there is nothing to
compute, it waits for an event."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable

from engine.device_faults import reported
from engine.engine import Engine
from engine.priority import LOOK_S, Pace, lower_priority
from engine.ranks.lead import LeadEngine
from engine.step_result import StepResult
from engine.watchdog import NoWatch, Watch, Watchdog
from kernels.gpu.current_device import use_device
from wire.errors import DeviceFaultError, GroupLostError

log = logging.getLogger(__name__)

Event = Callable[[], None]

REST_S = 1e-3
"""How long the thread waits before a step that only clears up. Otherwise this step would keep the
interpreter's lock, and other threads would send the last step's messages, or begin its transfers, after
it."""


class EngineLoop:
    """Runs an engine in one plain thread, the only thread that touches it.

    Other threads pass events to :meth:`post`; each event runs between two steps. ``on_step`` is called
    with every step's result on the engine's thread, and must not block. An exception that escapes from a step
    or an event is a fault of the device or a bug. ``on_fatal`` gets it, and the process is expected to end.

    ``on_fatal`` also gets a fault, on another thread, if a step or an event lasts longer than
    ``step_deadline_s``. 0: it may take any time.
    """

    def __init__(
        self,
        engine: Engine | LeadEngine,
        *,
        on_step: Callable[[StepResult], None],
        on_fatal: Callable[[BaseException], None],
        step_deadline_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_fatal = on_fatal
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine")
        self._turn_began_s: float | None = None
        """When the step or event that the thread runs began; None while the thread waits for an event."""
        self._wanted = engine.bursts.wanted
        self._pace = Pace()
        self._step_deadline_s = step_deadline_s
        self._watch: Watch = NoWatch()
        if step_deadline_s:
            self._watch = Watchdog(step_deadline_s, lambda: self._turn_began_s, self._give_up)

    def start(self) -> None:
        self._thread.start()
        self._watch.start()

    def post(self, event: Event) -> None:
        """Runs ``event`` on the engine's thread before its next step. Thread-safe, returns at once."""
        self._put(event)

    @property
    def turn_s(self) -> float:
        """For how long the step or event that the thread runs has lasted; 0 while the thread waits for an
        event. Other threads ask this."""
        began_s = self._turn_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the step in progress."""
        self._watch.stop()
        self._put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the engine's thread did not end within %s s", timeout_s)

    def _put(self, event: Event | None) -> None:
        self._events.put(event)
        self._wanted.set()

    def _run(self) -> None:
        try:
            use_device(self._engine.device)
            lower_priority(self._engine.config.niceness)
            idle, wait_s = True, None
            while self._handle_events(wait=idle, wait_s=wait_s):
                if self._pace.rests:
                    idle, wait_s = True, LOOK_S
                    continue
                self._turn_began_s = began_s = time.monotonic()
                result = self._engine.step()
                self._pace.stepped(began_s, result.outputs)
                idle, wait_s = result.did_nothing, result.wait_s
                if not idle or result.to_give_up:
                    self._on_step(result)
                if result.may_rest:
                    idle, wait_s = True, REST_S
        except GroupLostError as error:  # not a bug; the thread that noticed the loss has logged it
            self._on_fatal(error)
        except BaseException as error:
            self._on_fatal(reported(error, "the engine"))
        finally:
            self._turn_began_s = None

    def _handle_events(self, *, wait: bool, wait_s: float | None) -> bool:
        """Runs all queued events; with ``wait``, waits for at least one, but not longer than ``wait_s``.

        Returns False after :meth:`stop`.
        """
        while True:
            if wait:
                self._turn_began_s = None
            try:
                event = self._events.get(block=wait, timeout=wait_s)
            except queue.Empty:
                self._wanted.clear()
                if self._events.empty():  # whoever puts an event now sets the flag after that
                    return True
                continue
            if event is None:
                return False
            self._turn_began_s = time.monotonic()
            event()
            self._pace.hurry()
            wait = False

    def _give_up(self) -> None:
        """Reports that the thread does not come back. Called on the watchdog's thread."""
        fault = DeviceFaultError(
            f"a step has not ended within `step_deadline_s` {self._step_deadline_s:g}: the GPU hangs, or "
            "answers no call any more; the kernel's log may say why (Xid)"
        )
        log.critical("%s", fault.message)
        frame = sys._current_frames().get(self._thread.ident or 0)
        log.debug("the engine's thread stands at\n%s", "".join(traceback.format_stack(frame)))
        self._on_fatal(fault)
