"""A certificate with its private key, checked against each other.

Both are read into memory once. So what was checked is what is used, whatever happens to the files meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtensionOID

from wire.errors import ConfigError
from wire.tls.key_pair_files import KeyPairFiles

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its key, in the forms that OpenSSL and gRPC take."""

    certificates: bytes
    """PEM, the process's own certificate first."""
    private_key: bytes = field(repr=False)
    """PEM, not encrypted."""
    names: tuple[str, ...]
    """The host names and addresses that the certificate is for."""
    expires_s: float
    """When the first certificate of the chain expires, in seconds since 1970."""
    authorities: bytes = b""
    """PEM: whose certificates are accepted from the other side. Empty: it shows none."""

    @classmethod
    def read(cls, files: KeyPairFiles) -> KeyPair:
        """Read and check the files. Raises :class:`ConfigError`, whose message shows nothing of a key."""
        chain = _bytes_of(files.certificate, "certificate")
        try:
            certificates = x509.load_pem_x509_certificates(chain)
        except ValueError as error:
            raise ConfigError(
                f"the certificate {files.certificate} can't be read: expected PEM, which begins with "
                "-----BEGIN CERTIFICATE-----"
            ) from error
        key = _key_of(files)
        if certificates[0].public_key() != key.public_key():
            raise ConfigError(
                f"the private key {files.private_key} does not belong to the first certificate in "
                f"{files.certificate}: give the key that this certificate was made for"
            )
        return cls(
            b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            names_of(certificates[0]),
            min(one.not_valid_after_utc.timestamp() for one in certificates),
            b"" if files.authorities is None else _authorities_of(files.authorities),
        )


def _authorities_of(path: Path) -> bytes:
    text = _bytes_of(path, "file of authorities")
    try:
        found = x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise ConfigError(
            f"the authorities {path} can't be read: expected PEM, which begins with "
            "-----BEGIN CERTIFICATE-----"
        ) from error
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in found)


def _key_of(files: KeyPairFiles) -> PrivateKeyTypes:
    password = None
    if files.password is not None:
        password = _bytes_of(files.password, "password of the private key").strip(b"\r\n")
    text = _bytes_of(files.private_key, "private key")
    try:
        return serialization.load_pem_private_key(text, password)
    except TypeError as error:  # encrypted without a password, or the other way round
        if password is not None:
            remedy = "it is not encrypted: leave out `ssl_keyfile_password_file`"
        elif files.authorities is None:
            remedy = "it is encrypted: give `ssl_keyfile_password_file`"
        else:
            remedy = "it is encrypted: `tls_key` takes a key without a password"
        raise ConfigError(f"the private key {files.private_key} can't be read: {remedy}") from error
    except Exception as error:  # the library has errors of its own for keys that it does not support
        hint = "expected PEM, which begins with -----BEGIN" if password is None else "is the password right?"
        raise ConfigError(f"the private key {files.private_key} can't be read: {hint}") from error


def _bytes_of(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the {what} can't be read: {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the {what} can't be read: {path} has more than {MAX_FILE_BYTES} bytes")
    return content


def names_of_der(certificate: bytes) -> tuple[str, ...]:
    """Return the host names and addresses in a certificate's subjectAltName."""
    return names_of(x509.load_der_x509_certificate(certificate))


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        extension = certificate.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME)
    except (x509.ExtensionNotFound, ValueError):
        return ()
    names = extension.value
    assert isinstance(names, x509.SubjectAlternativeName)
    return (
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    )
