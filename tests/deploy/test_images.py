"""The container images and the compose file: linted, and true to what processes import and take."""

from __future__ import annotations

import importlib.util
import re
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


def router_requirements() -> ModuleType:
    spec = importlib.util.spec_from_file_location("router_requirements", DOCKER / "router_requirements.py")
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
    left_out = router_requirements().SERVERS_ALONE
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL_OF_A_ROUTER, *left_out], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


def test_what_the_routers_image_leaves_out_is_what_the_package_depends_on() -> None:
    module = router_requirements()
    with_all = PYPROJECT.read_text(encoding="utf-8")
    kept = module.router_requirements(PYPROJECT, "otel", "kubernetes")
    assert not any(one.startswith(tuple(module.SERVERS_ALONE)) for one in kept)
    for name in module.SERVERS_ALONE:
        assert f'"{name}>=' in with_all, f"{name} is no dependency any more"
    assert all(name in " ".join(kept) for name in ("opentelemetry-sdk", "kubernetes_asyncio"))


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
