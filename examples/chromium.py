"""Finds the machine's Chromium, so that Playwright downloads no browser of its own."""

from __future__ import annotations

import os
import shutil
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell")

MISSING = f"no Chromium in PATH ({', '.join(NAMES)}); on Debian: apt-get install chromium"


def find_chromium() -> str | None:
    """Returns the path of the first of :data:`NAMES` that is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def launch_options(path: str) -> dict[str, Any]:
    """Returns options for Playwright's ``chromium.launch``. They switch the sandbox off for root (the usual
    user in a container), because Chromium's sandbox does not start as root."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    return {"executable_path": path, "args": [*arguments, "--disable-dev-shm-usage"]}
