"""Two prefill servers that read cached prompts from one another: which of them gets a request, and what it
says of that."""

from __future__ import annotations

import random
import re
from typing import Any

import httpx

from router.policies.policy import Candidate
from router.policies.session_affinity import home_of
from testing.fleets.stack import Stack

NAMES = ("prefill-0", "prefill-1")
FLAGS = (
    *("--prefill", "2", "--session-header", "X-Chat", "--host-cache-size", "64M", "--neighbour-wait", "20"),
    *("--block-size", "16", "--max-num-seqs", "4", "--max-model-len", "512", "--cache-memory", "0.02"),
)


def ask(stack: Stack, body: dict[str, Any], server: str) -> tuple[int, list[int]]:
    """Sends a request to this prefill server. Returns the number of cached tokens, and the answer."""
    candidates = [Candidate(stack.processes()[name].address) for name in NAMES]
    wanted = stack.processes()[server].address
    chat = next(str(i) for i in range(1000) if home_of(str(i), candidates).address == wanted)
    answer = httpx.post(
        f"{stack.url}/v1/completions", json=body, headers={"X-Chat": chat}, timeout=60.0, verify=stack.trust()
    )
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["token_ids"]


def ask_and_publish(stack: Stack, body: dict[str, Any], server: str) -> tuple[int, list[int]]:
    """Like :func:`ask`; returns once the router knows what the server has cached of it."""
    before = _published(stack, server)
    answer = ask(stack, body, server)
    stack.wait_until(lambda: _published(stack, server) > before, f"the router knows what {server} has")
    return answer


def _published(stack: Stack, server: str) -> float:
    """Returns how many starts of this server the router knows."""
    address = re.escape(stack.processes()[server].address)
    page = httpx.get(f"{stack.url}/metrics", timeout=10.0, verify=stack.trust()).text
    found = re.search(rf'^twinfang_published_prefixes{{.*server="{address}".*}} (\S+)$', page, re.M)
    return 0.0 if found is None else float(found[1])


def figure(stack: Stack, server: str, name: str) -> float:
    """Returns a metric ``twinfang_neighbour_cache_…`` of a server."""
    found = re.search(rf"^twinfang_neighbour_cache_{name} (\S+)$", stack.metrics(server), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def failures(stack: Stack, server: str) -> dict[str, float]:
    """Returns how many reads of a server have failed, by the reasons for which any did."""
    page = stack.metrics(server)
    counts = re.findall(r'^twinfang_neighbour_cache_failures_total{kind="(\w+)"} (\S+)$', page, re.M)
    return {kind: float(count) for kind, count in counts if float(count)}


def prompts_of(num: int, seed: int, num_tokens: int = 200) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(5, 900) for _ in range(num_tokens)] for _ in range(num)]
