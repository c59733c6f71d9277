"""Several router processes on one port: ``twinfang router --workers``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.api.probes import OPEN_PATHS
from router.observe.sibling_metrics import PATH_OF_ONE, merged
from testing.command_lines import BY_NAME, parsed
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_servers import ScriptedDecode, saying, server_info, server_stats
from testing.router.tokenizers import write_model_dir
from twinfang.commands.servers import router_config
from twinfang.process_secret import SECRET_VARIABLE
from twinfang.stack.ports import free_ports
from twinfang.stack.router_processes import plan_processes

NUM_PROCESSES = 2


@pytest.fixture
async def decode():
    server = ScriptedDecode(server_info("both"), script=saying([300, 301]))
    server.stats = server_stats(drafted_by_position=(10,), accepted_by_position=(7,))
    await server.start()
    yield server
    await server.stop()


async def post(url: str, **body) -> httpx.Response:
    """On a connection of its own: the kernel gives each to one of the processes."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        fields = {"prompt": [5, 6, 7], "max_tokens": 2, "return_token_ids": True}
        return await client.post("/v1/completions", json=fields | body)


async def samples(url: str) -> dict[tuple[str, ...], float]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        text = (await client.get("/metrics")).text
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.values()))
            assert key not in found, f"{key} is told twice"
            found[key] = sample.value
    return found


async def test_processes_share_a_port_and_outlive_one_another(tmp_path, decode):
    model = write_model_dir(tmp_path / "tiny")
    (model / "config.json").write_text("{}")
    (port,) = free_ports(1)
    arguments = ["router", "--workers", str(NUM_PROCESSES), "--port", str(port), "--model", str(model)]
    parent = subprocess.Popen([sys.executable, "-m", "twinfang", *arguments, "--decode", decode.address])
    url = f"http://127.0.0.1:{port}"

    async def processes() -> int:
        with suppress(httpx.HTTPError):
            return int((await samples(url)).get(("twinfang_router_processes",), 0))
        return 0

    async def until_all_answer() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while await processes() < NUM_PROCESSES or (await post(url)).status_code != 200:
                await asyncio.sleep(0.05)

    try:
        await until_all_answer()
        before = await samples(url)
        responses = await asyncio.gather(*(post(url) for _ in range(40)))
        assert Counter(response.status_code for response in responses) == {200: 40}
        assert all(response.json()["choices"][0]["token_ids"] == [300, 301] for response in responses)
        now = await samples(url)
        keys = [("twinfang_requests_total", str(i), "completed") for i in range(NUM_PROCESSES)]
        counts = [now.get(key, 0) - before.get(key, 0) for key in keys]
        assert sum(counts) == 40
        assert all(counts), "a process had none of 40 connections"
        assert now["twinfang_spec_decode_num_draft_tokens_total", decode.address] == 10

        children = psutil.Process(parent.pid).children()
        assert len(children) == NUM_PROCESSES
        children[0].kill()
        await until_all_answer()
        assert (await post(url)).status_code == 200
        parent.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(parent.wait, TIMEOUT_S) == 0
        await until(lambda: not any(child.is_running() for child in children))
    finally:
        parent.kill()
        parent.wait()


def test_each_process_is_told_the_same_and_which_one_it_is():
    given = [
        "--model",
        "tiny=twinfang/bundled_model",
        "--alias",
        "gpt-4o=tiny",
        "--decode",
        "a:1",
        "--workers",
        "3",
    ]
    values = parsed(BY_NAME["router"], *given, "--decode-policy", "round_robin", "--name", "edge")
    planned = plan_processes(values, 8123)
    assert [child.name for child in planned] == ["edge-0", "edge-1", "edge-2"]
    for i, child in enumerate(planned):
        told = parsed(BY_NAME["router"], *child.arguments[1:])
        assert (told.port, told.workers, told.place.index) == (8123, 1, i)
        assert child.address == f"127.0.0.1:{told.place.ports[i]}"
        for name in ("model", "alias", "decode", "decode_policy", "request_timeout"):
            assert getattr(told, name) == getattr(values, name)


def test_processes_get_their_secret_by_the_environment_alone(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("x" * 40)
    given = ["--decode", "a:1", "--admin-token-file", str(tmp_path / "token"), "--place", "0:1234,1235"]
    monkeypatch.setenv(SECRET_VARIABLE, "a secret")
    place = router_config(parsed(BY_NAME["router"], *given)).place
    assert place is not None
    assert place.secret == "a secret"
    assert SECRET_VARIABLE not in os.environ, "children of the process would see it"
    assert "a secret" not in f"{place} {place!r}"
    planned = plan_processes(parsed(BY_NAME["router"], *given[:4], "--workers", "2"), 8123)
    assert not any("secret" in argument for child in planned for argument in child.arguments)


def test_figures_of_processes_are_told_apart_and_can_be_summed():
    one = '# TYPE n_total counter\nn_total{outcome="a"} 3.0\n# TYPE g gauge\ng 1.0\n'
    other = one.replace("3.0", "4.0")
    families = {f.name: f for f in text_string_to_metric_families(merged({0: one, 1: other}).decode())}
    told = {(s.labels["outcome"], s.labels["process"]): s.value for s in families["n"].samples}
    assert told == {("a", "0"): 3.0, ("a", "1"): 4.0}
    assert families["n"].type == "counter"
    assert [s.labels for s in families["g"].samples] == [{"process": "0"}, {"process": "1"}]
    assert families["twinfang_router_processes"].samples[0].value == 2


def test_processes_need_no_api_key_to_ask_one_another():
    assert PATH_OF_ONE in OPEN_PATHS
