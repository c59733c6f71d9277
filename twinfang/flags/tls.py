"""Flags of mutual TLS between Twinfang's processes. HTTPS for clients has flags of its own, which begin with
``--ssl`` (flags/router.py)."""

from __future__ import annotations

import argparse
import os

from twinfang.flags.flag import Flag, FlagGroup
from twinfang.flags.values import existing_file, some_text, yes_or_no
from wire.errors import ConfigError
from wire.tls.identity_files import IdentityFiles
from wire.tls.peer_names import DEFAULT_PATTERN, PeerNames

TLS_CERT = Flag(
    *("--tls-cert", "FILE", existing_file),
    "this process's certificate for Twinfang's other processes, and those between it and its root, in PEM; "
    "read again whenever it changes",
    default_text="none: processes talk in clear and trust everybody who reaches them",
)
TLS_KEY = Flag(
    *("--tls-key", "FILE", existing_file, "private key of --tls-cert, in PEM, without a password"),
    default_text="none",
)
TLS_CA = Flag(
    *("--tls-ca", "FILE", existing_file),
    "authorities whose certificates are accepted from other processes, in PEM; read again when it changes",
    default_text="none",
)
TLS_NAMES = Flag(
    *("--tls-names", "PATTERN", some_text),
    "names in the certificates, with {role} for router, server or operator; the same for all processes",
    default=DEFAULT_PATTERN,
)
TLS_FLAGS = (TLS_CERT, TLS_KEY, TLS_CA, TLS_NAMES)
MUTUAL_TLS = FlagGroup("mutual TLS between processes", TLS_FLAGS)
TLS = Flag(
    *("--tls", "", yes_or_no),
    "all processes authenticate each other, and the router speaks HTTPS, with certificates of an authority "
    "that is made for this run and ends with it",
    default=False,
    default_text="off",
    is_switch=True,
)


def speak_only_tls_1_3() -> None:
    """Makes gRPC refuse older versions, in this process and in those that it starts. gRPC must not have been
    used before.

    It has no option for the version, and always offers the ciphers of TLS 1.3. The variable is the list of
    ciphers for TLS 1.2. The only one in it needs a key that both sides know, and there is none: so TLS 1.2
    finds no cipher.
    """
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-CHACHA20-POLY1305"


def identity_files(values: argparse.Namespace) -> IdentityFiles | None:
    """Returns the files that the flags name; None without mutual TLS. From then on gRPC speaks TLS 1.3 only.

    Raises :class:`ConfigError` if only some of the three are given.
    """
    given = {flag.name: getattr(values, flag.dest) for flag in (TLS_CERT, TLS_KEY, TLS_CA)}
    names = PeerNames(values.tls_names)
    lacking = [name for name, value in given.items() if value is None]
    if len(lacking) == len(given):
        return None
    if lacking:
        raise ConfigError(
            f"mutual TLS needs a certificate, its key and an authority: give {', '.join(lacking)} too"
        )
    speak_only_tls_1_3()
    return IdentityFiles(values.tls_cert, values.tls_key, values.tls_ca, names)
