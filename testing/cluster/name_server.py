"""The cluster's name server: addresses of Services, as the API server has them at that moment (RFC 1035).

It knows ``SERVICE.NAMESPACE.svc.cluster.local`` and nothing else. For a headless Service, it answers with the
addresses of the ready pods.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass

import httpx

from testing.kubernetes.api import Api, Manifest, RefusedError
from testing.kubernetes.control_plane import ApiServer

PORT = 53
ZONE = ["svc", "cluster", "local"]
ADDRESS, INTERNET = 1, 1
NO_SUCH_NAME = 3
TIME_TO_LIVE_S = 1
HEADER = struct.Struct(">HHHHHH")
"""Identity, flags, and the numbers of questions, answers, authorities and additional records."""
FLAGS = 0x8580
"""Response, authoritative, recursion desired and available."""
STOP_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Question:
    identity: int
    labels: list[str]
    kind: int
    question: bytes
    """As it was asked: an answer repeats it."""


class NameServer:
    """Answers over UDP, in a thread."""

    def __init__(self, host: str, server: ApiServer) -> None:
        self._server = server
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, PORT))
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="name-server")
        self._thread.start()

    def stop(self) -> None:
        self._is_over = True
        own = self._socket.getsockname()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waking:
            waking.sendto(b"", own)
        self._thread.join(STOP_DEADLINE_S)
        self._socket.close()

    def _serve(self) -> None:
        with self._server.as_admin() as api:
            while not self._is_over:
                packet, client = self._socket.recvfrom(512)
                if len(packet) > HEADER.size:
                    question = parsed(packet)
                    self._socket.sendto(answered(question, addresses(api, question.labels)), client)


def parsed(packet: bytes) -> Question:
    (identity, *_), labels, at = HEADER.unpack_from(packet), [], HEADER.size
    while length := packet[at]:
        labels.append(packet[at + 1 : at + 1 + length].decode("ascii").lower())
        at += 1 + length
    (kind,) = struct.unpack_from(">H", packet, at + 1)
    return Question(identity, labels, kind, packet[HEADER.size : at + 5])


def answered(question: Question, found: list[str] | None) -> bytes:
    """Returns the answer. ``found``: the name's addresses, or None if there is no such name."""
    shown = found if found and question.kind == ADDRESS else []
    header = HEADER.pack(
        question.identity, FLAGS | (NO_SUCH_NAME if found is None else 0), 1, len(shown), 0, 0
    )
    name = 0xC000 | HEADER.size  # a pointer to the question's name
    records = [
        struct.pack(">HHHIH4s", name, ADDRESS, INTERNET, TIME_TO_LIVE_S, 4, socket.inet_aton(address))
        for address in shown
    ]
    return header + question.question + b"".join(records)


def addresses(api: Api, labels: list[str]) -> list[str] | None:
    """Returns the addresses of a Service; None if there is no such Service or the API server is away."""
    if len(labels) != 5 or labels[2:] != ZONE:
        return None
    name, namespace = labels[:2]
    path = f"/api/v1/namespaces/{namespace}"
    try:
        service: Manifest = api.get(f"{path}/services/{name}")
        if service["spec"]["clusterIP"] != "None":
            return [service["spec"]["clusterIP"]]
        subsets = api.get(f"{path}/endpoints/{name}").get("subsets", [])
    except (RefusedError, httpx.TransportError):
        return None
    return [address["ip"] for subset in subsets for address in subset.get("addresses", [])]
