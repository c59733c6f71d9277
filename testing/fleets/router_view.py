"""What a router shows of its servers on its metrics page."""

from __future__ import annotations

import ssl

import httpx

from testing.fleets.fleet import CALL_TIMEOUT_S


def total(url: str, name: str, trust: ssl.SSLContext | bool = True) -> float:
    """Returns the sum of a metric's samples. Raises :class:`httpx.HTTPError` if there is no answer."""
    return _total(_page(url, trust), name)


def uses_all_servers(url: str, trust: ssl.SSLContext | bool = True) -> bool:
    """Returns whether a router takes requests and uses every server that it knows.

    ``/readyz`` alone is not enough for a test that stops servers: a router is ready with one server of each
    role, and another server may take a minute longer to start.
    """
    try:
        if httpx.get(f"{url}/readyz", timeout=CALL_TIMEOUT_S, verify=trust).status_code != 200:
            return False
        page = _page(url, trust)
    except httpx.HTTPError:
        return False
    return _total(page, "twinfang_servers_connected") == _total(page, "twinfang_servers_configured")


def _page(url: str, trust: ssl.SSLContext | bool) -> str:
    return httpx.get(f"{url}/metrics", timeout=CALL_TIMEOUT_S, verify=trust).raise_for_status().text


def _total(page: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{name}{{"))
