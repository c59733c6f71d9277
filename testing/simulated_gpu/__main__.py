"""Runs engines on the simulated GPU under random schedules, and once without each wait.

    python -m testing.simulated_gpu [--steps 10000] [--json benchmarks/results/simulated_gpu.json]

Counts steps and the answers that differ from the CPU's, and says for every wait of the step path and of the
handoff what shows its removal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from testing.simulated_gpu.engines import SETTINGS, Simulated, asks_for
from testing.simulated_gpu.removed_waits import REMOVED_WAITS

MOST_SEEDS = 12


@dataclass(frozen=True)
class Schedules:
    """What random schedules of one setting have shown."""

    setting: str
    schedules: int
    steps: int
    differences: int
    waits: int


@dataclass(frozen=True)
class Removal:
    """What the removal of one wait has shown."""

    wait: str
    where: str
    found_with_seed: int | None
    found: str


def run_schedules(models: dict[str, Path], num_steps: int) -> Iterator[Schedules]:
    """Run each setting for its share of the steps, with another schedule every few requests."""
    for name, setting in SETTINGS.items():
        simulated = Simulated.make(setting, models[setting.model])
        seed = differences = 0
        while simulated.num_steps < num_steps / len(SETTINGS):
            differences += len(simulated.differences(asks_for(setting, 6, seed % 8), seed))
            seed += 1
        waits = sum(simulated.gpu.waits.values())
        yield Schedules(name, seed, simulated.num_steps, differences, waits)


def run_removals(model_dir: Path) -> Iterator[Removal]:
    """Remove one wait after the other; try schedules until one shows it."""
    for name, wait in REMOVED_WAITS.items():
        for seed in range(MOST_SEEDS):
            if found := wait.finds(model_dir, seed):
                yield Removal(name, wait.where, seed, found)
                break
        else:
            yield Removal(name, wait.where, None, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000, help="steps of all settings together")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "dense": make_checkpoint(Path(folder) / "dense", DENSE_WITH_MTP, seed=5),
            "moe": make_checkpoint(Path(folder) / "moe", MOE_WITH_MTP, seed=5),
        }
        results: dict[str, list[dict[str, object]]] = {"removed_waits": [], "schedules": []}
        for removal in run_removals(models["dense"]):
            results["removed_waits"].append(asdict(removal))
            print(removal, flush=True)
        for schedules in run_schedules(models, options.steps):
            results["schedules"].append(asdict(schedules))
            print(schedules, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
