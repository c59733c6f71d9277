"""Cached prompts in files, over real processes: still there after ``kill -9``."""

import random
import re

import httpx
import pytest

from testing.fleets.clients import greedy_body
from testing.fleets.fleet import START_DEADLINE_S
from testing.fleets.stack import running_stack

SMALL = ("--max-num-seqs", "2", "--max-model-len", "256", "--cached-states", "2", "--cache-memory", "0.004")
"""A device with room for few prompts."""
FILES = ("--host-cache-size", "64M", "--file-cache-size", "256M", "--file-cache-wait", "20")

NUM_PROMPTS, NUM_WRITTEN = 10, 4
"""The device may keep some of the last prompts until the server is killed."""


def usage(stack, body):
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60.0).json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["token_ids"]


def metric(stack, server, name):
    return float(re.search(rf"^twinfang_{name} (\S+)$", stack.metrics(server), re.MULTILINE)[1])


def failures(stack, server):
    counts = re.findall(
        r'^twinfang_file_cache_failures_total{kind="(\w+)"} (\S+)$', stack.metrics(server), re.M
    )
    return {kind: float(count) for kind, count in counts if float(count)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "server", "ranks"),
    [
        ("serve", "both-0", ()),
        ("up", "prefill-0", ()),
        ("serve", "both-0", ("--tensor-parallel", "2")),
        ("up", "prefill-0", ("--prefill-tensor-parallel", "2")),
    ],
)
def test_prompts_are_found_after_kill_9(tmp_path, command, server, ranks):
    choose = random.Random(5)
    bodies = [greedy_body([choose.randrange(5, 900) for _ in range(200)], 8) for _ in range(NUM_PROMPTS)]
    with running_stack(command, *SMALL, *FILES, *ranks, "--file-cache-dir", str(tmp_path)) as stack:
        expected = [usage(stack, body) for body in bodies]
        assert [cached for cached, _ in expected] == [0] * NUM_PROMPTS

        def all_are_written() -> bool:
            demoted = metric(stack, server, "host_cache_demoted_prefixes_total")
            return metric(stack, server, "file_cache_written_prefixes_total") == demoted >= NUM_WRITTEN

        stack.wait_until(all_are_written, "what host memory has is written")
        pid = stack.kill(server)
        stack.wait_until(lambda: stack.has_restarted(server, pid), "the server is back", START_DEADLINE_S)
        found = [usage(stack, body) for body in bodies]
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
        cached = [cached for cached, _ in found]
        assert cached[:NUM_WRITTEN] == [192] * NUM_WRITTEN
        assert metric(stack, server, "file_cache_read_prefixes_total") >= NUM_WRITTEN
        assert failures(stack, server).keys() <= {"torn"}


def routed_to(stack, address):
    """The number of starts that the router knows of a server."""
    page = httpx.get(f"{stack.url}/metrics", timeout=60.0).text
    (number,) = re.findall(
        rf'^twinfang_published_prefixes{{role="prefill",server="{address}"}} (\S+)$', page, re.M
    )
    return float(number)


@pytest.mark.exhaustive
def test_a_router_sends_prompts_to_the_server_whose_files_have_them(tmp_path):
    """One of two prefill servers is killed. Then it has its prompts in files alone, and still gets them."""
    choose = random.Random(6)
    bodies = [greedy_body([choose.randrange(5, 900) for _ in range(200)], 8) for _ in range(24)]
    flags = ("--prefill", "2", "--prefill-policy", "prefix_affinity", *SMALL, *FILES)
    names = ("prefill-0", "prefill-1")
    with running_stack("up", *flags, "--file-cache-dir", str(tmp_path)) as stack:
        computed, expected = {name: [] for name in names}, []
        for body in bodies:
            before = {name: stack.stats(name)[name].prefill_tokens for name in names}
            expected.append(usage(stack, body)[1])
            (name,) = [name for name in names if stack.stats(name)[name].prefill_tokens > before[name]]
            computed[name].append(body)
        name = max(names, key=lambda one: len(computed[one]))
        (other,) = set(names) - {name}

        def all_are_written() -> bool:
            demoted = metric(stack, name, "host_cache_demoted_prefixes_total")
            return metric(stack, name, "file_cache_written_prefixes_total") == demoted >= NUM_WRITTEN

        stack.wait_until(all_are_written, "what host memory has is written")
        num_written = int(metric(stack, name, "file_cache_written_prefixes_total"))
        pid = stack.kill(name)
        stack.wait_until(lambda: stack.has_restarted(name, pid), "the server is back")
        address = stack.processes()[name].address
        stack.wait_until(lambda: routed_to(stack, address) >= num_written, "the router knows its files")
        others = stack.stats(other)[other].prefill_tokens
        for body in computed[name][:NUM_WRITTEN]:
            cached, tokens = usage(stack, body)
            assert (cached, tokens) == (192, expected[bodies.index(body)])
        assert metric(stack, name, "file_cache_read_prefixes_total") >= NUM_WRITTEN
        assert stack.stats(other)[other].prefill_tokens == others, "no prompt went there"
