"""The certificate of the other side of a connection, which TLS has checked when the connection began."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from wire.tls.key_pair import names_of


@dataclass
class PeerCertificate:
    """A certificate with those between it and its authority."""

    names: tuple[str, ...]
    expires_s: float
    _chain: tuple[x509.Certificate, ...]
    _judged: tuple[bytes, bool] | None = None
    """The authorities of the last question, and whether the certificate comes from one of them."""

    @classmethod
    def read(cls, certificate: bytes, chain: bytes) -> PeerCertificate:
        """``chain``: PEM of all certificates that the other side has shown; may be empty."""
        first = x509.load_pem_x509_certificate(certificate)
        shown = x509.load_pem_x509_certificates(chain) if chain else []
        between = tuple(one for one in shown if one != first)
        return cls(names_of(first), first.not_valid_after_utc.timestamp(), (first, *between))

    def problem(self, authorities: bytes, now_s: float) -> str | None:
        """Return why the certificate is not good any more; None if it is. ``authorities`` are PEM."""
        if self.expires_s <= now_s:
            expired = datetime.datetime.fromtimestamp(self.expires_s, datetime.UTC)
            return f"the certificate for {', '.join(self.names)} has expired on {expired:%Y-%m-%d %H:%M} UTC"
        if self._judged is None or self._judged[0] != authorities:
            self._judged = authorities, self._comes_from(x509.load_pem_x509_certificates(authorities))
        if not self._judged[1]:
            return f"the certificate for {', '.join(self.names)} is of an authority that is no longer trusted"
        return None

    def _comes_from(self, authorities: list[x509.Certificate]) -> bool:
        """Follow the chain to an authority. TLS has checked everything else when the connection began."""
        issued = self._chain[0]
        for _ in self._chain:
            if any(issued == one or _is_issued_by(issued, one) for one in authorities):
                return True
            above = [one for one in self._chain if one != issued and _is_issued_by(issued, one)]
            if not above:
                return False
            issued = above[0]
        return False


def _is_issued_by(issued: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        issued.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
