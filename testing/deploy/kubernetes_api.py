"""A Kubernetes API server over real HTTP, limited to pods and the scales of Deployments.

    async with running_api() as api:
        api.create_pod("decode-0", role="decode", port=8200)
        api.kubeconfig(path)

It behaves as clients see a real API server: lists in pages of one version, watches that replay what came
after a version, bookmarks, 410 for versions that were compacted away, ``deletionTimestamp`` before the end,
label selectors that let an object leave a watch as DELETED, bearer tokens and refused verbs. It also fails
like a real one, when a test asks for that.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

NAMESPACE = "twinfang"
PODS = "/api/v1/namespaces/{namespace}/pods"
SCALE = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
TOKEN = "service-account-token"


@dataclass(frozen=True)
class Request:
    at_s: float
    verb: str
    path: str
    query: dict[str, str]


@dataclass(frozen=True)
class Change:
    """A pod before and after the change; None if it does not exist."""

    version: int
    before: dict[str, Any] | None
    now: dict[str, Any] | None


@dataclass(eq=False)
class Watch:
    selector: str
    news: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    transport: asyncio.Transport | None = None


class KubernetesApi:
    """Holds objects. Its methods do what users, controllers and kubelets do, and inject failures."""

    def __init__(self, *, bookmark_interval_s: float = 60.0) -> None:
        self.port = 0
        self.requests: list[Request] = []
        self.forbidden: set[str] = set()
        """Verbs that the token's role does not allow: list, watch, get, patch."""
        self.page_size: int | None = None
        """Maximum length of a page, also if the client's limit is higher. None: only the client's limit
        counts."""
        self.watch_answer: int | None = None
        """Status with which every watch is answered. None: a watch is answered with a stream."""
        self.gone_as_event = True
        """Whether a version that is too old is reported by an event in the stream, and not by the status."""
        self.is_silent = False
        """Simulates half-open connections: requests arrive but get no answer, and watches get no more
        events."""
        self.replicas: dict[str, int] = {}
        """Replicas of Deployments, by name."""
        self.scales_meanwhile: dict[str, int] = {}
        """A scale that somebody else sets once, between a client's read and its patch."""
        self._scale_versions: Counter[str] = Counter()
        self._bookmark_interval_s = bookmark_interval_s
        self._pods: dict[str, dict[str, Any]] = {}
        self._version = 1000
        self._compacted = 1000
        self._changes: list[Change] = []
        self._pages: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        self._watches: set[Watch] = set()
        self._runner: web.AppRunner | None = None

    # --- the process -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server. A later start uses the same port as the first."""
        app = web.Application()
        app.router.add_get(PODS, self._get_pods)
        app.router.add_route("GET", SCALE, self._get_scale)
        app.router.add_route("PATCH", SCALE, self._patch_scale)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections from now on and break existing ones. Forgets the events that watches replay."""
        if self._runner is not None:
            self.break_watches()
            await self._runner.cleanup()
            self._runner = None
            self.compact()

    def kubeconfig(self, path: Path) -> Path:
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "u", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return path

    # --- pods --------------------------------------------------------------------------------------

    def create_pod(
        self,
        name: str,
        *,
        role: str = "decode",
        port: int | str = 8200,
        ip: str | None = "127.0.0.1",
        ready: bool = True,
        model: str | None = None,
        labels: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        assert name not in self._pods, "a name is free once its pod is gone"
        own = {"twinfang.io/role": role, "twinfang.io/port": str(port)} | (labels or {})
        if model is not None:
            own["twinfang.io/model"] = model
        metadata = {
            "name": name,
            "namespace": NAMESPACE,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": f"2026-01-01T00:00:00.{self._version:09d}Z",
            "labels": own,
        }
        pod = {"metadata": metadata, "spec": {}, "status": _status(ready, ip)}
        return self._put(name, pod)

    def set_ready(self, name: str, ready: bool) -> None:
        pod = self._copy(name)
        pod["status"] = pod["status"] | _status(ready, pod["status"].get("podIP"))
        self._put(name, pod)

    def set_status(self, name: str, **status: Any) -> None:
        pod = self._copy(name)
        pod["status"] |= status
        self._put(name, pod)

    def set_label(self, name: str, label: str, value: str | None) -> None:
        pod = self._copy(name)
        pod["metadata"]["labels"] |= {label: value}
        if value is None:
            del pod["metadata"]["labels"][label]
        self._put(name, pod)

    def delete_pod(self, name: str) -> None:
        """Start the pod's grace period: it is still ready according to its kubelet."""
        pod = self._copy(name)
        pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 30}
        self._put(name, pod)

    def end_pod(self, name: str) -> None:
        """Remove the object, because its containers have ended."""
        self._put(name, None)

    @property
    def pod_names(self) -> list[str]:
        return list(self._pods)

    def pod(self, name: str) -> dict[str, Any]:
        return self._pods[name]

    def _copy(self, name: str) -> dict[str, Any]:
        return copy.deepcopy(self._pods[name])

    def _put(self, name: str, pod: dict[str, Any] | None) -> dict[str, Any]:
        self._version += 1
        before = self._pods.get(name)
        told = pod or copy.deepcopy(before)
        assert told is not None, f"there is no pod {name}"
        told["metadata"]["resourceVersion"] = str(self._version)
        if pod is None:
            del self._pods[name]
        else:
            self._pods[name] = pod
        change = Change(self._version, before, pod)
        self._changes.append(change)
        for watch in self._watches:
            line = _line_of(change, watch.selector, self._version)
            if line is not None:
                watch.news.put_nowait(line)
        return told

    # --- what goes wrong ---------------------------------------------------------------------------

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def compact(self) -> None:
        """Forget earlier versions: watches from them, and further pages, are answered 410."""
        self._version += 1
        self._compacted = self._version
        self._changes.clear()
        self._pages.clear()

    def break_watches(self) -> None:
        """Break all watches, like a load balancer that loses its connections."""
        for watch in self._watches:
            if watch.transport is not None:
                watch.transport.abort()

    def end_watches(self) -> None:
        """End all watches cleanly, as if their ``timeoutSeconds`` were over."""
        self.say(None)

    def say(self, data: bytes | None) -> None:
        """Send raw data to all watches; None ends them."""
        for watch in self._watches:
            watch.news.put_nowait(data)

    def say_gone(self) -> None:
        """Report an old version in the middle of a watch, as after a compaction."""
        self.say(_line("ERROR", _gone()))

    def say_bookmark(self) -> None:
        self.say(self._bookmark())

    def _bookmark(self) -> bytes:
        metadata = {"resourceVersion": str(self._version)}
        return _line("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": metadata})

    # --- requests ----------------------------------------------------------------------------------

    async def _get_pods(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if request.query.get("watch", "").lower() == "true" else "list"
        refused = await self._refused(request, verb)
        if refused is not None:
            return refused
        if verb == "list":
            return self._list(request)
        version = int(request.query["resourceVersion"])
        if self.watch_answer is not None:
            return _status_response(self.watch_answer, "Expired" if self.watch_answer == 410 else "Failed")
        if version < self._compacted and not self.gone_as_event:
            return _status_response(410, "Expired")
        return await self._watch(request, version)

    async def _refused(self, request: web.Request, verb: str) -> web.Response | None:
        self.requests.append(Request(time.monotonic(), verb, request.path, dict(request.query)))
        while self.is_silent:
            await asyncio.sleep(0.01)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status_response(401, "Unauthorized")
        if verb in self.forbidden or request.match_info["namespace"] != NAMESPACE:
            return _status_response(403, "Forbidden")
        return None

    def _list(self, request: web.Request) -> web.Response:
        token = request.query.get("continue")
        if token is None:
            selector = request.query.get("labelSelector", "")
            version = self._version
            items = [pod for pod in self._pods.values() if _matches(pod, selector)]
        elif token in self._pages:
            version, items = self._pages.pop(token)
        else:
            return _status_response(410, "Expired")
        limit = self.page_size or int(request.query.get("limit", 0)) or len(items)
        metadata = {"resourceVersion": str(version)}
        if items[limit:]:
            metadata["continue"] = uuid.uuid4().hex
            self._pages[metadata["continue"]] = (version, items[limit:])
        page = {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items[:limit]}
        return web.json_response(page)

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if version < self._compacted:
            await response.write(_line("ERROR", _gone()))
            return response
        watch = Watch(request.query.get("labelSelector", ""), transport=request.transport)
        for change in self._changes:
            line = _line_of(change, watch.selector, change.version) if change.version > version else None
            if line is not None:
                watch.news.put_nowait(line)
        self._watches.add(watch)
        ends_s = time.monotonic() + float(request.query["timeoutSeconds"])
        try:
            await self._tell(response, watch, ends_s)
        finally:
            self._watches.discard(watch)
        return response

    async def _tell(self, response: web.StreamResponse, watch: Watch, ends_s: float) -> None:
        while time.monotonic() < ends_s:
            wait_s = min(self._bookmark_interval_s, max(0.0, ends_s - time.monotonic()))
            try:
                data = await asyncio.wait_for(watch.news.get(), wait_s)
            except TimeoutError:
                data = self._bookmark()
            while self.is_silent:
                await asyncio.sleep(0.01)
            if data is None:
                return
            await response.write(data)

    async def _get_scale(self, request: web.Request) -> web.StreamResponse:
        return await self._refused(request, "get") or self._scale(request.match_info["name"])

    async def _patch_scale(self, request: web.Request) -> web.StreamResponse:
        refused = await self._refused(request, "patch")
        if refused is not None:
            return refused
        name, body = request.match_info["name"], await request.json()
        assert request.content_type == "application/merge-patch+json"
        if name in self.scales_meanwhile:
            self.replicas[name] = self.scales_meanwhile.pop(name)
            self._scale_versions[name] += 1
        seen = body.get("metadata", {}).get("resourceVersion")
        if seen is not None and seen != str(self._scale_versions[name]):
            return _status_response(409, "Conflict")
        if name in self.replicas:
            self.replicas[name] = body["spec"]["replicas"]
            self._scale_versions[name] += 1
        return self._scale(name)

    def _scale(self, name: str) -> web.Response:
        if name not in self.replicas:
            return _status_response(404, "NotFound")
        version = str(self._scale_versions[name])
        metadata = {"name": name, "namespace": NAMESPACE, "resourceVersion": version}
        scale = {"spec": {"replicas": self.replicas[name]}, "status": {"replicas": self.replicas[name]}}
        kind = {"kind": "Scale", "apiVersion": "autoscaling/v1"}
        return web.json_response(kind | {"metadata": metadata} | scale)


@asynccontextmanager
async def running_api(**settings: Any) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(**settings)
    await api.start()
    try:
        yield api
    finally:
        api.is_silent = False
        await api.stop()


@contextmanager
def api_in_thread() -> Iterator[tuple[KubernetesApi, Callable[..., Any]]]:
    """For tests without an event loop: ``do(api.create_pod, "a")`` calls the API in the thread of its
    loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kubernetes-api")
    thread.start()
    api = KubernetesApi()

    def do(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        async def make() -> Any:
            result = call(*arguments, **named)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(make(), loop).result(30)

    try:
        do(api.start)
        yield api, do
    finally:
        do(api.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _status(ready: bool, ip: str | None) -> dict[str, Any]:
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": str(ready)},
    ]
    found = {} if ip is None else {"podIP": ip, "podIPs": [{"ip": ip}]}
    return {"phase": "Pending" if ip is None else "Running", "conditions": conditions} | found


def _matches(pod: dict[str, Any] | None, selector: str) -> bool:
    labels = {} if pod is None else pod["metadata"]["labels"]
    for term in filter(None, selector.split(",")):
        key, _, value = term.replace("==", "=").partition("=")
        if key not in labels or ("=" in term and labels[key] != value):
            return False
    return pod is not None


def _line_of(change: Change, selector: str, version: int) -> bytes | None:
    """Return the line that a watch gets for a change; None if its selector does not match the pod."""
    was, is_now = _matches(change.before, selector), _matches(change.now, selector)
    if is_now:
        return _line("MODIFIED" if was else "ADDED", change.now)
    if not was:
        return None
    gone = copy.deepcopy(change.now or change.before)
    assert gone is not None
    gone["metadata"]["resourceVersion"] = str(version)
    return _line("DELETED", gone)


def _line(kind: str, told: Any) -> bytes:
    return json.dumps({"type": kind, "object": told}).encode() + b"\n"


def _gone() -> dict[str, Any]:
    return _status_object(410, "Expired")


def _status_object(code: int, reason: str) -> dict[str, Any]:
    kind = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return kind | {"message": f"{reason}, as a test wants it", "reason": reason, "code": code}


def _status_response(code: int, reason: str) -> web.Response:
    return web.json_response(_status_object(code, reason), status=code)
