"""The chart's demo for CPUs in a namespace of a real API server."""

from __future__ import annotations

import hashlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from testing.conditions import until
from testing.deploy.helm import EXAMPLES
from testing.kubernetes.api import Manifest
from testing.kubernetes.node import Node
from testing.kubernetes.release import Release
from testing.kubernetes.router_pod import RouterPod
from testing.router.scripted_servers import Scripted, ScriptedDecode, ScriptedPrefill, saying, server_info

ADMIN_TOKEN = "an-administrator-of-the-router"


(CPU_DEMO,) = (path for path in EXAMPLES if path.stem == "cpu-demo")


DIGEST = hashlib.sha256(ADMIN_TOKEN.encode()).hexdigest()
VALUES: Manifest = {"auth": {"adminToken": {"digest": f"sha256:{DIGEST}"}}}
ROUTER_START_DEADLINE_S = 60.0


class Cloud:
    """The chart's demo for CPUs in a namespace, its router, and scripted servers that become pods."""

    def __init__(self, release: Release, node: Node, folder: Path, exits: AsyncExitStack) -> None:
        self.release = release
        self.node = node
        self._folder = folder
        self._exits = exits
        self.routers: list[RouterPod] = []

    def create(self, name: str, role: str = "decode", **pod: Any) -> Manifest:
        """Creates a pod of the chart's default pool, without a server in it."""
        return self.node.create(f"{self.release.prefix}-{role}-default", name, **pod)

    async def serve(self, pod: Manifest, role: str = "both") -> Any:
        """Starts a server at the pod's address, on the chart's port."""
        info = server_info(role, served_model_name="bundled_model", incarnation=pod["metadata"]["uid"])
        make, port = (ScriptedPrefill, 8100) if role == "prefill" else (ScriptedDecode, 8200)
        server: Scripted = make(info, port, pod["status"]["podIP"])
        if isinstance(server, ScriptedDecode):
            server.script = saying([300, 301])
        self._exits.push_async_callback(server.stop)
        await server.start()
        return server

    async def add(self, name: str, role: str = "both", **pod: Any) -> Any:
        """Creates a ready pod and the server in it. A server of both roles belongs to a decode pool."""
        server = await self.serve(
            self.create(name, "prefill" if role == "prefill" else "decode", **pod), role
        )
        self.node.set_ready(name, True)
        return server

    async def start_router(self, release: Release | None = None) -> RouterPod:
        """Starts a router. Returns once it answers, ready or not."""
        release = release or self.release
        name = f"router-{len(self.routers)}"
        node = Node(self.node.api, release.namespace)
        pod = node.create(f"{release.prefix}-router", name)
        router = RouterPod(node, release.server, pod, self._folder / name, ADMIN_TOKEN)
        self._exits.callback(router.process.stop)
        self.routers.append(router)
        router.process.start()
        await until(router.is_up, timeout_s=ROUTER_START_DEADLINE_S)
        return router
