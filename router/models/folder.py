"""What the router reads from a model's folder."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from router.config import ModelSource
from router.models.chat_template import ChatTemplate
from router.models.json_files import read_json
from router.models.tokenizer import Tokenizer
from wire.errors import ModelLoadError
from wire.messages.sampling_params import CHECKPOINT_DEFAULTS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFolder:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: dict[str, float]
    """Sampling parameters from ``generation_config.json``."""

    @classmethod
    def read(cls, source: ModelSource) -> ModelFolder:
        """Read the folder. Raises :class:`ModelLoadError` if tokenizer, chat template or generation config
        can't be used."""
        defaults = sampling_defaults(source.directory)
        if defaults:
            log.info("sampling defaults of checkpoint %s: %s", source.name, defaults)
        return cls(
            Tokenizer.from_directory(source.directory),
            ChatTemplate.from_directory(source.directory),
            defaults,
        )


def sampling_defaults(model_dir: Path) -> dict[str, float]:
    """Return the values that ``generation_config.json`` sets for names in :data:`CHECKPOINT_DEFAULTS`. For
    the other names, OpenAI's defaults hold.

    Raises :class:`ModelLoadError` for a value that is not a number. ``do_sample`` is ignored: a client that
    wants greedy decoding asks for temperature 0.
    """
    path = model_dir / "generation_config.json"
    said = read_json(path, required=False)
    values = {name: said[name] for name in CHECKPOINT_DEFAULTS if said.get(name) is not None}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(f"{path}: {name} is {value!r}, expected a number")
    if "top_k" in values:
        values["top_k"] = max(0, int(values["top_k"]))
    return values
