"""The Dockerfile's stages for routers, built by buildah on a base made of Debian's packages, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from testing.deploy.helm import DEPLOY
from testing.deploy.image_hashes import HASHES, pins

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
LONGEST_S = 1200

Buildah = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(LONGEST_S),
    pytest.mark.skipif(
        not (os.geteuid() == 0 and shutil.which("buildah") and shutil.which("debootstrap")),
        reason="takes root, buildah and debootstrap",
    ),
]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Without a daemon, namespaces or a union file system; what it stores goes with the test."""
    root = tmp_path_factory.mktemp("buildah")
    places = ("--storage-driver", "vfs", "--root", str(root / "root"), "--runroot", str(root / "run"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["buildah", *places, *arguments], capture_output=True, text=True, timeout=LONGEST_S
        )

    yield run
    run("rm", "--all")
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def router_image(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "stable", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    if made.returncode:
        pytest.skip(f"no base image can be made here: {made.stdout[-200:]}")
    base = buildah("from", "scratch").stdout.strip()
    assert buildah("add", "--quiet", base, str(folder), "/").returncode == 0
    buildah("config", "--env", "PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin", base)
    assert buildah("commit", "--quiet", base, "python-base").returncode == 0
    pip_settings = folder / "pip.conf"  # what a machine behind a proxy needs; elsewhere it changes nothing
    pip_settings.write_text(f"[global]\ncert = {CERTIFICATES}\n")
    built = buildah(
        *("bud", "--isolation", "chroot", "--layers=false", "--network", "host"),
        *("--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro", "--secret", f"id=pip.conf,src={pip_settings}"),
        *(
            "--build-arg",
            "PYTHON_IMAGE=localhost/python-base",
            "--target",
            "router",
            "--tag",
            "twinfang-router",
        ),
        *("--file", str(DEPLOY / "docker" / "Dockerfile"), str(DEPLOY.parent)),
    )
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return "localhost/twinfang-router"


def test_the_routers_image_runs_routers_as_nobody_and_has_no_torch(
    buildah: Buildah, router_image: str
) -> None:
    container = buildah("from", router_image).stdout.strip()

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return buildah("run", "--isolation", "chroot", container, "--", *command)

    assert run("id", "-u").stdout == "10001\n"
    assert run("twinfang", "router", "--help").returncode == 0
    assert "the package torch is not installed" in run("twinfang", "prefill").stderr
    assert run("twinfang", "router", "--kubernetes-namespace", "llm").stderr.startswith(
        "twinfang router: error: this is no pod with a service account's token"
    )
    packages = run("ls", *(f"/opt/twinfang/lib/{p}/site-packages" for p in python_of(run))).stdout.split()
    assert "fastapi" in packages
    assert not {"torch", "numba", "numpy", "nixl"} & set(packages)
    listed = json.loads(run("cat", "/opt/twinfang/share/sbom.cdx.json").stdout)
    assert listed["metadata"]["component"]["name"] == "twinfang"
    versions = {canonicalize_name(one["name"]): one["version"] for one in listed["components"]}
    assert versions.items() <= pins(HASHES.read_text(encoding="utf-8")).items()
    assert "fastapi" in versions


def python_of(run: Callable[..., subprocess.CompletedProcess[str]]) -> list[str]:
    """python3.11, or whichever the base image has."""
    return run("ls", "/opt/twinfang/lib").stdout.split()
