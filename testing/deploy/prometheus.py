"""A real Prometheus that scrapes local processes, and queries to it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from testing.conditions import TIMEOUT_S, wait_until
from testing.deploy.observability import RULES_FILE, find_tool
from twinfang.stack.ports import LOOPBACK, free_ports

SCRAPE_INTERVAL_S = 1
STOP_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Series:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    client: httpx.Client

    def ask(self, path: str, **parameters: str) -> Any:
        answer = self.client.get(f"/api/v1/{path}", params=parameters)
        content = answer.json()
        assert content["status"] == "success", (path, parameters, content)
        return content["data"]

    def query(self, expr: str) -> list[Series]:
        data = self.ask("query", query=expr)
        assert data["resultType"] == "vector", expr
        return [Series(one["metric"], float(one["value"][1])) for one in data["result"]]

    def targets_up(self) -> int:
        return sum(target["health"] == "up" for target in self.ask("targets")["activeTargets"])

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def alerts(self) -> set[tuple[str, str]]:
        """Return name and state of the alerts that are pending or firing."""
        return {(one["labels"]["alertname"], one["state"]) for one in self.ask("alerts")["alerts"]}


@contextlib.contextmanager
def running_prometheus(folder: Path, targets: Mapping[str, list[str]]) -> Iterator[Prometheus]:
    """Run Prometheus, which scrapes ``targets`` (addresses by job) with the labels of docs/monitoring.md and
    evaluates our rules."""
    (port,) = free_ports(1)
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(_config(targets)), encoding="utf-8")
    command = [find_tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={LOOPBACK}:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://{LOOPBACK}:{port}", timeout=30.0) as client:
            wait_until(lambda: _is_ready(client, process, folder), "Prometheus is ready", TIMEOUT_S)
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(STOP_DEADLINE_S)


def _config(targets: Mapping[str, list[str]]) -> dict[str, Any]:
    labels = {"namespace": "test", "release": "test"}
    return {
        "global": {
            "scrape_interval": f"{SCRAPE_INTERVAL_S}s",
            "evaluation_interval": f"{SCRAPE_INTERVAL_S}s",
        },
        "rule_files": [str(RULES_FILE)],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {
                        "targets": addresses,
                        "labels": labels | ({"pool": "default"} if job in ("prefill", "decode") else {}),
                    }
                ],
            }
            for job, addresses in targets.items()
        ],
    }


def _is_ready(client: httpx.Client, process: subprocess.Popen[bytes], folder: Path) -> bool:
    assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
    with contextlib.suppress(httpx.TransportError):
        return client.get("/-/ready").status_code == 200
    return False
