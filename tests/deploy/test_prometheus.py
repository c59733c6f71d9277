"""Every rule and every panel on a real Prometheus that scrapes a real stack under load."""

import contextlib
import itertools
import math
import subprocess
import sys
import threading

import httpx
import pytest

from testing.conditions import TIMEOUT_S, wait_until
from testing.deploy.exported import is_of_gpus
from testing.deploy.expressions import defined, parse, selectors
from testing.deploy.observability import VARIABLES, queries, rules
from testing.deploy.prometheus import running_prometheus
from testing.fleets.stack import running_stack
from twinfang.stack.ports import LOOPBACK, free_ports

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

NUM_CLIENTS = 4
NUM_REQUESTS = 60
"""Answered before anything is looked at."""
JOBS = ("prefill", "decode", "router", "autoscale")


class Load:
    """Clients that ask all the time, with prompts that repeat themselves so that there are drafts."""

    def __init__(self, stack):
        self._url, self._model = stack.url, stack.model
        self._stopped = threading.Event()
        self._numbers = itertools.count()
        self.num_answered = 0
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error):
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self):
        with httpx.Client(base_url=self._url, timeout=120.0) as client:
            while not self._stopped.is_set():
                number = next(self._numbers)
                prompt = [7 + number % 5, *([11, 12, 13, 14] * (8 + 16 * (number % 4)))]
                body = {"model": self._model, "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
                with contextlib.suppress(httpx.TransportError):
                    client.post("/v1/completions", json=body | {"stream": number % 2 == 0})
                self.num_answered += 1


@pytest.fixture(scope="module")
def stack():
    flags = ("--prefill", "2", "--decode", "2", "--speculative", "2", "--drafter", "ngram", "--workers", "2")
    with running_stack("up", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def planner(stack, tmp_path_factory):
    """The address of a planner's metrics."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "twinfang", "autoscale", "--metrics-port", str(port)]
    for process in stack.processes().values():
        command += [f"--{process.name.partition('-')[0]}-metrics", process.metrics_url]
    with (tmp_path_factory.mktemp("planner") / "log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    yield f"{LOOPBACK}:{port}"
    running.terminate()
    running.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def prometheus(stack, planner, tmp_path_factory):
    targets = {job: [] for job in JOBS}
    targets["autoscale"].append(planner)
    for process in stack.processes().values():
        address = httpx.URL(process.metrics_url).netloc.decode()
        targets[process.name.partition("-")[0]].append(address)
    assert [len(targets[job]) for job in JOBS] == [2, 2, 1, 1]
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), targets) as running:
        wait_until(lambda: running.targets_up() == 6, "all processes are scraped", TIMEOUT_S)
        yield running


@pytest.fixture(scope="module")
def load(stack, prometheus):
    with Load(stack) as running:
        wait_until(lambda: running.num_answered >= NUM_REQUESTS, "requests are answered", 240.0)
        recorded = [rule.name for rule in rules() if not rule.is_alert]
        wait_until(
            lambda: all(prometheus.query(name) for name in recorded), "all rules are evaluated", TIMEOUT_S
        )
        yield running


@pytest.mark.usefixtures("load")
def test_every_rule_is_evaluated_without_an_error(prometheus):
    found = prometheus.rules()
    assert len(found) == len(rules())
    assert {(rule["health"], rule.get("lastError", "")) for rule in found} == {("ok", "")}


@pytest.mark.usefixtures("load")
def test_every_rule_has_data_quiet_or_not(prometheus):
    shown = [(rule.name, parse(rule.expr)) for rule in rules()]
    without = [
        name
        for name, expr in shown
        if not is_of_a_cluster(expr) and not has_number(prometheus.query(defined(expr)))
    ]
    assert not without


@pytest.mark.usefixtures("load")
def test_every_expression_of_every_panel_has_data(prometheus):
    missing = []
    for query in queries():
        expr = parse(query.expr, variables=VARIABLES | {"__rate_interval": "30s"})
        found = prometheus.query(expr.prettify())
        if not is_of_a_cluster(expr) and not has_number(found):
            missing.append((query.panel, query.legend, found))
    assert not missing


@pytest.mark.usefixtures("load")
def test_a_stack_that_is_well_raises_no_alert_but_of_a_slow_machine(prometheus):
    raised = {name for name, _ in prometheus.alerts()}
    assert raised <= {"TwinfangTtftBudgetBurns", "TwinfangTpotBudgetBurns"}


@pytest.mark.usefixtures("load")
def test_a_server_that_is_killed_raises_the_alert_of_a_restart(stack, prometheus):
    stack.kill("decode-1")
    wait_until(
        lambda: ("TwinfangProcessRestarted", "firing") in prometheus.alerts(), "the alert fires", 120.0
    )


def is_of_a_cluster(expr):
    """Whether it shows what there is not on one machine: the exporter of GPUs, pods that routers follow."""
    return any(
        is_of_gpus(selector) or selector.name.startswith("twinfang_discovery_")
        for selector in selectors(expr)
    )


def has_number(found):
    return any(not math.isnan(series.value) for series in found)
