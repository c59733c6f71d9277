"""What scalers see of servers that work, are idle, restart, and whose metrics have gaps or are lost.

promtool evaluates each query of the chart's ScaledObjects, and each rule of prometheus-adapter, on the same
series."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.deploy.helm import DEPLOY, NAMESPACE, RELEASE, of_kind, render
from testing.deploy.observability import promtool

ADAPTER = DEPLOY / "observability" / "prometheus-adapter.yaml"
EVAL_TIME = "10m"
"""All series are scraped every 15 seconds until then."""
POD = "one"
SCALING = {"enabled": True, "kind": "keda", "tokenSeconds": 0.04}
VALUES = {"poolDefaults": {"autoscaling": SCALING}, "keda": {"prometheusAddress": "http://prometheus:9090"}}


@dataclass(frozen=True)
class Case:
    name: str
    metric: str
    """The metric's name in the custom metrics API, and of the trigger."""
    role: str
    series: dict[str, str]
    """Values in promtool's notation, by name; the name may have further labels."""
    seen: float | None
    """The value, rounded to three digits. None: there is none, so the scaler leaves the pool as it is."""

    @property
    def labels(self) -> str:
        pool = "" if self.role == "router" else ',pool="default"'
        return f'namespace="{NAMESPACE}",service="{RELEASE}-twinfang-{self.role}"{pool}'

    @property
    def input_series(self) -> list[dict[str, str]]:
        found = []
        for name, values in self.series.items():
            name, _, more = name.rstrip("}").partition("{")
            pod = "" if "pod=" in more else f',pod="{POD}"'
            found.append(
                {"series": f"{name}{{{self.labels}{pod}{',' if more else ''}{more}}}", "values": values}
            )
        return found


WAIT, BUSY, TOKEN = (
    "twinfang_router_wait_seconds",
    "twinfang_busy_percent",
    "twinfang_inter_token_latency_seconds_mean",
)
ROWS, BLOCKS = "twinfang_rows_used_percent", "twinfang_kv_blocks_used_percent"
LET_IN, WAITED = "twinfang_request_queue_seconds_count", "twinfang_request_queue_seconds_sum"
QUEUED, PLACES, TAKEN = "twinfang_requests_queued", "twinfang_places", "twinfang_places_taken"
STEPS = 'twinfang_step_seconds_sum{kind="prefill"}'
TOKENS, TOKEN_TIMES = "twinfang_inter_token_latency_seconds_count", "twinfang_inter_token_latency_seconds_sum"

WAITING = {LET_IN: "0+15x40", WAITED: "0+7.5x40", QUEUED: "2x40", PLACES: "10x40", TAKEN: "5x40"}
IDLE = {LET_IN: "100x40", WAITED: "50x40", QUEUED: "0x40", PLACES: "10x40", TAKEN: "0x40"}
LOST = "x20 stale"
"""Stands behind a value: a target that Prometheus did not reach any more after five minutes."""
GAP = "0+15x32 _x3 540+15x4"
RESTART = "1000+15x36 15+15x3"

CASES = [
    Case("requests wait in routers", WAIT, "router", WAITING, 0.5),
    Case(
        "some scrapes failed", WAIT, "router", WAITING | {LET_IN: GAP, WAITED: "0+7.5x32 _x3 270+7.5x4"}, 0.5
    ),
    Case(
        "a router restarted", WAIT, "router", WAITING | {LET_IN: RESTART, WAITED: "500+7.5x36 7.5+7.5x3"}, 0.5
    ),
    Case("requests wait for decode servers", WAIT, "router", WAITING | {TAKEN: "9x40"}, 0),
    Case("no request is let in", WAIT, "router", IDLE | {QUEUED: "3x40"}, 120),
    Case("there are no requests", WAIT, "router", IDLE, 0),
    Case("a request waited a moment ago", WAIT, "router", IDLE | {QUEUED: "0x37 1 0x2"}, 0),
    Case("routers' metrics are lost", WAIT, "router", dict.fromkeys(WAITING, f"5{LOST}"), None),
    Case("routers never had metrics", WAIT, "router", {}, None),
    Case("steps run for 40 % of the time", BUSY, "prefill", {STEPS: "0+6x40"}, 40),
    Case("some scrapes failed", BUSY, "prefill", {STEPS: "0+6x32 _x3 216+6x4"}, 40),
    Case("a server restarted", BUSY, "prefill", {STEPS: "500+6x36 6+6x3"}, 40),
    Case("no step runs", BUSY, "prefill", {STEPS: "70x40"}, 0),
    Case("metrics are lost", BUSY, "prefill", {STEPS: f"70{LOST}"}, None),
    Case("rows are used", ROWS, "decode", {"twinfang_requests_running": "6x40", "twinfang_rows": "8x40"}, 75),
    Case(
        "metrics are lost",
        ROWS,
        "decode",
        {"twinfang_requests_running": f"6{LOST}", "twinfang_rows": f"8{LOST}"},
        None,
    ),
    Case(
        "blocks are used",
        BLOCKS,
        "decode",
        {"twinfang_kv_blocks_free": "20x40", "twinfang_kv_blocks": "100x40"},
        80,
    ),
    Case(
        "metrics are lost",
        BLOCKS,
        "decode",
        {"twinfang_kv_blocks_free": f"20{LOST}", "twinfang_kv_blocks": f"100{LOST}"},
        None,
    ),
    Case("tokens come", TOKEN, "decode", {TOKENS: "0+300x40", TOKEN_TIMES: "0+6x40"}, 0.02),
    Case(
        "a server restarted",
        TOKEN,
        "decode",
        {TOKENS: "9000+300x36 300+300x3", TOKEN_TIMES: "90+6x36 6+6x3"},
        0.02,
    ),
    Case("no token comes", TOKEN, "decode", {TOKENS: "9000x40", TOKEN_TIMES: "90x40"}, 0),
    Case("metrics are lost", TOKEN, "decode", {TOKENS: f"9000{LOST}", TOKEN_TIMES: f"90{LOST}"}, None),
]
A_PART_IS_LOST = Case(
    "one of two servers' metrics are lost",
    BUSY,
    "prefill",
    {STEPS: "0+12x40", 'twinfang_step_seconds_sum{kind="prefill",pod="two"}': f"0+3{LOST}"},
    80,
)
"""What is seen of a pool is the mean of the servers that can be seen, as if the others were like these."""


def test_keda_sees_what_servers_do_and_nothing_where_metrics_are_lost(tmp_path: Path) -> None:
    scalers = of_kind(render(VALUES), "ScaledObject").values()
    queries = {
        trigger["name"]: trigger["metadata"]["query"]
        for scaler in scalers
        for trigger in scaler["spec"]["triggers"]
    }
    cases = [*CASES, A_PART_IS_LOST]
    evaluate(tmp_path, ((case, queries[case.metric], "{}") for case in cases))
    assert {case.metric for case in cases if case.seen is None} == set(queries)


def of_models(**series: dict[str, str]) -> dict[str, str]:
    """Give series the label of their model."""
    return {
        f'{name}{{model="{model}"}}': values for model, own in series.items() for name, values in own.items()
    }


def test_of_several_models_the_requests_of_the_pool_s_own_count(tmp_path: Path) -> None:
    pools = {role: {"prefillPools": {role: {}}, "decodePools": {role: {}}} for role in ("one", "two")}
    source = {"volume": {"hostPath": {"path": "/models"}}}
    models = [{"name": name, "directory": name} | source | own for name, own in pools.items()]
    scalers = of_kind(render(VALUES | {"models": models}), "ScaledObject")
    series = of_models(one=WAITING, two=IDLE | {TAKEN: "10x40"})
    cases = [
        (Case(f"of {name}", WAIT, "router", series, seen), query, "{}")
        for name, seen in (("one", 0.5), ("two", 0))
        for trigger in scalers[f"prefill-{name}"]["spec"]["triggers"]
        if trigger["name"] == WAIT and (query := trigger["metadata"]["query"])
    ]
    assert len(cases) == len(models)
    evaluate(tmp_path, iter(cases))


def test_the_adapter_sees_the_same(tmp_path: Path) -> None:
    evaluate(tmp_path, asked_of_adapter())


def asked_of_adapter() -> Iterator[tuple[Case, str, str]]:
    rules = yaml.safe_load(ADAPTER.read_text(encoding="utf-8"))["rules"]["custom"]
    queries = {rule["name"]["as"]: rule["metricsQuery"] for rule in rules}
    for case in CASES:
        label, value = ("service", f"{RELEASE}-twinfang-router") if case.role == "router" else ("pod", POD)
        query = queries[case.metric].replace("<<.GroupBy>>", label)
        query = query.replace("<<.LabelMatchers>>", f'namespace="{NAMESPACE}",{label}=~"{value}"')
        yield case, query, f'{{{label}="{value}"}}'


def evaluate(folder: Path, asked: Iterator[tuple[Case, str, str]]) -> None:
    """Have promtool compare what each query sees with what is expected. ``asked`` has the result's labels
    last."""
    tests: list[dict[str, Any]] = []
    for case, query, labels in asked:
        samples = [] if case.seen is None else [{"labels": labels, "value": case.seen}]
        expected = {"expr": f"round({query}, 0.001)", "eval_time": EVAL_TIME, "exp_samples": samples}
        name = f"{case.metric}: {case.name}"
        tests.append(
            {
                "name": name,
                "interval": "15s",
                "input_series": case.input_series,
                "promql_expr_test": [expected],
            }
        )
    file = folder / "queries.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": tests}), encoding="utf-8")
    promtool("test", "rules", file)
