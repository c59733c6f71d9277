"""One etcd on loopback, and its administration."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx

from testing.kubernetes.process import Process, find_program
from twinfang.stack.ports import LOOPBACK, free_ports

CALL_TIMEOUT_S = 10.0


class Etcd:
    """Stores the API servers' data; compacts only on demand."""

    def __init__(self, folder: Path) -> None:
        self.port, peer_port = free_ports(2)
        self.url = f"http://{LOOPBACK}:{self.port}"
        peer_url = f"http://{LOOPBACK}:{peer_port}"
        command = [find_program("etcd"), "--name=only", f"--data-dir={folder / 'etcd'}"]
        command += [f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}"]
        command += [f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"]
        command += [f"--initial-cluster=only={peer_url}", "--log-level=warn"]
        self.process = Process(command, folder / "etcd.log")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=CALL_TIMEOUT_S).json().get("health") == "true"
        except (httpx.HTTPError, ValueError):
            return False

    def compact(self) -> int:
        """Forgets all versions except the latest of everything; returns the present revision."""
        answer = self._call("kv/range", key=base64.b64encode(b"/").decode())
        revision = int(answer["header"]["revision"])
        self._call("kv/compaction", revision=str(revision), physical=True)
        return revision

    def _call(self, method: str, **arguments: Any) -> Any:
        answer = httpx.post(f"{self.url}/v3/{method}", json=arguments, timeout=CALL_TIMEOUT_S)
        assert answer.status_code == 200, f"etcd answers {answer.status_code} to {method}: {answer.text}"
        return answer.json()
