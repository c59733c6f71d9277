"""What has been measured so far, in a file: a run that was killed goes on where it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.json_file import read_json, write_json
from benchmarks.side_by_side.plan import Point, Visit


class BusyError(Exception):
    """Another run uses the folder."""


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Keeps other runs out of the folder. Two at once would measure each other, and each would write only its
    own figures. Raises :class:`BusyError`."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"another run measures in {folder}: wait until it has ended") from None
        yield


@dataclass
class Progress:
    """Measurements of one state of the code, with the same versions of others and the same settings.

    Another state has a file of its own. Which models, contenders, loads and rounds a run is about does not
    matter: what an earlier run measured is not measured again.
    """

    file: Path
    key: Mapping[str, Any]
    measurements: list[dict[str, Any]] = field(default_factory=list)
    starts_s: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)
    """Texts by model and by the title of who gave them."""
    seconds: float = 0.0
    """Time of all runs together."""

    @classmethod
    def kept_in(cls, folder: Path, key: Mapping[str, Any]) -> Progress:
        """Reads what earlier runs with the same key have left in the folder."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
        file = folder / f"progress-{digest}.json"
        content = read_json(file) or {}
        stored = {
            name: content[name] for name in ("measurements", "starts_s", "answers", "seconds") if content
        }
        return cls(file, key, **stored)

    def forget(self) -> None:
        """Begins anew."""
        self.measurements, self.starts_s, self.answers, self.seconds = [], [], {}, 0.0

    def left(self, visit: Visit) -> tuple[Point, ...]:
        """Returns what is not measured yet."""
        done = {
            (one["load"], one["at"])
            for one in self.measurements
            if (one["model"], one["arrangement"], one["round"]) == (visit.model, visit.contender, visit.round)
        }
        return tuple(point for point in visit.points if (point.load.name, point.at) not in done)

    def write(self) -> None:
        """Replaces the file: it always holds whole measurements."""
        content = {name: value for name, value in vars(self).items() if name != "file"}
        write_json(self.file, content)
