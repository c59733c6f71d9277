"""Makes the images for the nodes as archives, with buildah and Debian's packages; no registry is asked.

    python -m testing.cluster.images FOLDER [WHEELS]

The images of routers and of servers come from deploy/docker/Dockerfile. WHEELS is a folder with PyTorch's
wheel for CPUs (``pip download torch`` from PyTorch's index of CPU builds). Without it, the image has the CUDA
build and is gigabytes larger.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from testing.cluster.machine import PAUSE_IMAGE
from testing.kubernetes.process import find_program
from testing.repository import ROOT

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
RELEASE = "bookworm"
TAG = "0.1.0"
NO_NEED = (
    "var/cache/apt/archives",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/locale",
    "usr/share/man",
)

Buildah = Callable[..., str]


def make(folder: Path, wheels: Path | None) -> None:
    """Makes all archives in ``folder``, which then also has what buildah stores. Some minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = [
        "--storage-driver",
        "overlay",
        "--root",
        str(folder / "storage"),
        "--runroot",
        str(folder / "run"),
    ]

    def buildah(*arguments: str) -> str:
        command = [find_program("buildah"), *stored, *arguments]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()

    _make_base(buildah, folder / "base")
    _save(buildah, "pause", folder, PAUSE_IMAGE)
    for target in ("router", "cpu"):
        name = f"twinfang-{target}"
        _build(buildah, target, folder / "pip.conf", wheels)
        _save(buildah, name, folder, f"docker.io/library/{name}:{TAG}")


def _make_base(buildah: Buildah, root: Path) -> None:
    """Makes an image with Python, and from it the image of the container that holds a pod's namespaces."""
    make = [
        find_program("debootstrap"),
        "--variant=minbase",
        f"--include={BASE_PACKAGES}",
        RELEASE,
        str(root),
    ]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    for path in NO_NEED:
        shutil.rmtree(root / path)
    base = buildah("from", "scratch")
    buildah("add", "--quiet", base, str(root), "/")
    buildah("config", "--env", "PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin", base)
    buildah("commit", "--quiet", base, "python-base")
    buildah("config", "--cmd", '["sleep", "infinity"]', base)
    buildah("commit", "--quiet", base, "pause")
    buildah("rm", base)
    shutil.rmtree(root)


def _build(buildah: Buildah, target: str, settings: Path, wheels: Path | None) -> None:
    mounts = ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
    lines = [
        "[global]",
        f"cert = {CERTIFICATES}",
    ]  # for a machine behind a proxy; elsewhere it changes nothing
    if wheels is not None:
        mounts += ["--volume", f"{wheels.resolve()}:/wheelhouse:ro"]
        lines.append("find-links = /wheelhouse")
        mounts += ["--build-arg", "TORCH_INDEX_URL=file:///wheelhouse"]  # no index, so pip takes the links
    settings.write_text("\n".join([*lines, ""]))
    command = ["bud", "--isolation", "chroot", "--layers=false", "--network", "host", *mounts]
    command += [
        "--secret",
        f"id=pip.conf,src={settings}",
        "--build-arg",
        "PYTHON_IMAGE=localhost/python-base",
    ]
    command += ["--target", target, "--tag", f"twinfang-{target}"]
    buildah(*command, "--file", str(ROOT / "deploy" / "docker" / "Dockerfile"), str(ROOT))


def _save(buildah: Buildah, image: str, folder: Path, name: str) -> None:
    """Writes an image to ``folder`` under ``name``. buildah does not write to an archive that is there."""
    archive = folder / f"{image}.tar"
    archive.unlink(missing_ok=True)
    buildah("push", f"localhost/{image}", f"docker-archive:{archive}:{name}")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    make(Path(arguments[0]).resolve(), *(map(Path, arguments[1:]) if arguments[1:] else [None]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
