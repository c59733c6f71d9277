"""One rank's end of all handoffs: NIXL's agent with both pools, and the thread that uses the agent."""

from __future__ import annotations

from collections.abc import Callable

from engine.memory.caches import Caches
from kernels.gpu.current_device import use_device
from kv_transfer.nixl.agent import TransferAgent, memory_of
from kv_transfer.nixl.poll_thread import PollThread
from wire.messages.handoff import RankMemory


class ThreadUser:
    """A part that lends or reads memory, as the transfer thread calls it. This base class does nothing."""

    def notified(self, sender: str, message: bytes) -> None:
        """Takes a peer's notification."""

    def poll(self) -> float | None:
        """Looks for what has happened. Returns the seconds until its next call; None: not before new work is
        posted."""
        return None

    def release(self) -> None:
        """Gives everything back to NIXL. The last call, made after the thread has ended."""


class TransferThread:
    """Registers the pools with NIXL once, for all users, and lets one thread use the agent.

    The users are made with this object. Each of them may use :attr:`agent` when it is made, before
    :meth:`start`; from then on only the transfer thread may, which is reached by :meth:`post`.
    """

    def __init__(self, caches: Caches, name: str, on_fatal: Callable[[BaseException], None]) -> None:
        """Registers the pools under the agent's ``name``. ``on_fatal`` gets a bug of the transfer thread."""
        use_device(caches.device)
        self._caches = caches
        self.agent = TransferAgent(name, [caches.kv, caches.state])
        self._thread = PollThread("transfer", caches.device, on_fatal)
        self._users: tuple[ThreadUser, ...] = ()

    @property
    def memory(self) -> RankMemory:
        """This rank's pools, as peers see them. Peers can read all that is registered by now."""
        return memory_of(self._caches, self.agent)

    def start(self, *users: ThreadUser) -> None:
        """Starts the thread, which calls ``users``."""
        self._users = users
        self._thread.start(self._poll)

    def post(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on the transfer thread, and returns at once. Thread-safe."""
        self._thread.post(work)

    def close(self) -> None:
        """Ends the thread and NIXL's agent. May be called from any other thread."""
        self._thread.stop()
        use_device(self._caches.device)
        for user in self._users:
            user.release()
        self.agent.close()

    def _poll(self) -> float | None:
        for sender, message in self.agent.poll():
            for user in self._users:
                user.notified(sender, message)
        delays_s = [user.poll() for user in self._users]
        return min((one for one in delays_s if one is not None), default=None)
