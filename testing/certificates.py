"""Certificates of an authority that only tests trust."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import trustme

from wire.tls.key_pair_files import KeyPairFiles

NAMES = ("localhost", "127.0.0.1", "::1")


class Authority:
    """Issues certificates for loopback, and makes clients that trust it."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def write(
        self,
        folder: Path,
        *names: str,
        expires: datetime.datetime | None = None,
        key_type: trustme.KeyType = trustme.KeyType.ECDSA,
    ) -> KeyPairFiles:
        """Write a certificate for loopback and more ``names`` into ``folder``. Each file is replaced by a
        rename, first the certificate."""
        issued = self._ca.issue_cert(*NAMES, *names, not_after=expires, key_type=key_type)
        files = KeyPairFiles(folder / "tls.crt", folder / "tls.key")
        certificates = b"".join(one.bytes() for one in issued.cert_chain_pems)
        for path, content in (
            (files.certificate, certificates),
            (files.private_key, issued.private_key_pem.bytes()),
        ):
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_bytes(content)
            unfinished.replace(path)
        return files

    def client(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._ca.configure_trust(context)
        return context

    def write_root(self, folder: Path) -> Path:
        path = folder / "ca.pem"
        path.write_bytes(self._ca.cert_pem.bytes())
        return path
