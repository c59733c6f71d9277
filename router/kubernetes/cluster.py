"""The parts of the Kubernetes API that are used: lists and watches of pods, and the scales of Deployments.

kubernetes_asyncio takes care of credentials, certificates and addresses. This module reads the answers
itself, as plain JSON, because the library's model objects cost a hundred times as much. It does not use the
library's watch either: that watch can't tell a dead connection from one without changes, and does not say why
it ended (docs/decisions/020-pod-discovery.md).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from router.config import PodDiscovery
from router.kubernetes.cluster_error import ClusterError
from router.kubernetes.watch_lines import WatchEvent, WatchLines, status_error
from wire.errors import ConfigError

try:
    import aiohttp
    from kubernetes_asyncio import client, config
except ImportError as error:
    raise ConfigError(
        f"the Kubernetes API can't be used: {error.name} is not installed; pip install 'twinfang[kubernetes]'"
    ) from error

PAGE_SIZE = 500
MAX_STATUS_BYTES = 64 << 10
USER_AGENT = "twinfang"


@dataclass(frozen=True)
class Deadlines:
    """Time limits of calls. A call that takes longer has failed."""

    connect_s: float = 5.0
    answer_s: float = 30.0
    """For an answer to any call but a watch."""
    watch_s: float = 300.0
    """The API server is asked to end a watch after this time, so that all pods are listed again from time to
    time."""
    silent_s: float = 90.0
    """On a watch, the API server sends a bookmark once a minute (or up to 75 s apart). If not even bookmarks
    arrive, the connection is dead."""


@dataclass(frozen=True)
class PodList:
    pods: list[Mapping[str, Any]]
    resource_version: str
    """A watch from this version reports what happens after the list."""


class Cluster:
    """Calls to one API server."""

    def __init__(self, api: Any, deadlines: Deadlines) -> None:
        self._core = client.CoreV1Api(api)
        self._apps = client.AppsV1Api(api)
        self._deadlines = deadlines

    async def list_pods(self, pods: PodDiscovery) -> PodList:
        """Return all pods as they are now, listed in pages of one version. Raises :class:`ClusterError`."""
        found: list[Mapping[str, Any]] = []
        token: str | None = None
        while True:
            paging = {"limit": PAGE_SIZE} if token is None else {"limit": PAGE_SIZE, "_continue": token}
            page = await self._get_page(pods, paging)
            metadata, items = page.get("metadata"), page.get("items")
            if not isinstance(metadata, dict) or not isinstance(items or [], list):
                raise ClusterError("garbage", "the API server's list of pods is no list")
            found += [item for item in items or [] if isinstance(item, dict)]
            token = metadata.get("continue")
            if not token:
                return PodList(found, str(metadata.get("resourceVersion") or ""))

    async def _get_page(self, pods: PodDiscovery, paging: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._ask(
            f"GET pods of namespace {pods.namespace!r}",
            self._core.list_namespaced_pod,
            pods.namespace,
            label_selector=pods.selector,
            **paging,
        )

    async def read_scale(self, namespace: str, deployment: str) -> Mapping[str, Any]:
        """Return the scale of a Deployment. Raises :class:`ClusterError`."""
        read = self._apps.read_namespaced_deployment_scale
        return await self._ask(f"GET the scale of deployment {deployment!r}", read, deployment, namespace)

    async def patch_scale(
        self, namespace: str, deployment: str, change: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Change the scale of a Deployment and return the new one. Raises :class:`ClusterError`."""
        return await self._ask(
            f"PATCH the scale of deployment {deployment!r}",
            self._apps.patch_namespaced_deployment_scale,
            deployment,
            namespace,
            change,
            _content_type="application/merge-patch+json",
        )

    async def _ask(self, what: str, call: Any, *arguments: Any, **named: Any) -> Mapping[str, Any]:
        limits = self._deadlines
        timeout = aiohttp.ClientTimeout(total=limits.answer_s, sock_connect=limits.connect_s)
        with _told_as_cluster_error(f"{what} took longer than {limits.answer_s:g} s"):
            response = await call(*arguments, **named, _preload_content=False, _request_timeout=timeout)
            async with response:
                await _check_status(response, what)
                return _json_object(await response.read())

    async def watch_pods(
        self, pods: PodDiscovery, resource_version: str, watch_s: float
    ) -> AsyncGenerator[list[WatchEvent], None]:
        """Yield changes as they arrive; a list may be empty. Ends when the API server ends the watch without
        an error.

        Raises :class:`ClusterError`.
        """
        limits = self._deadlines
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s, sock_read=limits.silent_s)
        lines = WatchLines()
        with _told_as_cluster_error(
            f"nothing came on the watch for {limits.silent_s:g} s, not even a bookmark"
        ):
            response = await self._core.list_namespaced_pod(
                pods.namespace,
                label_selector=pods.selector,
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=resource_version,
                timeout_seconds=max(1, round(watch_s)),
                _preload_content=False,
                _request_timeout=timeout,
            )
            try:
                await _check_status(response, f"a watch of pods of namespace {pods.namespace!r}")
                async for data in response.content.iter_any():
                    yield lines.feed(data)
                lines.ended()
            finally:
                response.close()  # close, not release: the rest of a watch is never read


def require_service_account() -> None:
    """Check for a service account. Raises :class:`ConfigError` outside of a pod, and in a pod without the
    token of a service account."""
    try:
        config.load_incluster_config(client_configuration=client.Configuration())
    except config.ConfigException as error:
        raise ConfigError(
            f"this is no pod with a service account's token ({error}): give --kubeconfig FILE to reach the "
            "Kubernetes API from elsewhere, or let the pod have its token (automountServiceAccountToken)"
        ) from error


@asynccontextmanager
async def open_cluster(kubeconfig: Path | None, deadlines: Deadlines) -> AsyncIterator[Cluster]:
    """Connect to the API server with the files and tokens as they are now. Raises :class:`ClusterError` if
    they can't be used."""
    try:
        configuration = client.Configuration()
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(
                config_file=str(kubeconfig), client_configuration=configuration, persist_config=False
            )
        api = client.ApiClient(configuration)
    except Exception as error:  # the files, and the plugins that they name, may raise anything
        source = "the pod's service account" if kubeconfig is None else str(kubeconfig)
        said = f"{type(error).__name__}: {error}"
        raise ClusterError("config", f"{source} gives no access to an API server: {said}") from error
    api.user_agent = USER_AGENT
    async with api:
        yield Cluster(api, deadlines)


@contextmanager
def _told_as_cluster_error(late: str) -> Iterator[None]:
    """Turn connection errors into :class:`ClusterError`. ``late`` is the message for a deadline that has
    passed."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise ClusterError("unreachable", f"the API server can't be reached: {error}") from error
    except TimeoutError as error:
        raise ClusterError("silent", late) from error
    except aiohttp.ClientConnectorError as error:
        raise ClusterError("unreachable", f"the API server can't be reached: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        said = str(error) or type(error).__name__
        raise ClusterError("broken", f"the connection to the API server broke: {said}") from error


async def _check_status(response: Any, what: str) -> None:
    if response.status == 200:
        return
    try:
        body = _json_object(await response.content.read(MAX_STATUS_BYTES))
    except ClusterError:  # the answer may be from a proxy in between
        body = {}
    raise status_error(what, response.status, body)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ClusterError("garbage", f"the API server's answer is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ClusterError("garbage", "the API server's answer is no JSON object")
    return value
