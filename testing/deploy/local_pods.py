"""Runs pods of rendered Deployments and LeaderWorkerSets as local processes, started and stopped as by a
kubelet.

Commands, probes and preStop hooks are the manifest's own. Two things differ from a cluster. A pod's network
is its own loopback address, which replaces 0.0.0.0 and 127.0.0.1 in the manifest. Its volumes are folders of
this machine, so that kernels are compiled only once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testing.conditions import until
from testing.deploy.helm import Manifest, container_of, pod_of
from testing.deploy.kubernetes_api import KubernetesApi
from testing.deploy.leader_worker_sets import pods_of

PROBE_INTERVAL_S = 0.2
"""The manifest's period is not used: it decides how soon a cluster notices, not whether things can go
wrong."""
PROBE_TIMEOUT_S = 30.0
"""The manifest's timeout is not used either: here, many pods share few cores."""
START_DEADLINE_S = 600.0
"""Many pods may start at once, and new routers become ready only with the servers of their release."""
SERVICE_LAG_S = 1.0
"""Time during which a Service still sends new connections to a pod that is being deleted."""


@dataclass(eq=False)
class Pod:
    """One process, and its object at the API server."""

    name: str
    ip: str
    deployment: Manifest
    process: asyncio.subprocess.Process
    log: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that LeaderWorkerSet adds to the manifest's."""
    is_ready: bool = False
    terminating_since_s: float | None = None
    """None while the pod is not deleted."""
    probing: asyncio.Task[None] | None = None

    @property
    def container(self) -> Manifest:
        return container_of(self.deployment)

    @property
    def takes_requests(self) -> bool:
        """Whether a Service sends new connections here."""
        since_s = self.terminating_since_s
        return self.is_ready and (since_s is None or time.monotonic() < since_s + SERVICE_LAG_S)

    def port(self, name: str) -> int:
        return next(int(port["containerPort"]) for port in self.container["ports"] if port["name"] == name)


@dataclass
class Node:
    """Runs pods, and reports them to the API server."""

    api: KubernetesApi
    folder: Path
    kubeconfig: Path
    volumes: dict[str, Path] = field(default_factory=dict)
    """Local folders in place of mounted volumes, by mount path."""
    programs: dict[str, str] = field(default_factory=dict)
    """Modules that run in place of ``twinfang``, by the tag of the image."""
    pods: list[Pod] = field(default_factory=list)
    num_started: int = 0
    failed_hooks: list[str] = field(default_factory=list)
    """What was wrong with preStop hooks. A kubelet goes on with SIGTERM, and so does this node."""

    def of(self, deployment: Manifest) -> list[Pod]:
        return [pod for pod in self.pods if pod.deployment is deployment]

    async def start(self, deployment: Manifest) -> Pod:
        """Start a pod and return it once it is ready."""
        name = f"{deployment['metadata']['name']}-{self.num_started + 1}"
        pod = await self._launch(name, deployment, {})
        await self._until_ready(pod)
        return pod

    async def start_all(self, deployments: Iterable[Manifest]) -> None:
        """Start all pods of the Deployments."""
        replicas = [one for one in deployments for _ in range(one["spec"]["replicas"])]
        await asyncio.gather(*map(self.start, replicas))

    async def start_group(self, group: Manifest) -> list[Pod]:
        """Start the first group of a LeaderWorkerSet, leader first, and return its pods once all are ready.
        The pods get their leader's IP, because there are no host names here."""
        leader_ip, pods = f"127.0.1.{self.num_started + 1}", []
        for name, template, variables in pods_of(group):
            maker = {**group, "spec": {"template": template}}
            pods.append(await self._launch(name, maker, variables | {"LWS_LEADER_ADDRESS": leader_ip}))
        for pod in pods:
            await self._until_ready(pod)
        return pods

    async def _launch(self, name: str, deployment: Manifest, variables: dict[str, str]) -> Pod:
        self.num_started += 1
        ip = f"127.0.1.{self.num_started}"
        log = self.folder / f"{name}.log"
        container = container_of(deployment)
        arguments = [self._mounted(_in_pod(argument, ip)) for argument in container["args"]]
        if arguments[0] == "router":
            arguments += ["--kubeconfig", str(self.kubeconfig)]  # instead of a mounted token
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._program(container), *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | _environment(container, ip) | variables,
            )
        pod = Pod(name, ip, deployment, process, log, variables)
        self.pods.append(pod)
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        role, port = labels.get("twinfang.io/role", ""), labels.get("twinfang.io/port", "")
        self.api.create_pod(name, role=role, port=port, ip=ip, ready=False, labels=labels)
        for label in {"twinfang.io/role", "twinfang.io/port"} - set(labels):
            self.api.set_label(name, label, None)
        return pod

    def _program(self, container: Manifest) -> str:
        return self.programs.get(str(container["image"]).rpartition(":")[2], "twinfang")

    def _mounted(self, argument: str) -> str:
        for path, folder in self.volumes.items():
            argument = argument.replace(f"={path}/", f"={folder}/")
        return argument

    async def gone(self, pod: Pod) -> None:
        """Wait until the pod has ended by itself, without an error."""
        code = await asyncio.wait_for(
            pod.process.wait(), float(pod_of(pod.deployment)["terminationGracePeriodSeconds"])
        )
        assert code == 0, f"{pod.name} ended with {code}: {_tail(pod)}"
        await self._forget(pod)

    async def stop(self, pod: Pod) -> None:
        """Stop a pod: announce the end, run preStop, send SIGTERM. Fails if the pod still runs after its
        grace period."""
        grace_s = float(pod_of(pod.deployment)["terminationGracePeriodSeconds"])
        began_s = time.monotonic()
        pod.terminating_since_s = began_s
        self.api.delete_pod(pod.name)
        await self._pre_stop(pod, grace_s)
        pod.process.terminate()
        try:
            await asyncio.wait_for(pod.process.wait(), grace_s - (time.monotonic() - began_s))
        except TimeoutError:
            pod.process.kill()
            raise AssertionError(f"{pod.name} was not gone after {grace_s:g} s: {_tail(pod)}") from None
        assert pod.process.returncode == 0, f"{pod.name} ended with {pod.process.returncode}: {_tail(pod)}"
        await self._forget(pod)

    async def roll_out(self, old: Manifest, new: Manifest, *, load_s: float = 0.0) -> None:
        """Replace the pods of a Deployment by those of its next version, as the next version's strategy says.

        ``maxSurge`` new pods start at a time. An old pod is deleted once a new one has been ready for
        ``minReadySeconds``, and the next new pod does not wait for its end. New pods take ``load_s`` longer
        to start than they would.
        """
        spec, outdated = new["spec"], self.of(old)
        strategy = spec["strategy"]["rollingUpdate"]
        assert strategy["maxUnavailable"] == 0
        surge = len(outdated) if strategy["maxSurge"] == "100%" else int(strategy["maxSurge"])

        async with asyncio.TaskGroup() as tasks:

            async def replace_one_by_one() -> None:
                while outdated:
                    leaving = outdated.pop()
                    await asyncio.sleep(load_s)
                    await self.start(new)
                    await asyncio.sleep(spec.get("minReadySeconds", 0))
                    tasks.create_task(self.stop(leaving))

            for _ in range(surge):
                tasks.create_task(replace_one_by_one())

    async def close(self) -> None:
        for pod in list(self.pods):
            if pod.process.returncode is None:
                pod.process.kill()
                await pod.process.wait()
            await self._forget(pod)

    async def _forget(self, pod: Pod) -> None:
        if pod.probing is not None:
            pod.probing.cancel()
            await asyncio.gather(pod.probing, return_exceptions=True)
        self.pods.remove(pod)
        self.api.end_pod(pod.name)

    async def _pre_stop(self, pod: Pod, grace_s: float) -> None:
        command = [_in_pod(word, pod.ip) for word in pod.container["lifecycle"]["preStop"]["exec"]["command"]]
        program = self._program(pod.container)
        if command[0] == "twinfang":
            command[:1] = [sys.executable, "-m", program]
        elif command[0] == "sh":
            command[-1] = command[-1].replace("exec twinfang", f"exec {quote(sys.executable)} -m {program}")
        with pod.log.open("ab") as output:
            hook = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, env=os.environ | pod.variables
            )
        code = await asyncio.wait_for(hook.wait(), grace_s)
        if code != 0:
            self.failed_hooks.append(f"preStop of {pod.name} ended with {code}: {_tail(pod)}")

    async def _until_ready(self, pod: Pod) -> None:
        async def is_ready() -> bool:
            assert pod.process.returncode is None, f"{pod.name} ended: {_tail(pod)}"
            return await _answers(pod)

        what = f"{pod.name} is ready; its log: {pod.log}"
        await until(is_ready, what, timeout_s=START_DEADLINE_S, interval_s=PROBE_INTERVAL_S)
        self._set_ready(pod, True)
        pod.probing = asyncio.create_task(self._keep_probing(pod))

    async def _keep_probing(self, pod: Pod) -> None:
        probe = pod.container.get("readinessProbe", {})
        num_failures = 0
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            num_failures = 0 if await _answers(pod) else num_failures + 1
            if num_failures in (0, probe.get("failureThreshold", 1)):
                self._set_ready(pod, num_failures == 0)

    def _set_ready(self, pod: Pod, is_ready: bool) -> None:
        if is_ready != pod.is_ready:
            pod.is_ready = is_ready
            self.api.set_ready(pod.name, is_ready)


def _in_pod(text: str, ip: str) -> str:
    return text.replace("$(POD_IP)", ip).replace("0.0.0.0", ip).replace("127.0.0.1", ip)


def _environment(container: Manifest, ip: str) -> dict[str, str]:
    """Return the container's variables. Those that name its volumes keep this machine's values."""
    told = {one["name"]: str(one["value"]) for one in container["env"] if "value" in one}
    return {name: _in_pod(value, ip) for name, value in told.items() if not value.startswith("/")}


async def _answers(pod: Pod) -> bool:
    """Return whether the readiness probe succeeds; without a probe, whether the process runs."""
    probe: dict[str, Any] | None = pod.container.get("readinessProbe")
    if probe is None:
        return pod.process.returncode is None
    if "grpc" in probe:
        return await _serves(f"{pod.ip}:{probe['grpc']['port']}")
    request = probe["httpGet"]
    return await _is_ok(f"http://{pod.ip}:{pod.port(request['port'])}{request['path']}")


async def _serves(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _is_ok(url: str) -> bool:
    async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S) as client:
        try:
            return (await client.get(url)).status_code == 200
        except httpx.HTTPError:
            return False


def _tail(pod: Pod) -> str:
    return "\n".join(pod.log.read_text(errors="replace").splitlines()[-30:])
