"""What images are made of: files by digest, a list of packages, and a wheel that is the same each time."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from testing.deploy.image_hashes import (
    BUILD_REQUIREMENTS,
    CONSTRAINTS,
    DOCKER,
    EXTRAS,
    HASHES,
    TORCH_DECIDES,
    pins,
)
from testing.repository import ROOT

DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
STAGES = dict(re.findall(r"(?ms)^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE))
IMAGES = ("router", "cpu", "cuda")
EPOCH = "1700000000"


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_hashed", DOCKER / "install_hashed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def required_by(requirements: list[str]) -> set[str]:
    """The names of all packages that these need here, with what those need in turn."""
    names: set[str] = set()
    waiting = [Requirement(one) for one in requirements]
    while waiting:
        one = waiting.pop()
        key = f"{canonicalize_name(one.name)}[{','.join(sorted(one.extras))}]"
        if key in names:
            continue
        names.add(key)
        for line in importlib.metadata.requires(one.name) or []:
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in one.extras or {""}]
            if needed.marker is None or any(needed.marker.evaluate(each) for each in environments):
                waiting.append(needed)
    return {key.partition("[")[0] for key in names}


def test_images_have_the_versions_that_are_tested() -> None:
    tested, listed = pins(text(CONSTRAINTS)), pins(text(HASHES))
    other = {name for name in listed.keys() & tested.keys() if listed[name] != tested[name]}
    assert other <= TORCH_DECIDES, "run `make hashes`"


def test_all_that_images_install_is_listed_with_digests_of_its_files(installer: ModuleType) -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    needed = list(project["dependencies"])
    for extra in EXTRAS:
        needed += project["optional-dependencies"][extra]
    needed += [line for line in text(BUILD_REQUIREMENTS).splitlines() if not line.startswith("#")]
    listed = installer.read_hashes(text(HASHES))
    assert dict(listed.keys()) == pins(text(HASHES))
    assert required_by(needed) <= {name for name, _ in listed}, "run `make hashes`"
    digests = [digest for files in listed.values() for digest in files]
    assert all(listed.values())
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in digests)


def test_a_package_that_is_not_listed_stops_the_build(installer: ModuleType) -> None:
    listed = {("six", "1.17.0"): ["sha256:00", "sha256:01"]}

    def planned(name: str, version: str) -> list[dict[str, Any]]:
        url = "https://index.example/file.whl"
        return [{"metadata": {"name": name, "version": version}, "download_info": {"url": url}}]

    line = "six==1.17.0 --hash=sha256:00 --hash=sha256:01\n"
    assert installer.hashed_lines(listed, planned("Six", "1.17.0")) == [line]
    for version in ("1.17.1", "1.17.0+evil"):
        with pytest.raises(LookupError, match=r"does not list six .*index\.example.*make hashes"):
            installer.hashed_lines(listed, planned("six", version))


def test_build_stages_install_nothing_but_what_is_listed_the_own_wheel_and_torch_of_a_given_index() -> None:
    joined = DOCKERFILE.replace("\\\n", " ")
    installs = re.findall(r"pip install [^&;]*", joined)
    assert [re.sub(r"\s+", " ", one).strip() for one in installs] == [
        "pip install --no-cache-dir --no-deps /wheels/*.whl",
        'pip install --no-cache-dir --no-deps -c constraints.txt --index-url "$TORCH_INDEX_URL" torch',
    ]
    assert "--no-build-isolation" in STAGES["package"], "or pip takes the newest setuptools"
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {
        "${PYTHON_IMAGE}",
        "${CUDA_IMAGE}",
        "package",
        "cuda-base",
    }


@pytest.mark.parametrize("image", IMAGES)
def test_each_image_runs_as_nobody_and_lists_its_packages(image: str) -> None:
    assert "\nUSER 10001:10001\n" in STAGES[image]
    (path,) = re.findall(r"^LABEL twinfang\.sbom=(\S+)$", STAGES[image], re.MULTILINE)
    building = STAGES[f"{image}-packages"]
    assert f"--output-file {path} /opt/twinfang/bin/python" in building
    assert building.index("uninstall --yes") < building.index("cyclonedx-py"), "list what is left"


def test_the_build_context_has_the_files_that_the_stages_use() -> None:
    kept = {line[1:] for line in text(ROOT / ".dockerignore").splitlines() if line.startswith("!")}
    for name in ("hashes.txt", "install_hashed.py", "build_requirements.txt"):
        assert f"deploy/docker/{name}" in kept
        assert name in DOCKERFILE


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty environment with pip."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def test_a_file_with_another_digest_is_not_installed(tmp_path: Path, environment: Path) -> None:
    wheel = tmp_path / "lonely-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lonely.py", "HERE = True\n")
        archive.writestr(
            "lonely-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: lonely\nVersion: 1.0\n"
        )
        archive.writestr("lonely-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("lonely-1.0.dist-info/RECORD", "")
    hashes = tmp_path / "hashes.txt"

    def install(digest: str) -> subprocess.CompletedProcess[str]:
        hashes.write_text(f"lonely==1.0 \\\n    --hash=sha256:{digest}\n")
        command = [sys.executable, DOCKER / "install_hashed.py", hashes, environment, "lonely"]
        links = {"PIP_FIND_LINKS": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
        return subprocess.run(command, env=links, capture_output=True, text=True, timeout=120)

    refused = install("0" * 64)
    assert refused.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in refused.stderr
    found = [environment, "-c", "import lonely"]
    assert subprocess.run(found, capture_output=True).returncode != 0
    accepted = install(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert accepted.returncode == 0, accepted.stderr
    assert subprocess.run(found).returncode == 0


@pytest.mark.exhaustive
def test_two_builds_of_the_wheel_are_the_same(tmp_path: Path) -> None:
    wheels = []
    for turn in ("first", "second"):
        source = tmp_path / turn
        shutil.copytree(ROOT, source, ignore=ignored, copy_function=shutil.copyfile)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
        command += ["--wheel-dir", str(tmp_path / f"{turn}-wheel"), str(source)]
        subprocess.run(command, env={"SOURCE_DATE_EPOCH": EPOCH, "PATH": "/usr/bin:/bin"}, check=True)
        wheels += (tmp_path / f"{turn}-wheel").glob("*.whl")
    first, second = (wheel.read_bytes() for wheel in wheels)
    assert first == second
    with zipfile.ZipFile(wheels[0]) as archive:
        assert "twinfang/__main__.py" in archive.namelist()


def ignored(folder: str, names: list[str]) -> set[str]:
    """Leaves out what images are not made of."""
    if Path(folder) != ROOT:
        return {name for name in names if name == "__pycache__"}
    kept = {line[1:] for line in text(ROOT / ".dockerignore").splitlines() if line.startswith("!")}
    return set(names) - kept


@pytest.mark.exhaustive
def test_the_list_of_packages_is_valid_complete_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for path in (first, second):
        (command,) = set(re.findall(r"cyclonedx-py (environment [^\\]*?) --pyproject", DOCKERFILE))
        wanted = [sys.executable, "-m", "cyclonedx_py", *command.split()]
        wanted += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(path), sys.executable]
        subprocess.run(wanted, env={"SOURCE_DATE_EPOCH": EPOCH}, check=True, timeout=250)
    assert first.read_bytes() == second.read_bytes()
    bom: dict[str, Any] = json.loads(text(first))
    validate(bom)
    assert (bom["bomFormat"], bom["metadata"]["component"]["name"]) == ("CycloneDX", "twinfang")
    listed = {canonicalize_name(one["name"]): one for one in bom["components"]}
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in pins(text(CONSTRAINTS)):
            assert listed[name]["version"] == distribution.version
            kind, _, purl = listed[name]["purl"].rpartition("/")
            assert kind == "pkg:pypi"
            purl_name, _, version = purl.partition("?")[0].partition("@")
            assert (canonicalize_name(purl_name), unquote(version)) == (name, distribution.version)
    required = next(
        one for one in bom["dependencies"] if one["ref"] == bom["metadata"]["component"]["bom-ref"]
    )
    assert any(one.lower().startswith("fastapi==") for one in required["dependsOn"])


def validate(bom: dict[str, Any]) -> None:
    """Compares with the schema of CycloneDX, as cyclonedx-python-lib carries it."""
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from cyclonedx.validation import make_schemabased_validator

    validator = make_schemabased_validator(OutputFormat.JSON, SchemaVersion.from_version(bom["specVersion"]))
    assert validator.validate_str(json.dumps(bom)) is None
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        assert validator.validate_str(json.dumps(bom | {"bomFormat": "other"})) is None
