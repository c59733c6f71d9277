"""Streams that move from one decode server to another, and the router's view of its servers."""

from __future__ import annotations

import json

import httpx

from testing.fleets.router_view import total

NUM_REQUESTS = 12
TOKEN = "a-token-for-tests-0123456789"
TIMEOUT_S = 60.0


def admin(stack, method, path):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    response = httpx.request(method, f"{stack.url}/admin/v1{path}", headers=headers, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()


def stream(url, body, begun=None):
    """Streams an answer; returns its text and number of tokens. ``begun`` is released at its second chunk."""
    texts, usage = [], None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | options, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            texts += [choice["text"] for choice in event["choices"]]
            usage = event.get("usage") or usage
            if begun is not None and len(texts) == 2:
                begun.release()
    return "".join(texts), usage["completion_tokens"]


def num_retries(url):
    return total(url, "twinfang_request_retries_total")


def decode_workers(stack):
    workers = admin(stack, "GET", "/workers")["workers"]
    return {worker["id"]: worker for worker in workers if worker["role"] == "decode"}


def is_drained(stack, worker):
    return decode_workers(stack)[worker]["state"] == "drained"


def until_both_serve(stack):
    """Waits until the router sees both decode servers as serving, which may be later than they serve."""
    stack.wait_until(stack.is_ready, "all servers are connected")
    stack.wait_until(
        lambda: all(w["state"] == "serving" and w["stats"] for w in decode_workers(stack).values()),
        "the router uses both decode servers",
    )


def until_begun(begun, count=NUM_REQUESTS):
    """Waits until ``count`` answers have sent tokens to their clients."""
    for _ in range(count):
        assert begun.acquire(timeout=TIMEOUT_S)
