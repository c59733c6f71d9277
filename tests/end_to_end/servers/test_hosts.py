"""A server whose tensor-parallel ranks are on several hosts. Here, processes on loopback stand for the
hosts."""

import asyncio
import os
import random
import shutil
import signal
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psutil
import pytest

from testing.conditions import wait_until
from testing.engines.speculating import Ask, make_engine, serve
from testing.fleets.clients import all_at_once, greedy_body, http_client, stream
from testing.fleets.fleet import START_DEADLINE_S, Fleet, Process, make_processes, running
from twinfang.cli import INTERRUPTED_EXIT_CODE
from twinfang.stack.ports import LOOPBACK, free_ports
from wire.messages.sampling_params import SamplingParams

pytestmark = pytest.mark.in_clear  # its processes start without a stack


NUM_TOKENS = 10
LONG = 150
LENGTHS = [1, 17, 64, 150]
CAPACITY = (
    *("--max-num-seqs", "8", "--max-model-len", "512", "--cache-memory", "0.05", "--threads", "1"),
    *("--max-batch-tokens", "64", "--log-level", "info"),
)
DECODING = ("--speculative", "2")
SOON_S = 30.0


@dataclass
class Site:
    """A router's URL, as :mod:`testing.fleets.clients` wants it."""

    url: str


def spread(tensor_parallel, hosts=2):
    """Flags of a server that is on so many hosts."""
    address = f"{LOOPBACK}:{free_ports(1)[0]}"
    return ("--tensor-parallel", str(tensor_parallel), "--nnodes", str(hosts), "--dist-init-addr", address)


def host(name, number, folder, *flags):
    """One of the hosts of a decode server, not started."""
    (port,) = free_ports(1)
    own = ("--node-rank", str(number), "--port", str(port), "--metrics-port", "off", "--name", name)
    return Process(name, ("decode", *CAPACITY, *flags, *own), port, folder)


@contextmanager
def started(*processes):
    """No process is left after the block."""
    lifeline = os.pipe()
    try:
        for process in processes:
            process.start(lifeline[0])
        yield
    finally:
        for process in processes:
            if process.is_alive:
                process.kill()
        for fd in lifeline:
            os.close(fd)


def ask(prompt, num_tokens):
    return Ask(tuple(prompt), SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))


def prompts():
    choose = random.Random(9)
    return [[choose.randrange(6, 900) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A prefill server on one host, decode servers on two and on one, a router."""
    flags = spread(4)
    servers = {
        "prefill": ("prefill", *CAPACITY, *DECODING),
        "decode": ("decode", *CAPACITY, *DECODING, *flags, "--node-rank", "0"),
        "other": ("decode", *CAPACITY, *DECODING),
    }
    made = make_processes(
        tmp_path_factory.mktemp("site"), servers, {"router": tuple(servers)}, environment={}
    )
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), *made, behind={"router": tuple(servers)})
    other_host = host("decode-1", 1, tmp_path_factory.mktemp("host"), *DECODING, *flags)
    with started(other_host), running(fleet):
        yield fleet, other_host


def test_answers_are_those_of_one_engine(site, bundled_model):
    fleet, _ = site
    expected = serve(
        make_engine(bundled_model, "none", 0, None, 0), [ask(one, NUM_TOKENS) for one in prompts()]
    )
    bodies = [greedy_body(one, NUM_TOKENS) for one in prompts()] * 2
    answers = asyncio.run(all_at_once(Site(fleet["router"].url), bodies))
    assert [answer.token_ids for answer in answers] == [answer.tokens for answer in expected] * 2
    wait_until(fleet.is_idle, "all blocks, slots and leases are free")
    assert fleet.stats("decode").transfer_bytes > 0, "both decode servers had some of them"


def test_a_host_that_is_told_to_stop_ends_the_server_and_its_answers_go_on_elsewhere(site, bundled_model):
    fleet, other_host = site
    asked = prompts() * 2
    expected = serve(make_engine(bundled_model, "none", 0, None, 0), [ask(one, LONG) for one in prompts()])

    async def answer_all():
        begun = asyncio.Semaphore(0)

        async def follow(client, prompt):
            async for answer in stream(client, greedy_body(prompt, LONG)):
                if len(answer.token_ids) >= 3:
                    begun.release()
            return answer.token_ids

        async with http_client(Site(fleet["router"].url)) as client:
            answers = [asyncio.create_task(follow(client, prompt)) for prompt in asked]
            for _ in asked:
                await asyncio.wait_for(begun.acquire(), SOON_S)
            other_host.handle.send_signal(signal.SIGTERM)
            return await asyncio.gather(*answers)

    assert asyncio.run(answer_all()) == [answer.tokens for answer in expected] * 2
    assert fleet["decode"].handle.wait(SOON_S) == 0, fleet["decode"].log[-2000:]
    assert other_host.handle.wait(SOON_S) == 0, other_host.log[-2000:]
    assert "tensor-parallel rank 2 stops, and so does this one" in fleet["decode"].log


@pytest.mark.parametrize(
    ("signum", "says"),
    [
        (signal.SIGKILL, "tensor-parallel rank 1 on host 1 has ended"),
        pytest.param(
            signal.SIGSTOP,
            "tensor-parallel rank 1 on host 1 has said nothing for",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_rank_that_is_killed_or_frozen_ends_the_server_on_all_hosts(tmp_path, signum, says):
    flags = spread(2)
    first, second = (host(f"host-{i}", i, tmp_path, *flags) for i in range(2))
    with started(first, second):
        wait_until(lambda: "server ready" in first.log, "the server is ready", START_DEADLINE_S)
        os.kill(only_child(second), signum)
        assert first.handle.wait(SOON_S) != 0
        assert says in first.log
        if signum == signal.SIGKILL:
            assert second.handle.wait(SOON_S) != 0
            assert "rank 1 has ended with exit code -9; the server does not go on without it" in second.log


def test_hosts_that_were_told_different_things_refuse_one_another_with_both_values(tmp_path):
    flags = spread(2)
    first, second = (
        host(f"host-{i}", i, tmp_path, *flags, "--block-size", size) for i, size in enumerate(("16", "32"))
    )
    with started(first, second):
        assert first.handle.wait(START_DEADLINE_S) not in (0, None)
        assert second.handle.wait(SOON_S) != 0
    assert "--block-size is 32 on tensor-parallel rank 1 on host 1 and 16 on" in first.log
    assert "Traceback" not in first.log + second.log


@pytest.mark.parametrize(
    ("number", "signum", "waits"),
    [
        (0, signal.SIGINT, "host 0 of 2 waits for the others"),
        (1, signal.SIGTERM, "ranks 1 to 1 of the server"),
    ],
)
def test_a_host_that_waits_for_others_ends_when_it_is_told_to(tmp_path, number, signum, waits):
    (waiting,) = hosts = [host(f"host-{number}", number, tmp_path, *spread(2))]
    with started(*hosts):
        wait_until(lambda: waits in waiting.log, "it waits", START_DEADLINE_S)
        children = psutil.Process(waiting.handle.pid).children(recursive=True)
        waiting.handle.send_signal(signum)
        assert waiting.handle.wait(SOON_S) == INTERRUPTED_EXIT_CODE, waiting.log[-2000:]
        assert "Traceback" not in waiting.log
        assert not psutil.wait_procs(children, SOON_S)[1], "none is left behind"


def only_child(process):
    """The process of a host's rank."""
    children = psutil.Process(process.handle.pid).children()
    (rank,) = (one for one in children if "spawn_main" in " ".join(one.cmdline()))
    return rank.pid


@pytest.mark.exhaustive
def test_each_host_has_files_of_its_own_and_both_are_needed(tmp_path):
    """A prefill server on two hosts is killed and starts again. Then the second host loses its files."""
    small = (
        "--max-num-seqs",
        "2",
        "--max-model-len",
        "256",
        "--cached-states",
        "2",
        "--cache-memory",
        "0.004",
    )
    tiers = (
        "--host-cache-size",
        "64M",
        "--file-cache-size",
        "256M",
        "--file-cache-wait",
        "20",
        "--threads",
        "1",
    )
    flags = (*small, *tiers, *spread(2))
    folders = [tmp_path / "files 0", tmp_path / "files 1"]
    servers = {
        "prefill": ("prefill", *flags, "--node-rank", "0", "--file-cache-dir", str(folders[0])),
        "decode": ("decode", *CAPACITY),
    }
    made = make_processes(tmp_path, servers, {"router": tuple(servers)}, environment={})
    fleet = Fleet(tmp_path, *made, behind={"router": tuple(servers)})
    own = ("--node-rank", "1", "--file-cache-dir", str(folders[1]), "--metrics-port", "off")
    second = Process("prefill-1", ("prefill", *flags, *own, "--port", str(free_ports(1)[0])), 0, tmp_path)
    choose = random.Random(7)
    bodies = [greedy_body([choose.randrange(6, 900) for _ in range(200)], 4) for _ in range(10)]

    def ask_all():
        replies = [
            httpx.post(f"{fleet['router'].url}/v1/completions", json=body, timeout=60.0) for body in bodies
        ]
        usages = [reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
        return [reply.json()["choices"][0]["token_ids"] for reply in replies], usages

    def num_records(folder):
        return sum(path.read_bytes().count(b"TWFRECO\n") for path in folder.glob("*/*.segment"))

    def start_again():
        for process in (fleet["prefill"], second):
            process.kill()
        second.start(fleet.lifeline[0])
        fleet.start("prefill")

    with started(second), running(fleet):
        expected, cached = ask_all()
        assert cached == [0] * len(bodies)
        wait_until(lambda: min(map(num_records, folders)) >= 4, "both hosts write", SOON_S)
        start_again()
        found, cached = ask_all()
        assert found == expected
        assert cached[:4] == [192] * 4
        for process in (fleet["prefill"], second):
            process.kill()
        shutil.rmtree(folders[1])
        start_again()
        assert ask_all() == (expected, [0] * len(bodies))
