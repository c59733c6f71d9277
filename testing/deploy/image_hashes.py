"""Writes deploy/docker/hashes.txt: the packages of all images, with the digests of all their files.

    python -m testing.deploy.image_hashes      # `make hashes`

uv resolves what the images install, for all platforms, at the versions of constraints.txt, and asks its index
for the digests (``UV_DEFAULT_INDEX`` names another one). What the file lists already keeps its version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from testing.repository import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
DOCKER = ROOT / "deploy" / "docker"
HASHES = DOCKER / "hashes.txt"
BUILD_REQUIREMENTS = DOCKER / "build_requirements.txt"
EXTRAS = ("otel", "kubernetes", "redis", "s3")
"""Of pyproject.toml, all that any image has."""
TORCH_DECIDES = {"triton"}
"""The public build of torch, for CUDA, names one exact version, and images have it. constraints.txt has a
newer one beside torch for CPUs, which names none."""
HEADER = "# Made by `make hashes` from constraints.txt and pyproject.toml; read by install_hashed.py.\n"


def pins(text: str) -> dict[str, str]:
    """Returns versions by names of packages, as PEP 503 writes names."""
    found = re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s;\\]+)", text)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def compile_hashes() -> None:
    """Writes HASHES anew."""
    constraints = CONSTRAINTS.read_text(encoding="utf-8").splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        bounds = Path(folder) / "constraints.txt"
        bounds.write_text("".join(one for one in constraints if one.partition("==")[0] not in TORCH_DECIDES))
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
        command += ["--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header"]
        command += [
            "--constraints",
            str(bounds),
            "pyproject.toml",
            str(BUILD_REQUIREMENTS),
            "--output-file",
            str(HASHES),
        ]
        for extra in EXTRAS:
            command += ["--extra", extra]
        subprocess.run(command, cwd=ROOT, check=True)
    HASHES.write_text(HEADER + HASHES.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    compile_hashes()
