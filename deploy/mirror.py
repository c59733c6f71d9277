#!/usr/bin/env python3
"""Takes images and chart to a site without Internet, and writes the values that name them there by digest.

    deploy/mirror.py save FOLDER REGISTRY/twinfang-router:0.2.0 REGISTRY/twinfang-cuda:0.2.0
    deploy/mirror.py load FOLDER registry.site.example/llm

The first command needs the registry where the images are, skopeo and helm. FOLDER then has all that the site
needs, except the model. The second command needs the site's registry and skopeo. Images keep their platforms
and digests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CHART = Path(__file__).parent / "helm" / "twinfang"
IMAGES = "images"
VALUES = "values.yaml"
REF_NAME = "org.opencontainers.image.ref.name"
VALUE_OF = {"twinfang-router": "routerImage", "twinfang-cuda": "image", "twinfang-cpu": "image"}
"""The chart's values, by the images' names."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes images and chart to a site without Internet.")
    commands = parser.add_subparsers(required=True)
    saving = commands.add_parser("save", help="copy images and chart into a folder")
    saving.add_argument("folder", type=Path)
    saving.add_argument("images", nargs="+", help="HOST[:PORT]/[PATH/]NAME[:TAG]")
    saving.set_defaults(run=lambda given: save(given.folder, given.images))
    loading = commands.add_parser("load", help="copy the images of a folder into a registry")
    loading.add_argument("folder", type=Path)
    loading.add_argument("registry", help="HOST[:PORT][/PATH]")
    loading.set_defaults(run=lambda given: load(given.folder, given.registry))
    given = parser.parse_args()
    try:
        given.run(given)
    except MirrorError as error:
        sys.exit(f"mirror.py: error: {error}")


class MirrorError(Exception):
    """What the operator gave does not do, or a program failed; the message is for people."""


def save(folder: Path, images: list[str]) -> None:
    """Copies each image with all its platforms, and packs the chart."""
    for image in images:
        _value_of(_name(image))
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        _copy(f"docker://{image}", f"oci:{folder / IMAGES}:{_name(image)}")
    _run("helm", "package", str(CHART), "--destination", str(folder))


def load(folder: Path, registry: str) -> None:
    """Copies the images into the registry, and writes values that name them there."""
    values: dict[str, dict[str, str]] = {}
    saved, charts = _saved(folder), [*folder.glob("twinfang-*.tgz")]
    if len(charts) != 1:
        raise MirrorError(f"{folder} has {len(charts)} charts: save each release into a folder of its own")
    for name, digest in saved.items():
        repository = f"{registry}/{name.partition(':')[0]}"
        value = _value_of(name)
        if value in values:
            raise MirrorError(
                f"{folder} has two images of servers, {values[value]['repository']} and {repository}: save "
                "twinfang-cuda and twinfang-cpu into folders of their own"
            )
        values[value] = {"repository": repository, "digest": digest}
    for name in saved:
        _copy(f"oci:{folder / IMAGES}:{name}", f"docker://{registry}/{name}")
    path = folder / VALUES
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    print(f"helm upgrade --install chat {charts[0]} -f {path} -f YOUR-VALUES.yaml")


def _saved(folder: Path) -> dict[str, str]:
    """Returns the digests of the saved images, by name."""
    try:
        index = json.loads((folder / IMAGES / "index.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MirrorError(f"{folder} has no images: run `mirror.py save {folder} IMAGE …` first") from None
    return {one["annotations"][REF_NAME]: one["digest"] for one in index["manifests"]}


def _value_of(name: str) -> str:
    value = VALUE_OF.get(name.partition(":")[0])
    if value is None:
        raise MirrorError(f"{name}: expected an image that is named {', '.join(VALUE_OF)}")
    return value


def _name(image: str) -> str:
    """Returns name and tag: twinfang-cuda:0.2.0. An image without a tag is the latest."""
    name = image.rpartition("/")[2]
    if "@" in name:
        raise MirrorError(f"{image}: give the tag; its digest is kept")
    return name if ":" in name else f"{name}:latest"


def _copy(source: str, target: str) -> None:
    _run("skopeo", "copy", "--all", "--preserve-digests", source, target)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise MirrorError(f"{command[0]} is not on PATH: install it") from None
    except subprocess.CalledProcessError as error:
        raise MirrorError(f"`{' '.join(command)}` ended with {error.returncode}") from None


if __name__ == "__main__":
    main()
