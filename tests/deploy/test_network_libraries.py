"""The CUDA image has the libraries that NCCL and UCX look for, under the names that they look for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from testing.deploy.helm import DEPLOY
from twinfang.network.libraries import DRIVER, PACKAGES

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
IN_THE_IMAGE = {name: package for name, package in PACKAGES.items() if package != DRIVER}
LOAD_ALL = "import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]"
LONGEST_S = 600


def packages_of(stage: str) -> set[str]:
    """The packages that a stage of the Dockerfile installs."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    (commands,) = re.findall(rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    (named,) = re.findall(r"--no-install-recommends (.*?)&&", commands, re.DOTALL)
    return set(named.replace("\\", " ").split())


def test_the_cuda_image_installs_the_packages_of_all_libraries() -> None:
    assert packages_of("cuda-base") >= set(IN_THE_IMAGE.values())


@pytest.mark.exhaustive
@pytest.mark.timeout(LONGEST_S)
@pytest.mark.skipif(
    not (os.geteuid() == 0 and shutil.which("debootstrap")), reason="takes root and debootstrap"
)
def test_all_libraries_load_in_a_system_with_these_packages(tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)

    root = str(tmp_path)
    made = run("debootstrap", "--variant=minbase", "--include=python3", "stable", root)
    if made.returncode:
        pytest.skip(f"no system can be made here: {made.stdout[-200:]}")
    shutil.copy("/etc/resolv.conf", tmp_path / "etc")
    packages = sorted(set(IN_THE_IMAGE.values()))
    installed = run("chroot", root, "apt-get", "install", "--yes", "--no-install-recommends", *packages)
    assert installed.returncode == 0, installed.stderr
    loaded = run("chroot", root, "python3", "-c", LOAD_ALL, *IN_THE_IMAGE)
    assert (loaded.returncode, loaded.stderr) == (0, "")
