"""The models that the systems serve: small ones with random weights, the same every time."""

from __future__ import annotations

from pathlib import Path

from testing.checkpoints import random_model
from testing.checkpoints.families import make_family_checkpoint

HYBRID, ATTENTION = "hybrid", "attention"
TITLES = {HYBRID: "NemotronH, 2 M parameters, random float32", ATTENTION: "Qwen3, 3 layers, random float32"}


def checkpoint(name: str, folder: Path) -> Path:
    """Returns the model's directory in ``folder``; writes it unless it is there."""
    if name == HYBRID:
        return random_model.checkpoint(random_model.SMALL, folder)
    directory = folder / name
    stamp = directory / "complete.txt"  # written last: a directory without it was cut short
    if not stamp.exists():
        make_family_checkpoint(directory, "qwen3")
        stamp.write_text("")
    return directory
