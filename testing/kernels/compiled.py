"""Compiles Triton kernels without a GPU, in a separate process, because this process interprets them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def output_of(script: str, **constants: object) -> str:
    """Runs a script that compiles kernels and returns what it prints. The script sees the constants as
    globals. Raises if the script fails."""
    pytest.importorskip("triton")
    globals_of_script = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    result = subprocess.run(
        [sys.executable, "-c", globals_of_script + script],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout
