"""One cluster for all tests of this folder, one release in it, and clients that ask it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from testing.cluster import cluster as clusters
from testing.cluster import machine, network
from testing.cluster.cgroups import NoCgroupsError, hierarchies
from testing.cluster.cluster import Cluster, ImagesMissingError, images_folder, running_cluster
from testing.cluster.load import Load, table
from testing.cluster.release import HelmRelease
from testing.fleets.fleet import START_DEADLINE_S
from testing.fleets.stack import Stack, start_stack
from testing.kubernetes.process import ProgramMissingError, find_program
from testing.kubernetes.release import Release

NAMESPACE = "llm"


def pytest_collection_modifyitems() -> None:
    """Before anything runs, one line where something is missing."""
    if not network.is_alone():
        raise pytest.UsageError("these tests need a network of their own: run them by make test-cluster")
    try:
        hierarchies()
        images_folder()
        for program in clusters.PROGRAMS + machine.PROGRAMS:
            find_program(program)
    except (ProgramMissingError, ImagesMissingError, NoCgroupsError) as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds to a failed test's report the pods and how the logs of the cluster's programs end."""
    report = yield
    if report.failed:
        given = getattr(item, "funcargs", {})
        if "release" in given:
            report.sections.append(("pods", given["release"].states()))
        if "cluster" in given:
            report.sections.extend(given["cluster"].logs())
    return report


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One server of both roles. It starts while the cluster does, so tests must wait until it is ready."""
    network.run_ip("link", "set", "lo", "up")
    flags = ("--cache-memory", "0.25", "--max-num-seqs", "16")
    stack = start_stack(tmp_path_factory.mktemp("alone"), "serve", *flags)
    yield stack
    if stack.supervisor.poll() is None:
        stack.stop()


@pytest.fixture(scope="session")
def cluster(alone: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), images_folder()) as running:
        yield running


@pytest.fixture(scope="session")
def release(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HelmRelease]:
    """A release that is not installed yet: the first test does."""
    folder: Path = tmp_path_factory.mktemp("release")
    with cluster.server.as_admin() as api:
        yield HelmRelease(Release(cluster.server, NAMESPACE, folder), api)


@pytest.fixture(scope="session")
def load(release: HelmRelease, alone: Stack) -> Iterator[Load]:
    """Clients of the release's Service. What they saw is printed at the end."""
    load = Load(release.service_url)
    alone.wait_until_ready(START_DEADLINE_S)
    load.learn(alone.url)
    alone.stop()
    yield load
    print("\n" + table(load.rows))
    print("kept back from this cluster:", ", ".join(sorted(release.kept_back)) or "nothing")
