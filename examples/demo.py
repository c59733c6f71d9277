"""Streams one completion through three processes, as `make demo` shows it.

`twinfang up` starts a prefill server, a decode server and a router with the bundled model. The prefill
server runs the prompt up to its last but one token, the decode server reads blocks and state from its
memory over NIXL and generates, the router speaks HTTP. Exits with 0 if all of that worked.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from twinfang.launch import LaunchedStack, launch
from wire.errors import TwinfangError

START_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0

PROMPT = '''class Stack:
    """A last-in, first-out collection of items."""

    def __init__(self, items=()):
        self._items = list(items)

    def '''
"""The bundled model carries on in something that looks like Python; it is far too small to mean it."""
MAX_TOKENS = 160


class DemoError(Exception):
    """The demo did not show what it is there to show."""


@dataclass(frozen=True)
class Answer:
    """What a streamed completion brought, times in seconds."""

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        return (self.completion_tokens - 1) / (self.duration_s - self.ttft_s)


def main() -> int:
    """Runs the demo; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="twinfang-demo-") as folder:
        print("Starting a prefill server, a decode server and a router: twinfang up", flush=True)
        started = time.monotonic()
        stack = launch(Path(folder), "up")
        try:
            stack.wait_until_ready(START_TIMEOUT_S)
            print(f"Ready after {time.monotonic() - started:.1f} s.\n", flush=True)
            with httpx.Client(base_url=stack.url, timeout=REQUEST_TIMEOUT_S) as client:
                answer = stream(client, stack.model)
            report(stack, answer)
            code = stack.stop(STOP_TIMEOUT_S)
            if code != 0:
                raise DemoError(f"twinfang up ended with exit code {code}")
        except (DemoError, TwinfangError, httpx.HTTPError) as error:
            print(f"\ndemo: failed: {error}\n--- log of twinfang up\n{stack.log_tail}", file=sys.stderr)
            return 1
        finally:
            if stack.supervisor.poll() is None:
                stack.supervisor.terminate()
                stack.supervisor.wait(STOP_TIMEOUT_S)
    print("\nAll three have stopped.")
    return 0


def stream(client: httpx.Client, model: str) -> Answer:
    """Prints prompt and answer as they come."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7,
        "top_p": 0.9,
        "frequency_penalty": 0.3,
        "seed": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    print(f"POST {client.base_url}/v1/completions\n\n{PROMPT}", end="", flush=True)
    started = time.monotonic()
    ttft_s, usage = None, None
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise DemoError(f"the router answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DemoError(f"the stream broke: {event['error']}")
            ttft_s = ttft_s if ttft_s is not None else time.monotonic() - started
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                print(choice["text"], end="", flush=True)
    if ttft_s is None or usage is None or usage["completion_tokens"] != MAX_TOKENS:
        raise DemoError(f"expected {MAX_TOKENS} tokens, the stream ended with usage {usage}")
    duration_s = time.monotonic() - started
    return Answer(usage["prompt_tokens"], usage["completion_tokens"], ttft_s, duration_s)


def report(stack: LaunchedStack, answer: Answer) -> None:
    """Prints who did what. Raises :class:`DemoError` if nothing was handed over."""
    moved = transferred_bytes(stack.url)
    if moved == 0:
        raise DemoError("no byte was moved from the prefill to the decode server")
    who = {name: f"{name} (pid {process.pid})" for name, process in stack.processes().items()}
    prompt_tokens = answer.prompt_tokens
    lines = {
        "prompt": f"{prompt_tokens} tokens, {prompt_tokens - 1} of them run by {who['prefill-0']}",
        "handoff": f"{moved:,} bytes moved over NIXL",
        "answer": f"{answer.completion_tokens} tokens by {who['decode-0']}",
        "HTTP": f"streamed by {who['router']}",
        "TTFT": f"{answer.ttft_s * 1000:.0f} ms",
        "speed": f"{answer.tokens_per_s:.0f} tokens/s",
    }
    print("\n\n" + "\n".join(f"{title:<8} {text}" for title, text in lines.items()), flush=True)


def transferred_bytes(url: str) -> int:
    """Bytes that decode servers have read, as the router counts them."""
    metrics = httpx.get(f"{url}/metrics", timeout=REQUEST_TIMEOUT_S).text
    found = re.search(r"^twinfang_transfer_bytes_total (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise DemoError("/metrics has no twinfang_transfer_bytes_total")
    return int(float(found[1]))


if __name__ == "__main__":
    sys.exit(main())
