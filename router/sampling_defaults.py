"""Sampling parameters that a checkpoint recommends, for requests that do not name their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from router.model_files import read_json
from wire.errors import ModelLoadError


@dataclass(frozen=True)
class SamplingDefaults:
    """OpenAI's defaults, replaced by what ``generation_config.json`` says."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_directory(cls, model_dir: Path) -> SamplingDefaults:
        """Raises :class:`ModelLoadError` for a value that is no number. ``do_sample`` is not looked at:
        whoever wants greedy decoding says temperature 0."""
        path = model_dir / "generation_config.json"
        said = read_json(path, required=False)
        values = {name: said[name] for name in cls.__dataclass_fields__ if said.get(name) is not None}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ModelLoadError(f"{path}: {name} is {value!r}, expected a number")
        if "top_k" in values:
            values["top_k"] = max(0, int(values["top_k"]))
        return cls(**values)
