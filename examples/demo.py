"""The program of `make demo`: shows in two requests what Twinfang is for.

`twinfang up` starts a prefill server, two decode servers and a router with the bundled model. `twinfang
serve` starts one server that does everything. The tokens of both are compared.

1. A question whose answer is 1,000 tokens earlier in the prompt. The prefill server reads the question, and
   another process answers it from the state that was handed over.
2. A longer answer. The decode server that writes it is killed before its end; the answer arrives complete.

Exits with 0 if both answers are complete, correct and equal to the answers of `twinfang serve`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from testing.oracles.recall_task import chat_content, make_chat_recall_prompt
from twinfang.launch import LaunchedStack, StackProcess, launch
from wire.errors import TwinfangError

START_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0

QUESTION_SEED, QUESTION_TOKENS = 63, 1024
"""This prompt asks for its very first pair."""
LONG_PROMPT = '''class Stack:
    """A last-in, first-out collection of items."""

    def '''
LONG_TOKENS = 600
KILL_AFTER_TOKENS = 50


class DemoError(Exception):
    """The demo failed: an answer is missing, wrong or not made in the expected way."""


@dataclass(frozen=True)
class Answer:
    """A streamed answer."""

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    ttft_s: float
    duration_s: float
    longest_pause_s: float
    """Longest time between two events of the stream."""

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / (self.duration_s - self.ttft_s)


def main() -> int:
    """Run the demo; return the exit code."""
    say("Starting a prefill server, two decode servers and a router: twinfang up --decode 2")
    say("and, to compare with, one server that does everything:       twinfang serve")
    began = time.monotonic()
    with ExitStack() as exits:
        up, alone = (started(exits, *command) for command in (("up", "--decode", "2"), ("serve",)))
        try:
            for stack in (up, alone):
                stack.wait_until_ready(START_TIMEOUT_S)
            say(f"Ready after {time.monotonic() - began:.1f} s.")
            show_recall(up, alone)
            show_lost_server(up, alone)
            for stack in (up, alone):
                code = stack.stop(STOP_TIMEOUT_S)
                if code != 0:
                    raise DemoError(f"a stack ended with exit code {code}")
        except (DemoError, TwinfangError, httpx.HTTPError) as error:
            print(f"\ndemo: failed: {error}\n--- log of twinfang up\n{up.log_tail}", file=sys.stderr)
            return 1
    say(f"\nAll processes have stopped, {time.monotonic() - began:.0f} s after the start.")
    return 0


def show_recall(up: LaunchedStack, alone: LaunchedStack) -> None:
    """Ask for a value at the begin of a long prompt."""
    recall = make_chat_recall_prompt(QUESTION_SEED, QUESTION_TOKENS)
    content = chat_content(recall)
    say("\n1. A question whose answer stands 1,000 tokens back\n")
    say(f"   question   {content[:14]} … {recall.num_pairs - 2} other pairs … {content[-4:]}")
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "temperature": 0.0}
    answer = ask(up, "/v1/chat/completions", body)
    say(f"   answer     {answer.text}   (correct: {yes_or_no(recall.is_correct(answer.text))})")
    compare(answer, ask(alone, "/v1/chat/completions", body))
    num_prefilled = answer.num_prompt_tokens - 1
    say(
        f"   prefill    {num_prefilled:,} of {answer.num_prompt_tokens:,} tokens, by {named(up, 'prefill-0')}"
    )
    moved = transferred_bytes(up.url)
    say(f"   handoff    {moved:,} bytes of KV blocks and state, read by a decode server over NIXL")
    say(f"   TTFT       {answer.ttft_s * 1000:.0f} ms")
    if not recall.is_correct(answer.text):
        raise DemoError(f"the answer is {answer.text!r}; the prompt says {recall.answer!r}")


def show_lost_server(up: LaunchedStack, alone: LaunchedStack) -> None:
    """Kill the decode server while it writes an answer."""
    say(f"\n2. An answer of {LONG_TOKENS} tokens; its decode server is killed on the way\n")
    body = {
        "prompt": LONG_PROMPT,
        "max_tokens": LONG_TOKENS,
        "temperature": 0.7,
        "seed": 3,
        "ignore_eos": True,
    }

    for process in decode_servers(up):  # the first look at a page of metrics may take longer than the answer
        num_running(process)

    def kill(num_tokens: int) -> None:
        victim = decoding(up)
        os.kill(victim.pid, signal.SIGKILL)
        say(f"   killed     {victim.name} (pid {victim.pid}), after {num_tokens} tokens")

    answer = ask(up, "/v1/completions", body, at=KILL_AFTER_TOKENS, then=kill)
    pause_ms = answer.longest_pause_s * 1000
    say(f"   answer     complete, {len(answer.token_ids)} tokens; the longest pause {pause_ms:.0f} ms")
    compare(answer, ask(alone, "/v1/completions", body))
    say(f"   TTFT       {answer.ttft_s * 1000:.0f} ms")
    say(f"   speed      {answer.tokens_per_s:.0f} tokens/s, pause included")


def ask(
    stack: LaunchedStack,
    path: str,
    body: dict[str, Any],
    *,
    at: int = 0,
    then: Callable[[int], None] = lambda num_tokens: None,
) -> Answer:
    """Stream an answer; call ``then`` once, when at least ``at`` tokens have arrived.

    Raises :class:`DemoError` if the answer is an error or does not have the requested length.
    """
    body = {"model": stack.model, "stream": True, "return_token_ids": True, **body}
    body["stream_options"] = {"include_usage": True}
    texts: list[str] = []
    token_ids: list[int] = []
    times, usage = [time.monotonic()], dict[str, Any]()
    with httpx.stream("POST", f"{stack.url}{path}", json=body, timeout=REQUEST_TIMEOUT_S) as response:
        if response.status_code != 200:
            raise DemoError(f"the router answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DemoError(f"the stream broke: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                texts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
                if new_ids := choice.get("token_ids"):
                    token_ids += new_ids
                    times.append(time.monotonic())
            if at and len(token_ids) >= at:
                at = 0
                then(len(token_ids))
    if len(token_ids) != body["max_tokens"]:
        raise DemoError(f"expected {body['max_tokens']} tokens, got {len(token_ids)}; usage {usage}")
    pauses = [later - earlier for earlier, later in pairwise(times[1:])]
    return Answer(
        "".join(texts),
        token_ids,
        usage["prompt_tokens"],
        ttft_s=times[1] - times[0],
        duration_s=times[-1] - times[0],
        longest_pause_s=max(pauses, default=0.0),
    )


def compare(answer: Answer, expected: Answer) -> None:
    """Say whether both answers are the same tokens. Raises :class:`DemoError` if they are not."""
    is_equal = answer.token_ids == expected.token_ids
    say(f"   equal      {yes_or_no(is_equal)}: token for token what one server alone answers")
    if not is_equal:
        raise DemoError(f"the tokens are {answer.token_ids}, one server alone gives {expected.token_ids}")


def decode_servers(stack: LaunchedStack) -> list[StackProcess]:
    """Return the decode servers that have a page of metrics."""
    processes = stack.processes().values()
    return [one for one in processes if one.name.startswith("decode") and one.metrics_url is not None]


def num_running(process: StackProcess) -> float:
    """Return a server's number of running requests."""
    return metric(str(process.metrics_url), "twinfang_requests_running")


def decoding(stack: LaunchedStack) -> StackProcess:
    """Return the decode server that has a request."""
    for process in decode_servers(stack):
        if num_running(process) > 0:
            return process
    raise DemoError("no decode server has a request")


def transferred_bytes(url: str) -> int:
    """Return the number of bytes that decode servers have read, from the router's metrics."""
    num_bytes = int(metric(f"{url}/metrics", "twinfang_transfer_bytes_total"))
    if num_bytes == 0:
        raise DemoError("no byte was moved from the prefill server to a decode server")
    return num_bytes


def metric(url: str, name: str) -> float:
    """Return the value of a metric without labels."""
    found = re.search(rf"^{name} (\S+)$", httpx.get(url, timeout=REQUEST_TIMEOUT_S).text, re.MULTILINE)
    if found is None:
        raise DemoError(f"{url} has no {name}")
    return float(found[1])


def started(exits: ExitStack, *command: str) -> LaunchedStack:
    """Start a stack that stops when ``exits`` is closed."""
    folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="twinfang-demo-"))
    stack = launch(Path(folder), *command)
    exits.callback(end, stack)
    return stack


def end(stack: LaunchedStack) -> None:
    if stack.supervisor.poll() is None:
        stack.supervisor.terminate()
        stack.supervisor.wait(STOP_TIMEOUT_S)


def named(stack: LaunchedStack, name: str) -> str:
    return f"{name} (pid {stack.processes()[name].pid})"


def yes_or_no(value: bool) -> str:
    return "yes" if value else "NO"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
