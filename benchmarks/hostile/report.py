"""Results of trials in readable form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(trials: Sequence[dict[str, Any]]) -> str:
    """Returns Markdown: a line for each attack, with the baseline's figure before each arrow; then the goals
    that are not met."""
    lines = [
        "| attack | worst gap, s | tokens/s | tokens a core-second | TTFT at most, s | errors "
        "| /healthz, s | /v1/models, s | memory before, peak, after, MiB | goals |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for trial in trials:
        baseline, attacked = trial["baseline"], trial["attacked"]
        cells = [
            trial["attack"],
            *(f"{baseline[key]} → {attacked[key]}" for key in ("worst_gap_s", "tokens_per_s")),
            f"{_per_core_second(baseline)} → {_per_core_second(attacked)}",
            *(f"{baseline[key]} → {attacked[key]}" for key in ("ttft_max_s", "errors")),
            *(
                f"{baseline['probes_max_s'][path]} → {slowest}"
                for path, slowest in attacked["probes_max_s"].items()
            ),
            _memory(trial["memory_mib"]),
            "not met" if not_met([trial]) else "met",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    missed = not_met(trials)
    others = [one["cores"]["others"] for trial in trials for one in (trial["baseline"], trial["attacked"])]
    lines += ["", f"Others took {min(others):.2f} to {max(others):.2f} cores meanwhile."]
    lines += ["", "All goals are met." if not missed else "Goals not met:", *(f"* {line}" for line in missed)]
    return "\n".join(lines)


def _per_core_second(seen: dict[str, Any]) -> str:
    """Returns the victim's tokens per core second of the stack, which other processes' load hardly
    changes."""
    cores = seen["cores"]["stack"]
    return f"{seen['tokens_per_s'] / cores:.0f}" if cores else "none"


def _memory(memory: dict[str, dict[str, float]]) -> str:
    def sizes(name: str) -> str:
        stages = (memory[stage].get(name) for stage in ("before", "peak", "after"))
        return ", ".join("gone" if size is None else f"{size:.0f}" for size in stages)

    return "; ".join(f"{name} {sizes(name)}" for name in memory["before"])


def not_met(trials: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{trial['attack']}: {goal['goal']}: {goal['value']}, limit {goal['limit']}"
        for trial in trials
        for goal in trial["goals"]
        if not goal["met"]
    ]
