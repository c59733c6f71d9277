"""The container images and the compose file: linted, and true to what processes import and take."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from testing.deploy.helm import DEPLOY
from twinfang.cli import _parser
from twinfang.flags.flag import resolve

DOCKER = DEPLOY / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
COMPOSE = DOCKER / "compose.yaml"
PYPROJECT = DEPLOY.parent / "pyproject.toml"
TOOLS = Path(sys.executable).parent

IMPORT_ALL_OF_A_ROUTER = """
import pkgutil, sys
for name in sys.argv[1:]:
    sys.modules[name] = None
import router, telemetry, wire, twinfang.stack.router_processes
import twinfang.commands.drain, twinfang.commands.api_key
import twinfang.autoscale.command, twinfang.autoscale.scale_target
for package in (router, telemetry, wire):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        __import__(module.name)
"""


def script(name: str) -> ModuleType:
    """One of the scripts that images are built with."""
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    ran = subprocess.run([TOOLS / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_the_compose_file_is_valid() -> None:
    command = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_a_router_runs_without_what_its_image_leaves_out() -> None:
    left_out = script("router_requirements").SERVERS_ALONE
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL_OF_A_ROUTER, *left_out], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


def test_what_the_routers_image_leaves_out_is_what_the_package_depends_on() -> None:
    module = script("router_requirements")
    with_all = PYPROJECT.read_text(encoding="utf-8")
    kept = module.router_requirements(PYPROJECT, "otel", "kubernetes", "redis", "s3")
    assert not any(one.startswith(tuple(module.SERVERS_ALONE)) for one in kept)
    for name in module.SERVERS_ALONE:
        assert f'"{name}>=' in with_all, f"{name} is no dependency any more"
    assert all(
        name in " ".join(kept) for name in ("opentelemetry-sdk", "kubernetes_asyncio", "redis", "botocore")
    )


def test_the_cuda_image_has_no_compiler_and_libraries_of_one_cuda() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    (major,) = re.findall(r"^ARG CUDA_IMAGE=nvidia/cuda:(\d+)\.", text, re.MULTILINE)
    (base,) = re.findall(r"^FROM \S+ AS cuda-base\n(.*?)^FROM ", text, re.MULTILINE | re.DOTALL)
    (final,) = re.findall(r"^FROM (\S+) AS cuda\n", text, re.MULTILINE)
    assert final == "cuda-base"
    assert not {"gcc", "libc6-dev", "python3-dev"} & set(base.split())
    (left_out,) = set(re.findall(r"uninstall --yes nixl-cu(\d+)", text))
    brought = {name for name in installed_names() if re.fullmatch(r"nixl-cu\d+", name)}
    assert brought == {f"nixl-cu{major}", f"nixl-cu{left_out}"}


def installed_names() -> set[str]:
    return {str(one.metadata["Name"]) for one in importlib.metadata.distributions()}


FIND_THE_LAUNCHER = """
from triton.backends.nvidia import driver
driver.CudaUtils()
print(driver.libcuda_dirs())
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="takes gcc")
def test_triton_starts_without_a_compiler_where_the_launcher_was_compiled(tmp_path: Path) -> None:
    libcuda, driver = tmp_path / "libcuda", tmp_path / "driver"
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_LIBCUDA_PATH": str(libcuda)}
    compile_it = [sys.executable, DOCKER / "triton_launcher.py"]
    ran = subprocess.run(compile_it, env=os.environ | cache, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert list(libcuda.iterdir()) == [], "nothing that a process would take for a driver"
    driver.mkdir()
    script("triton_launcher").make_driver(driver / "libcuda.so.1")
    if file := shutil.which("file"):  # it is part of the cache's key, by way of platform.architecture()
        (tmp_path / "file").symlink_to(file)
    without = cache | {"PATH": str(tmp_path), "LD_LIBRARY_PATH": str(driver)}
    found = [sys.executable, "-c", FIND_THE_LAUNCHER]
    started = subprocess.run(found, env=without, capture_output=True, text=True, timeout=120)
    assert (started.returncode, started.stdout) == (0, f"['{libcuda}']\n"), started.stderr
    assert sum(path.is_file() for path in (tmp_path / "cache").rglob("*.so")) == 1
    elsewhere = without | {"TRITON_CACHE_DIR": str(tmp_path / "other")}
    failed = subprocess.run(found, env=elsewhere, capture_output=True, text=True, timeout=120)
    assert "Failed to find C compiler" in failed.stderr


def test_all_images_are_built_together_and_those_without_cuda_for_two_platforms() -> None:
    text = (DOCKER / "docker-bake.hcl").read_text(encoding="utf-8")
    targets = dict(re.findall(r'^target "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL))
    built = {name for name, body in targets.items() if f'"{name}"\n' in body}
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE))
    assert built == {"router", "cpu", "cuda"} <= stages
    for name in ("router", "cpu"):
        assert '["linux/amd64", "linux/arm64"]' in targets[name]


def test_every_service_runs_a_command_that_twinfang_takes_in_an_image_that_is_built() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE))
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    assert set(services) == {"prefill", "decode", "router"}
    for service in services.values():
        assert service["build"]["target"] in targets
        given, unknown = _parser().parse_known_args(service["command"])
        assert unknown == []
        resolve(given.command.groups, given, {})


@pytest.mark.parametrize(("service", "port"), [("prefill", 18100), ("decode", 18200), ("router", 8000)])
def test_health_checks_ask_the_port_that_the_service_has(service: str, port: int) -> None:
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    check = services[service]["healthcheck"]["test"][-1]
    assert f"127.0.0.1:{port}/readyz" in check
    compile(check, service, "exec")
