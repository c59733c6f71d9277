"""An authority that is made for one run of a stack, and certificates of it for the stack's processes."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wire.tls.identity_files import IdentityFiles
from wire.tls.peer_names import ROLES, PeerNames, PeerRole

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

LIFE = datetime.timedelta(days=365)
EARLY = datetime.timedelta(minutes=5)
"""Certificates are good from a little before they are made, for clocks that differ."""


@dataclass(frozen=True)
class OwnAuthority:
    """A folder with the authority's certificate and, for each role, a certificate and its key. Only this
    user may read it. The authority's own key is forgotten, so that no further certificate can be made."""

    folder: Path

    @classmethod
    def make(cls, host: str) -> OwnAuthority:
        """Make the authority. The router's certificate is good for ``host`` and for loopback."""
        made = cls(Path(tempfile.mkdtemp(prefix="twinfang-tls-")))
        authority = _Issuer()
        made.ca.write_bytes(authority.pem)
        names = PeerNames()
        for role in ROLES:
            hosts = ["localhost", "127.0.0.1", "::1", host] if role == "router" else []
            certificate, key = authority.issue([names.name(role), *hosts])
            files = made.files(role)
            files.certificate.write_bytes(certificate)
            files.private_key.touch(mode=0o600)
            files.private_key.write_bytes(key)
        return made

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def files(self, role: PeerRole) -> IdentityFiles:
        return IdentityFiles(self.folder / f"{role}.crt", self.folder / f"{role}.key", self.ca)

    def arguments(self, role: PeerRole) -> list[str]:
        """Return the flags for a process of ``role``."""
        files = self.files(role)
        return [
            *("--tls-cert", str(files.certificate), "--tls-key", str(files.private_key)),
            *("--tls-ca", str(files.authorities)),
        ]

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class _Issuer:
    """The authority's key, while certificates are made."""

    def __init__(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Twinfang, for one run")])
        self._certificate = self._signed(self._name, self._key, x509.BasicConstraints(True, 0))

    @property
    def pem(self) -> bytes:
        return _pem(self._certificate)

    def issue(self, names: list[str]) -> tuple[bytes, bytes]:
        """Return a certificate for ``names``, and its key."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName([_general(name) for name in dict.fromkeys(names)])
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
        certificate = self._signed(subject, key, x509.BasicConstraints(False, None), alternatives)
        return _pem(certificate), key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - EARLY)
            .not_valid_after(now + LIFE)
        )
        own_key = self._key.public_key()
        known = [  # strict callers, such as Python from 3.13 on, ask for them
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(own_key),
            _usage(may_sign_certificates=key is self._key),
        ]
        for extension in (*extensions, *known):
            builder = builder.add_extension(
                extension, critical=isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
            )
        return builder.sign(self._key, hashes.SHA256())


def _usage(*, may_sign_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not may_sign_certificates,
        key_cert_sign=may_sign_certificates,
        crl_sign=may_sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)
