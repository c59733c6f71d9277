"""Where a process's identity for mutual TLS is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wire.tls.key_pair_files import KeyPairFiles
from wire.tls.peer_names import ROLE_NAMES, PeerNames


@dataclass(frozen=True)
class IdentityFiles:
    """The files for mutual TLS between processes, and the pattern of names in their certificates."""

    certificate: Path
    """PEM: the process's own certificate, then those of the authorities between it and the root."""
    private_key: Path
    """PEM, not encrypted."""
    authorities: Path
    """PEM: the authorities whose certificates are accepted."""
    names: PeerNames = ROLE_NAMES

    def key_pair(self) -> KeyPairFiles:
        return KeyPairFiles(self.certificate, self.private_key, authorities=self.authorities)
