"""A Kubernetes API server with which Helm renders the chart as in an upgrade: ``lookup`` finds objects.

It answers what Helm asks for while it renders: the version, the kinds that exist, and single objects.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

from testing.deploy.helm import CHART, NAMESPACE, RELEASE, Manifest, run_helm

VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def render_upgrade(values: Manifest, running: list[Manifest]) -> list[Manifest]:
    """Render the chart for a cluster in which the objects ``running`` exist."""
    with _api(_answers(running)) as url:
        command = ["template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--is-upgrade"]
        command += ["--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url]
        text = run_helm(*command, "--values", "-", stdin=yaml.safe_dump(values))
    return [document for document in yaml.safe_load_all(text) if document]


def _answers(running: list[Manifest]) -> dict[str, Any]:
    """Return the content of each path: all kinds of ``running``, and the objects themselves."""
    kinds = {(one["apiVersion"], one["kind"]) for one in running}
    groups: list[dict[str, Any]] = []
    found: dict[str, Any] = {
        "/version": VERSION,
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": groups},
    }
    for version in sorted({version for version, _ in kinds}):
        resources = [
            {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
            for one, kind in kinds
            if one == version
        ]
        found[_root(version)] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": resources,
        }
        if "/" in version:
            group, _, number = version.partition("/")
            named = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [named], "preferredVersion": named})
    for one in running:
        plural, name = _plural(one["kind"]), one["metadata"]["name"]
        found[f"{_root(one['apiVersion'])}/namespaces/{NAMESPACE}/{plural}/{name}"] = one
    return found


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


@contextmanager
def _api(answers: dict[str, Any]) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = answers.get(self.path.partition("?")[0])
            body = json.dumps(NOT_FOUND if content is None else content).encode()
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
