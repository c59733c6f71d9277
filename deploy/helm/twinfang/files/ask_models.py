"""Asks a release for a completion of each of its models, as a client does. ``helm test`` runs this.

Environment: ``URL`` of the Service, ``API_KEY`` if the release has keys, ``TIMEOUT_S`` of one request. For
HTTPS, ``SERVER_NAME`` is the name in the routers' certificate, and ``CA_FILE`` its authority; without a name,
the certificate is not checked. Ends with 1 if a model does not answer.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any

URL = os.environ["URL"]
KEY = os.environ.get("API_KEY", "").strip()
TIMEOUT_S = float(os.environ["TIMEOUT_S"])
SERVER_NAME = os.environ.get("SERVER_NAME", "")
CA_FILE = os.environ.get("CA_FILE")


class Named(http.client.HTTPSConnection):
    """A connection whose certificate has another name than the Service."""

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        context = ssl.create_default_context(cafile=CA_FILE)
        if not SERVER_NAME:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.sock = context.wrap_socket(self.sock, server_hostname=SERVER_NAME or self.host)


class NamedHandler(urllib.request.HTTPSHandler):
    """Opens connections of that kind."""

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(Named, request)


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the answer. Raises ``urllib.error.URLError``."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    data = None if body is None else json.dumps(body).encode()
    # Straight to the Service: the cluster's proxy for the internet does not know it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NamedHandler())
    with opener.open(urllib.request.Request(URL + path, data, headers), timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def main() -> int:
    path = "/v1/models"
    try:
        names = [model["id"] for model in ask(path)["data"]]
        path = "/v1/completions"
        for name in names:
            answer = ask(path, {"model": name, "prompt": "Hello", "max_tokens": 8})
            print(f"{name}: {answer['usage']['completion_tokens']} tokens, {answer['choices'][0]['text']!r}")
    except urllib.error.HTTPError as error:
        if error.code == 401 and not KEY:
            print("The routers ask for an API key, as they should.")
            print("No completion was tried: test.apiKey names none.")
            return 0
        print(f"{URL}{path}: {error.code} {error.read().decode(errors='replace')}")
        return 1
    except (urllib.error.URLError, TimeoutError) as error:
        print(f"{URL}{path}: {error}")
        return 1
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main())
