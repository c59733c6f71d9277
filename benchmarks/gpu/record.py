"""The results of one call: a JSON file that is written anew after every stage.

| entry | holds |
|---|---|
| ``call``, ``commit``, ``source`` | which call, of which code; ``source`` is a hash of all Python files |
| ``device``, ``machine`` | the GPU, the host, versions |
| ``stages`` | by name: verdict, seconds, figures, and the end of the output |

Stages that were ``ok`` are not run again with the same source, GPU and versions. With others the file starts
anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.stage import Outcome, Stage
from benchmarks.json_file import read_json, write_json

OK_TAIL_CHARS = 600
"""Of the output of a stage that went well."""
SAME = ("name", "torch", "triton")
"""Facts of the device on which results depend."""


class Record:
    """The file of one call."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self._content = {**header, "stages": {}}
        before = read_json(path)
        if before is not None and _key(before) == _key(header):
            self._content["stages"] = before["stages"]

    def is_ok(self, stage: Stage) -> bool:
        """Whether the stage has gone well before."""
        return bool(self._content["stages"].get(stage.name, {}).get("verdict") == "ok")

    def verdict(self, stage: Stage) -> str:
        return str(self._content["stages"][stage.name]["verdict"])

    def add(self, stage: Stage, outcome: Outcome, figures: dict[str, Any] | None) -> None:
        """Enters a stage's results and writes the file. ``figures`` of a stage that was cut short are those
        that it had by then."""
        tail = outcome.tail if outcome.is_failure else outcome.tail[-OK_TAIL_CHARS:]
        self._content["stages"][stage.name] = {
            "purpose": stage.purpose,
            "verdict": outcome.verdict,
            "seconds": round(outcome.seconds, 1),
            "figures": figures,
            "output": tail.splitlines(),
        }
        write_json(self.path, self._content)


def _key(content: dict[str, Any]) -> tuple[object, ...]:
    """Returns what has to be equal for results to be kept."""
    device = content.get("device", {})
    return content.get("call"), content.get("source"), *(device.get(name) for name in SAME)
