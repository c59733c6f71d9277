"""The models that contenders serve: two with random weights, and the bundled one, whose answers repeat
themselves where the prompt does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from testing.checkpoints import random_model
from testing.checkpoints.random_model import BenchmarkModel, num_parameters
from twinfang.flags.table import BUNDLED_MODEL

FIRST_TOKEN_ID = 5
"""Token ids below it are special."""


@dataclass(frozen=True)
class Model:
    """One model."""

    name: str
    """What ``--models`` calls it."""
    title: str
    directory: Callable[[Path], Path]
    """Returns its checkpoint, which it may write into the folder that it gets. The directory's name is the
    model's name for clients."""

    def about(self, folder: Path) -> dict[str, object]:
        return {"title": self.title, "parameters": num_parameters(self.directory(folder))}


def last_token_id(directory: Path) -> int:
    """Returns the last id of the vocabulary that ``config.json`` states."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"]) - 1


def _random(name: str, model: BenchmarkModel) -> Model:
    return Model(name, model.title, lambda folder: random_model.checkpoint(model, folder))


MODELS = {
    model.name: model
    for model in (
        *(_random(name, model) for name, model in random_model.MODELS.items()),
        Model("bundled", "bundled model", lambda folder: BUNDLED_MODEL),
    )
}
