"""Reads the JSON files of a model folder that the router needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wire.errors import ModelLoadError


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """Return the object in ``path``. Empty if the file is missing and not required.

    Raises :class:`ModelLoadError` for a missing required file and for anything but a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ModelLoadError(f"{path} is missing: --model must name a folder that holds it") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value
