"""etcd and API servers on loopback, with RBAC and service accounts: a cluster without its nodes.

No controller, scheduler or kubelet runs. Tests do the work of these (node.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from testing.conditions import wait_until
from testing.kubernetes.api import Api
from testing.kubernetes.etcd import Etcd
from testing.kubernetes.link import Link
from testing.kubernetes.process import Process, find_program
from twinfang.stack.ports import LOOPBACK, free_ports

ADMIN_TOKEN = "of-the-group-that-may-do-everything"
START_DEADLINE_S = 120.0
"""Long, because an API server's first start makes its key and all built-in roles."""


class ApiServer:
    """One kube-apiserver. Its address and certificate stay the same over restarts."""

    def __init__(
        self,
        folder: Path,
        etcd_port: int,
        service_account_key: Path,
        *,
        host: str = LOOPBACK,
        flags: Sequence[str] = (),
    ) -> None:
        (self.port,) = free_ports(1)
        self.host = host
        self.url = f"https://{host}:{self.port}"
        self._flags = flags
        self.authority = folder / "certificates" / "apiserver.crt"
        """The file also contains the authority's certificate."""
        self._folder = folder
        self._etcd_port = etcd_port
        self._key = service_account_key
        folder.mkdir()
        (folder / "tokens.csv").write_text(f"{ADMIN_TOKEN},admin,admin,system:masters\n")
        self.process = self._process()

    def start(self, *, caches_pods: bool = True) -> None:
        """Starts the API server. ``caches_pods``: whether it answers watches from its own memory (an API
        server's default) or from etcd."""
        self.process = self._process() if caches_pods else self._process("--watch-cache-sizes=pods#0")
        self.process.start()

    def _process(self, *flags: str) -> Process:
        command = [find_program("kube-apiserver"), f"--etcd-servers=http://{LOOPBACK}:{self._etcd_port}"]
        command += [f"--bind-address={self.host}", f"--advertise-address={self.host}"]
        command += [f"--secure-port={self.port}", f"--cert-dir={self.authority.parent}"]
        command += ["--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/24"]
        command += ["--service-account-issuer=https://kubernetes.default.svc"]
        command += [
            f"--service-account-signing-key-file={self._key}",
            f"--service-account-key-file={self._key}",
        ]
        command += ["--authorization-mode=RBAC", f"--token-auth-file={self._folder / 'tokens.csv'}"]
        if _version_of(command[0]) < (1, 21):  # tokens for pods had to be switched on
            command += ["--feature-gates=BoundServiceAccountTokenVolume=true"]
        return Process([*command, *self._flags, *flags], self._folder / "kube-apiserver.log")

    @contextlib.contextmanager
    def as_user(self, token: str) -> Iterator[Api]:
        with Api(self.url, token, self.authority) as api:
            yield api

    @contextlib.contextmanager
    def as_admin(self) -> Iterator[Api]:
        with self.as_user(ADMIN_TOKEN) as api:
            yield api

    def is_ready(self) -> bool:
        if not self.authority.exists():
            return False
        with self.as_admin() as api:
            return api.answers("/readyz")

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.is_running, f"kube-apiserver has ended:\n{self.process.log_tail}"
            return self.is_ready()

        wait_until(is_ready, f"kube-apiserver is ready; {self.process.log}", START_DEADLINE_S)

    def kubeconfig(self, path: Path) -> Path:
        """Writes an administrator's kubeconfig."""
        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "loopback", "cluster": cluster}],
                    "users": [{"name": "admin", "user": {"token": ADMIN_TOKEN}}],
                    "contexts": [{"name": "it", "context": {"cluster": "loopback", "user": "admin"}}],
                    "current-context": "it",
                }
            )
        )
        return path


class ControlPlane:
    """etcd and API servers. Routers and administrators use the first API server; while it is stopped,
    administrators use a second one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etcd = Etcd(folder)
        self.link = Link(self.etcd.port)
        """The link between etcd and the first API server."""
        key = folder / "service-account.key"
        subprocess.run(
            [find_program("openssl"), "genrsa", "-out", str(key), "2048"], check=True, capture_output=True
        )
        self.first = ApiServer(folder / "first", self.link.port, key)
        self.second = ApiServer(folder / "second", self.etcd.port, key)

    def start(self) -> None:
        self.etcd.process.start()
        wait_until(self.etcd.is_ready, f"etcd is ready; {self.etcd.process.log}", START_DEADLINE_S)
        self.first.start()
        self.first.wait_until_ready()

    def stop(self) -> None:
        for process in (self.first.process, self.second.process, self.etcd.process):
            process.stop()
        self.link.close()


@functools.cache
def _version_of(program: str) -> tuple[int, int]:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v(\d+)\.(\d+)", said)
    assert found is not None, f"{program} --version says {said!r}"
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def running_control_plane(folder: Path) -> Iterator[ControlPlane]:
    plane = ControlPlane(folder)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
