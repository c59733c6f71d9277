"""An issuer of bearer tokens: real keys, and a real HTTP server that publishes them."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

AUDIENCE = "twinfang-tests"
KEYS_PATH = "/keys"


@dataclass(frozen=True)
class SigningKey:
    """A private key, and its public part as a key set shows it."""

    kid: str
    algorithm: str
    private: PrivateKeyTypes
    public: dict[str, Any]

    @classmethod
    def elliptic(cls, kid: str) -> SigningKey:
        private = ec.generate_private_key(ec.SECP256R1())
        public = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)
        return cls(kid, "ES256", private, {**public, "kid": kid, "use": "sig"})

    @classmethod
    def rsa(cls, kid: str, bits: int = 2048) -> SigningKey:
        private = rsa.generate_private_key(65537, bits)
        public = RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
        return cls(kid, "RS256", private, {**public, "kid": kid, "use": "sig"})


@dataclass
class Issuer:
    """What the issuer's server answers. The newest key signs."""

    url: str = ""
    keys: list[SigningKey] = field(default_factory=lambda: [SigningKey.elliptic("first")])
    status: int = 200
    num_asked: int = 0
    """How often the key set was asked for."""
    published: bytes | None = None
    """What is answered instead of the key set."""

    @property
    def key_set(self) -> bytes:
        return self.published or json.dumps({"keys": [key.public for key in self.keys]}).encode()

    def token(
        self, key: SigningKey | None = None, headers: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a token that is valid for an hour, if the claims do not say otherwise. None: leave that
        claim out."""
        key = key or self.keys[-1]
        now_s = int(time.time())
        all_claims = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "iat": now_s, "exp": now_s + 3600}
        all_claims |= claims
        signed = {name: value for name, value in all_claims.items() if value is not None}
        headers = {"kid": key.kid} | (headers or {})
        return jwt.encode(signed, key.private, algorithm=key.algorithm, headers=headers)  # type: ignore[arg-type]


def encoded(part: object) -> str:
    """Return one part of a token that no library would make."""
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    """Run the issuer's server on a loopback port; yields what it answers."""
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps({"issuer": issuer.url, "jwks_uri": issuer.url + KEYS_PATH}).encode()
            if self.path == KEYS_PATH:
                issuer.num_asked += 1
                content = issuer.key_set
            self.send_response(issuer.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_args: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
