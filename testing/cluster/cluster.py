"""A cluster: etcd, API server, controllers and scheduler, a name server, and two nodes with containers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from testing.cluster import network
from testing.cluster.machine import Machine
from testing.cluster.name_server import NameServer
from testing.cluster.network import CONTROL_PLANE, Host
from testing.conditions import wait_until
from testing.kubernetes.api import Api, Manifest
from testing.kubernetes.control_plane import START_DEADLINE_S, ApiServer
from testing.kubernetes.etcd import Etcd
from testing.kubernetes.process import Process, find_program

PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "openssl",
    "setpriv",
    "unshare",
)
HOSTS = [Host("node-a", 1), Host("node-b", 2)]
NODE_DEADLINE_S = 180.0
FOLDER_VARIABLE = "IMAGES"
ARCHIVES = ("pause.tar", "twinfang-router.tar", "twinfang-cpu.tar")
IMAGES = ("docker.io/library/twinfang-router", "docker.io/library/twinfang-cpu")
FIRST_TAG, SECOND_TAG = "0.1.0", "next"
"""The chart's own, and the one of an upgrade. Both are the same image: a new version is not the
subject here."""


class ImagesMissingError(Exception):
    """There are no images for the nodes; the message says how to make them."""


def images_folder() -> Path:
    folder = Path(os.environ.get(FOLDER_VARIABLE) or ".")
    missing = [name for name in ARCHIVES if not (folder / name).exists()]
    if missing:
        raise ImagesMissingError(
            f"no {', '.join(missing)} in {folder.resolve()}: "
            "python -m testing.cluster.images FOLDER makes them; "
            f"give the folder, as in make test-cluster {FOLDER_VARIABLE}=/opt/kubernetes/images"
        )
    return folder.resolve()


class Cluster:
    """The programs of a cluster, in the order of their start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        key = folder / "service-account.key"
        make_key = [find_program("openssl"), "genrsa", "-out", str(key), "2048"]
        subprocess.run(make_key, check=True, capture_output=True)
        memory = folder / "memory"
        memory.mkdir()
        # etcd waits for the disk at each write, and images that are being unpacked keep the disk busy.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(memory)], check=True)
        self.etcd = Etcd(memory)
        self.server = ApiServer(
            folder / "api-server",
            self.etcd.port,
            key,
            host=CONTROL_PLANE,
            flags=["--endpoint-reconciler-type=lease", "--kubelet-preferred-address-types=InternalIP"],
        )
        kubeconfig = self.server.kubeconfig(folder / "kubeconfig")
        runs = [f"--kubeconfig={kubeconfig}", "--leader-elect=false"]
        controllers = [f"--service-account-private-key-file={key}", f"--root-ca-file={self.server.authority}"]
        # A loaded machine's kubelet is late; a node that is lost is another test's subject.
        controllers += ["--node-monitor-grace-period=120s"]
        self.controllers = self._process("kube-controller-manager", *runs, *controllers)
        self.scheduler = self._process("kube-scheduler", *runs)
        self.machines = [Machine(host, folder / host.name, kubeconfig) for host in HOSTS]
        self._names: NameServer | None = None

    def start(self, images: Path) -> None:
        network.make_bridge()
        self.etcd.process.start()
        wait_until(self.etcd.is_ready, f"etcd is ready; {self.etcd.process.log}", START_DEADLINE_S)
        self.server.start()
        self.server.wait_until_ready()
        self.controllers.start()
        self.scheduler.start()
        self._names = NameServer(CONTROL_PLANE, self.server)
        for machine in self.machines:
            machine.boot()
            others = [other for other in HOSTS if other is not machine.host]
            network.connect(machine.host, machine.pid, others)
            machine.start_containerd()
            for archive in ARCHIVES:
                machine.load(images / archive)
            for image in IMAGES:
                machine.tag(f"{image}:{FIRST_TAG}", f"{image}:{SECOND_TAG}")
            machine.start_node()
        network.reach_services_through(HOSTS[0])
        with self.server.as_admin() as api:
            wait_until(
                lambda: ready_nodes(api) == {host.name for host in HOSTS}, "nodes are ready", NODE_DEADLINE_S
            )

    def stop(self) -> None:
        for machine in self.machines:
            machine.stop()
        if self._names is not None:
            self._names.stop()
        for process in (self.scheduler, self.controllers, self.server.process, self.etcd.process):
            process.stop()

    def logs(self) -> Iterator[tuple[str, str]]:
        """Yields the names of all programs and how their logs end."""
        for process in (self.server.process, self.controllers, self.scheduler):
            yield process.log.name, process.log_tail
        for machine in self.machines:
            for name, process in machine.programs.items():
                yield f"{machine.host.name}: {name}", process.log_tail

    def _process(self, program: str, *arguments: str) -> Process:
        return Process([find_program(program), *arguments], self.folder / f"{program}.log")


def ready_nodes(api: Api) -> set[str]:
    return {node["metadata"]["name"] for node in api.get("/api/v1/nodes")["items"] if is_ready(node)}


def is_ready(thing: Manifest) -> bool:
    """Returns whether a node or a pod says that it is ready."""
    conditions = thing["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@contextlib.contextmanager
def running_cluster(folder: Path, images: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    began_s = time.monotonic()
    try:
        cluster.start(images)
        print(f"cluster of {len(HOSTS)} nodes: ready after {time.monotonic() - began_s:.0f} s")
        yield cluster
    finally:
        cluster.stop()
