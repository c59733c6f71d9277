"""What the suite asks of a system under test. A hook for another system is a class with these methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Profile:
    """How a pair is started for a group of cases."""

    name: str
    model: str
    """A name of :mod:`conformance.models`."""
    drafts: bool
    """Whether n-gram drafts and prefix caching are on. Otherwise the pair has no drafts."""


class RunningPair(Protocol):
    """A pair that answers requests."""

    @property
    def url(self) -> str:
        """The endpoint's address, without ``/v1``."""

    @property
    def model(self) -> str:
        """The model's name for clients."""

    def pids(self, role: Role) -> Sequence[int]:
        """Returns the processes of this server. Faults strike all of them at once, as they would strike a
        container."""

    def num_handed_over(self) -> int:
        """Returns how many prompts are prefilled and wait for the decode server to take them over."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Lets the prefill server alone compute prompts, all at once, so that it uses memory that is free
        there."""

    def held(self) -> Mapping[str, int]:
        """Returns what the servers' own metrics say is in use, by server and kind; what only a prefix cache
        holds is free. Raises :class:`OSError` or :class:`ValueError` while a server does not answer."""

    def restart(self) -> None:
        """Ends both servers. Returns once new ones serve in their places."""

    def recover(self) -> None:
        """Returns once both servers serve again. Starts what does not restart by itself."""


class Pair(Protocol):
    """A system under test, before it is started."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str:
        """Name and version, for tables."""

    @property
    def lease_s(self) -> float:
        """Time for which a prefilled prompt is kept for a decode server that says nothing."""

    @property
    def without_drafts(self) -> Mapping[str, object]:
        """Fields of a request that switch drafts off for it; empty if there are none."""

    def about(self) -> Mapping[str, object]:
        """Returns versions, commands and settings: all that is needed to run the same by hand."""

    def monolith(self, profile: Profile, model: Path) -> AbstractContextManager[str]:
        """Runs the same engine as one server without drafts; yields its address."""

    def running(self, profile: Profile, model: Path, logs: Path) -> AbstractContextManager[RunningPair]:
        """Runs the pair, with logs in ``logs``."""
