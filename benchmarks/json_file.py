"""Files of results. A file always holds a complete version, even if the process that writes it is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file; creates its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".unfinished")
    draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the content; None if the file is missing or is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
