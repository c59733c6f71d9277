"""One fleet for all tests of this folder, which is healed after each test, and a table of the results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from testing.conditions import wait_until
from testing.faults.exact_requests import Requests
from testing.faults.fleet import HOSTS, Fleet, running_fleet, running_fleet_in
from testing.faults.network import Network, NetworkUnavailableError, running_network
from testing.faults.reliability_table import Table
from testing.repository import DOCS

DOCUMENT = DOCS / "reliability.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table",
        action="store_true",
        help="write what the fault tests saw into docs/reliability.md (pytest tests/faults --write-table)",
    )
    parser.addoption(
        "--write-rows",
        action="store_true",
        help="the same for the tests that run now; rows of others stay as they are",
    )


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    rows = Table()
    yield rows
    if not request.session.testsfailed:
        if request.config.getoption("--write-table", default=False):
            rows.write(DOCUMENT)
        elif request.config.getoption("--write-rows", default=False):
            rows.with_rows_of(DOCUMENT).write(DOCUMENT)
    missing = rows.missing_from(DOCUMENT)
    assert not missing, f"docs/reliability.md is of another run; write it with --write-table: {missing}"


@pytest.fixture(scope="package")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(_running: Fleet) -> Iterator[Fleet]:
    """A fleet whose servers all run. After the test they all run again, and hold no memory of requests."""
    with healed(_running):
        yield _running


@contextlib.contextmanager
def healed(fleet: Fleet) -> Iterator[None]:
    """All servers run before and after the block; after it, they hold no memory of requests."""
    fleet.heal()
    sizes = {name: len(process.log) for name, process in fleet.servers.items()}
    try:
        yield
        fleet.heal()
        wait_until(fleet.is_idle, "all blocks and slots are back, and no lease is left")
    except BaseException as error:
        for name, process in fleet.servers.items():
            error.add_note(f"--- log of {name}\n{process.log[sizes[name] :][-4000:]}")
        raise


@pytest.fixture(scope="module")
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Hosts for all servers, if this machine allows network namespaces."""
    try:
        exits = contextlib.ExitStack()
        network = exits.enter_context(running_network(HOSTS))
    except NetworkUnavailableError as error:
        if request.config.getoption("--write-table", default=False):
            pytest.fail(f"the table would lack rows: {error}")
        pytest.skip(str(error))
    with exits:
        yield network


@pytest.fixture(scope="module")
def _running_in_network(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet_in(network, tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet_in_network(network: Network, _running_in_network: Fleet) -> Iterator[Fleet]:
    """Like ``fleet``, with all links repaired before and after the test."""
    with healed(_running_in_network):
        try:
            yield _running_in_network
        finally:
            network.heal()


@pytest.fixture
def requests(fleet: Fleet) -> Requests:
    return Requests(fleet)
