"""Certificates of an authority that only tests trust."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import trustme

from wire.tls.identity_files import IdentityFiles
from wire.tls.key_pair_files import KeyPairFiles
from wire.tls.peer_names import PeerNames, PeerRole

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

    def identity(
        self,
        folder: Path,
        role: PeerRole,
        *,
        name: str | None = None,
        trusts: Authority | None = None,
        expires: datetime.datetime | None = None,
    ) -> IdentityFiles:
        """Write what a process of ``role`` shows to others, into a folder below ``folder``, over what an
        earlier call wrote. ``name`` instead of the role's; ``trusts``: the authority that it accepts, if not
        this one."""
        names = PeerNames()
        place = folder / role
        place.mkdir(exist_ok=True)
        (place / "ca.pem").unlink(missing_ok=True)
        root = (trusts or self).write_root(place)
        pair = self.write(place, name or names.name(role), expires=expires)
        return IdentityFiles(pair.certificate, pair.private_key, root, names)

    def client(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._ca.configure_trust(context)
        return context

    def write_root(self, folder: Path) -> Path:
        path = folder / "ca.pem"
        path.write_bytes(self._ca.cert_pem.bytes())
        return path
