"""The metrics that processes export: names, labels and their values, read from real registries.

The router is real: it serves HTTP, looks for pods and uses scripted servers. A server's page is the page that
a prefill or decode server shows, with invented values. ``tests/end_to_end/clients/test_telemetry.py`` tests
that running processes show the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args, get_type_hints

import httpx
import promql_parser as promql
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kv_transfer.leases.source import EndedLease
from kv_transfer.reads.failure_counts import FailureCounts
from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.config import ModelSource, PodDiscovery, RouterConfig
from telemetry.engine_metrics import Measures
from telemetry.identity_expiry import IdentityExpiry
from telemetry.server_telemetry import ServerTelemetry
from telemetry.start_up import StartUp
from testing.certificates import Authority
from testing.conditions import until
from testing.deploy.kubernetes_api import NAMESPACE, running_api
from testing.router.scripted_router import MODEL, running_router
from testing.router.scripted_servers import (
    ScriptedDecode,
    ScriptedPrefill,
    saying,
    server_info,
    server_stats,
)
from testing.router.tokenizers import write_model_dir
from twinfang.autoscale.metrics import AutoscaleFigures
from twinfang.autoscale.pool_planner import PoolSize
from twinfang.stack.ports import free_ports
from wire.server import GrpcServer
from wire.tls.identity import Identity

Page = Mapping[str, Mapping[str, frozenset[str]]]
"""Sample names → names of their labels → values of these labels."""

JOBS = ("router", "prefill", "decode", "autoscale")
TARGET_LABELS = frozenset({"job", "instance", "namespace", "release"})
"""Labels that scraping adds (docs/monitoring.md); ``pool`` only for servers."""
GPU_LABELS = frozenset(
    {"gpu", "Hostname", "namespace", "pod", "container"}
    | {f"exported_{name}" for name in ("namespace", "pod", "container")}
)
"""Labels of dcgm-exporter's metrics. Those of the pod that has the GPU begin with ``exported_`` unless its
scrape honors them."""
STATS = server_stats(
    drafted_by_position=(4, 4),
    accepted_by_position=(3, 1),
    transfer_failures=FailureCounts().counts(),
    leases_ended=dict.fromkeys(get_args(get_type_hints(EndedLease)["reason"]), 0),
)


async def exported_pages(folder: Path) -> dict[str, Page]:
    """Return the pages by job."""
    server = await _server_page()
    router, planner = await _router_page(folder), _planner_page()
    return {"router": router, "prefill": server, "decode": server, "autoscale": planner}


async def _router_page(folder: Path) -> Page:
    async with AsyncExitStack() as exits:
        prefill, decode = ScriptedPrefill(server_info("prefill")), ScriptedDecode(server_info("decode"))
        decode.script = saying([300, 301])
        for one in (prefill, decode):
            one.stats = STATS
            exits.push_async_callback(one.stop)
            await one.start()
        api = await exits.enter_async_context(running_api())
        key, authority = new_key(), Authority()
        (folder / "keys").write_text(key_line(ApiKey("alice", digest_of(key), role="view")), encoding="utf-8")
        config = RouterConfig(
            api_keys_file=folder / "keys",
            models=(ModelSource(MODEL, write_model_dir(folder / "model")),),
            prefill_addresses=(prefill.address,),
            decode_addresses=(decode.address,),
            pods=PodDiscovery(NAMESPACE, kubeconfig=api.kubeconfig(folder / "kubeconfig")),
            probe_interval_s=0.1,
            certificate=authority.write(folder),
        )
        url, app = await exits.enter_async_context(running_router(config))
        client = await exits.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=20.0, verify=authority.client())
        )
        pool = app.state.services.pool
        await until(lambda: all(known.stats == STATS for _, _, known in pool.assignments()))
        await until(lambda: pool.not_ready_reason() is None)
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
        headers = {"Authorization": f"Bearer {key}"}
        (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()
        return _page((await client.get("/metrics", headers=headers)).text + _identity_text())


def _planner_page() -> Page:
    figures = AutoscaleFigures()
    for role in ("prefill", "decode"):
        figures.decided(role, PoolSize(1, 1), 1)
    registry = CollectorRegistry()
    registry.register(figures)
    return _page(generate_latest(registry).decode() + _identity_text())


def _identity_text() -> str:
    """What every process shows with mutual TLS."""
    with TemporaryDirectory() as folder:
        identity = Identity(Authority().identity(Path(folder), "server"), "server")
    registry = CollectorRegistry()
    registry.register(IdentityExpiry(identity))
    return generate_latest(registry).decode()


async def _server_page() -> Page:
    server = GrpcServer("127.0.0.1", 0)
    (port,) = free_ports(1)
    telemetry = ServerTelemetry(server, host="127.0.0.1", port=server.port, metrics_port=port)

    async def stats():
        return STATS

    start_up = StartUp()
    start_up.ended("server")
    try:
        telemetry.show(server_info("decode"), stats, Measures(), start_up, lambda: None)
        async with httpx.AsyncClient(timeout=20.0) as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            return _page(text + _identity_text())
    finally:
        await telemetry.close()


def _page(text: str) -> Page:
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return {
        name: {label: frozenset(values) for label, values in labels.items()} for name, labels in found.items()
    }


class Exports:
    """The pages of all jobs, and the series that rules record from them: everything that expressions may
    select."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._recorded: dict[str, frozenset[str]] = {}

    def add_recorded(self, name: str, labels: frozenset[str]) -> None:
        self._recorded[name] = labels

    def labels_of(self, selector: promql.VectorSelector) -> frozenset[str]:
        """Return the labels. Raise :class:`LookupError` for a name, a label or a label value that no process
        exports."""
        matchers = {matcher.name: matcher for matcher in selector.matchers.matchers}
        where = selector.prettify()
        if is_of_gpus(selector):
            if unknown := sorted(matchers.keys() - GPU_LABELS):
                raise LookupError(f"{where}: dcgm-exporter gives no labels {unknown}")
            return GPU_LABELS
        if "job" not in matchers:
            raise LookupError(
                f"{where}: no job is named, and routers and servers use one name for one quantity"
            )
        if selector.name in self._recorded:
            allowed = self._recorded[selector.name] | TARGET_LABELS
            known: dict[str, frozenset[str]] = {}
        else:
            known = self._labels_on(selector.name, _jobs(matchers["job"], where), where)
            allowed = frozenset(known)
        for matcher in matchers.values():
            if matcher.name not in allowed:
                raise LookupError(f"{where}: it has no label {matcher.name}, only {sorted(allowed)}")
            values = known.get(matcher.name)
            if values and not any(_matches(matcher, value) for value in values):
                raise LookupError(f"{where}: {matcher.name} is one of {sorted(values)}")
        return allowed

    def _labels_on(self, name: str, jobs: list[str], where: str) -> dict[str, frozenset[str]]:
        """Return the labels, with their values if the processes define them."""
        labels: dict[str, frozenset[str]] = dict.fromkeys(TARGET_LABELS, frozenset())
        for job in jobs:
            if job in ("prefill", "decode"):
                labels["pool"] = frozenset()
            if name == "up":  # Prometheus' own
                continue
            if name not in self._pages[job]:
                raise LookupError(f"{where}: {job} exports no {name}")
            for label, values in self._pages[job][name].items():
                labels[label] = labels.get(label, frozenset()) | values
        return labels


def is_of_gpus(selector: promql.VectorSelector) -> bool:
    """Return whether the series are dcgm-exporter's, not ours."""
    return str(selector.name).startswith("DCGM_FI_")


def _jobs(matcher: promql.Matcher, where: str) -> list[str]:
    jobs = [job for job in JOBS if _matches(matcher, job)]
    if not jobs:
        raise LookupError(f"{where}: job is one of {JOBS}")
    return jobs


def _matches(matcher: promql.Matcher, value: str) -> bool:
    if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        is_same = matcher.value == value
    else:
        is_same = re.fullmatch(matcher.value, value) is not None
    return is_same == (matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re))
