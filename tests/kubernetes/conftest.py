"""A control plane for all tests of this folder, and for each of them a namespace with the chart in it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml

from testing.autoscale.metrics_pages import pages
from testing.conditions import TIMEOUT_S, wait_until
from testing.deploy.leader_worker_sets import CRD
from testing.kubernetes.api import Api, Manifest
from testing.kubernetes.cloud import CPU_DEMO, VALUES, Cloud
from testing.kubernetes.control_plane import ControlPlane, running_control_plane
from testing.kubernetes.node import Node
from testing.kubernetes.process import PROGRAMS, ProgramMissingError, find_program
from testing.kubernetes.release import Release
from testing.kubernetes.schemas import Schemas

__all__ = ["pages"]

_numbers = itertools.count(1)


def pytest_collection_modifyitems() -> None:
    """Before anything runs, one line where a program is missing."""
    try:
        for program in PROGRAMS:
            find_program(program)
    except ProgramMissingError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds to a failed test's report how the logs of its routers and of the API server end."""
    report = yield
    if report.failed:
        given = getattr(item, "funcargs", {})
        for router in given["cloud"].routers if "cloud" in given else ():
            report.sections.append((f"log of {router.pod['metadata']['name']}", router.process.log_tail))
        if "plane" in given:
            report.sections.append(("log of kube-apiserver", given["plane"].first.process.log_tail))
    return report


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with running_control_plane(tmp_path_factory.mktemp("control-plane")) as running:
        with running.first.as_admin() as api:
            if api.has_custom_resources():
                define(api, yaml.safe_load(CRD.read_text(encoding="utf-8")))
        yield running


def define(api: Api, definition: Manifest) -> None:
    """Once it is, its kind is in the API's document of all schemas."""
    api.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    spec = definition["spec"]
    known = spec["group"], spec["versions"][0]["name"], spec["names"]["kind"]
    name = "/".join(known[:2]) + f" {known[2]}"
    wait_until(lambda: name in Schemas(api).kinds, f"{name} is defined", TIMEOUT_S, interval_s=0.1)


@pytest.fixture
def admin(plane: ControlPlane) -> Iterator[Api]:
    with plane.first.as_admin() as api:
        yield api


@pytest.fixture
def make_namespace(admin: Api) -> Callable[[], str]:
    """Nobody deletes them: there is no controller that would empty them."""

    def make() -> str:
        name = f"llm-{next(_numbers)}"
        admin.post(
            "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
        return name

    return make


@pytest.fixture
def release(plane: ControlPlane, make_namespace: Callable[[], str], tmp_path: Path) -> Release:
    """A namespace; nothing is installed there yet."""
    return Release(plane.first, make_namespace(), tmp_path)


@pytest.fixture
async def cloud(release: Release, admin: Api, tmp_path: Path) -> AsyncIterator[Cloud]:
    release.install(VALUES, CPU_DEMO)
    async with AsyncExitStack() as exits:
        yield Cloud(release, Node(admin, release.namespace), tmp_path, exits)
