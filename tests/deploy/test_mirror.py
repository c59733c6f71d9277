"""`deploy/mirror.py` takes images to another registry with all platforms, and the chart names them there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.conditions import wait_until
from testing.deploy.helm import CHART, DEPLOY, EXAMPLES, helm_binary, pod_makers, pod_of, render
from twinfang.stack.ports import free_ports

MIRROR = DEPLOY / "mirror.py"
NAMES = ("twinfang-router:0.2.0", "twinfang-cuda:0.2.0")
PLATFORMS = ("amd64", "arm64")
REGISTRY_CONFIGURATION = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "{address}"}}
"""


def mirror(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    command = [sys.executable, str(MIRROR), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_the_chart_needs_no_images_but_those_that_are_taken() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    taken = {values["image"]["repository"], values["routerImage"]["repository"]}
    for example in (None, *EXAMPLES):
        for workload in pod_makers(render({}, *([example] if example else []))).values():
            pod = pod_of(workload)
            for container in (*pod.get("initContainers", []), *pod["containers"]):
                name = container["image"].rpartition("/")[2].partition(":")[0]
                assert name in {"twinfang-router", "twinfang-cuda", "twinfang-cpu"}
    assert taken == {"twinfang-router", "twinfang-cuda"}


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("r.example/busybox:1", "busybox:1: expected an image that is named twinfang-router, twinfang-cuda,"),
        ("r.example/twinfang-cuda@sha256:00", "give the tag; its digest is kept"),
    ],
)
def test_images_that_the_chart_does_not_name_are_refused(tmp_path: Path, image: str, said: str) -> None:
    ran = mirror("save", tmp_path, image)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_images_is_one_line(tmp_path: Path) -> None:
    ran = mirror("load", tmp_path, "registry.example")
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"mirror.py: error: {tmp_path} has no images: run `mirror.py save")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """The address of a registry without TLS, on loopback."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    configuration = tmp_path / "registry.yaml"
    configuration.write_text(REGISTRY_CONFIGURATION.format(folder=tmp_path / "registry", address=address))
    with subprocess.Popen(["docker-registry", "serve", configuration], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: process.poll() is not None or listens(port), "the registry listens")
            yield address
        finally:
            process.terminate()


def listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def put(layout: Path, content: bytes, kind: str, **fields: Any) -> dict[str, Any]:
    """Adds a blob to an OCI layout; returns its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / digest).write_bytes(content)
    return {
        "mediaType": f"application/vnd.oci.image.{kind}",
        "digest": f"sha256:{digest}",
        "size": len(content),
        **fields,
    }


def put_json(layout: Path, content: dict[str, Any], kind: str, **fields: Any) -> dict[str, Any]:
    return put(layout, json.dumps(content).encode(), kind, **fields)


def make_image(layout: Path, name: str) -> str:
    """Makes an image of two platforms, which has one empty layer; returns its digest."""
    manifests = []
    for platform in PLATFORMS:
        layer = put(layout, bytes(1024), "layer.v1.tar")
        rootfs = {"type": "layers", "diff_ids": [layer["digest"]]}
        configuration = {"architecture": platform, "os": "linux", "rootfs": rootfs, "config": {"User": name}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": put_json(layout, configuration, "config.v1+json"),
            "layers": [layer],
        }
        of = {"architecture": platform, "os": "linux"}
        manifests.append(put_json(layout, manifest, "manifest.v1+json", platform=of))
    kind = "application/vnd.oci.image.index.v1+json"
    both = {"schemaVersion": 2, "mediaType": kind, "manifests": manifests}
    described = put_json(layout, both, "index.v1+json")
    described["annotations"] = {"org.opencontainers.image.ref.name": name}
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    return str(described["digest"])


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not (shutil.which("skopeo") and shutil.which("docker-registry")),
    reason="takes skopeo and docker-registry",
)
def test_images_keep_platforms_and_digests_and_the_chart_names_them(tmp_path: Path, registry: str) -> None:
    configuration = tmp_path / ".config" / "containers"
    configuration.mkdir(parents=True)
    without_tls = f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n'
    (configuration / "registries.conf").write_text(without_tls)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "helm").symlink_to(helm_binary())
    variables = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    digests = {}
    for name in NAMES:
        layout = tmp_path / name.partition(":")[0]
        digests[name] = make_image(layout, name)
        source, target = f"oci:{layout}:{name}", f"docker://{registry}/built/{name}"
        command = ["skopeo", "copy", "--all", "--preserve-digests", source, target]
        subprocess.run(command, env=os.environ | variables, check=True, capture_output=True)
    folder = tmp_path / "carried"
    saved = mirror("save", folder, *(f"{registry}/built/{name}" for name in NAMES), **variables)
    assert saved.returncode == 0, saved.stderr
    loaded = mirror("load", folder, f"{registry}/site", **variables)
    assert loaded.returncode == 0, loaded.stderr
    (chart,) = folder.glob("twinfang-*.tgz")
    assert f"{chart} -f {folder}/values.yaml" in loaded.stdout
    workloads = pod_makers(render({}, folder / "values.yaml"))
    used = {container["image"] for one in workloads.values() for container in pod_of(one)["containers"]}
    assert used == {f"{registry}/site/{n.partition(':')[0]}@{digest}" for n, digest in digests.items()}
    for name in NAMES:
        raw = subprocess.run(
            ["skopeo", "inspect", "--raw", f"docker://{registry}/site/{name}"],
            env=os.environ | variables,
            capture_output=True,
            check=True,
        ).stdout
        assert [one["platform"]["architecture"] for one in json.loads(raw)["manifests"]] == [*PLATFORMS]
