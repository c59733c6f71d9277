"""Fixtures that the end-to-end tests share: stacks of real processes, and clients."""

from collections.abc import Iterator

import pytest

from testing.fleets.stack import module_stacks, pytest_runtest_makereport, stacks
from testing.fleets.tls_run import tls_run

__all__ = ["module_stacks", "pytest_runtest_makereport", "stacks"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--with-tls"):
        for item in items:
            if item.get_closest_marker("in_clear"):
                item.add_marker(pytest.mark.skip(reason="needs stacks without TLS"))


@pytest.fixture(scope="session", autouse=True)
def with_tls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """``--with-tls``: all stacks have mutual TLS, and nothing of ours may be seen in clear."""
    if not request.config.getoption("--with-tls"):
        yield
        return
    with tls_run(tmp_path_factory.mktemp("tls")):
        yield
