"""``twinfang up`` and ``serve`` as real processes: ready, restarted, stopped, and nothing left behind."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from router.config import ModelSource
from router.models.folder import ModelFolder
from testing.fleets import endless
from testing.fleets.fleet import START_DEADLINE_S
from testing.fleets.stack import Stack, Stacks, running_stack, start_stack
from twinfang.cli import main
from twinfang.stack.child import Child
from wire.errors import ConfigError, ModelLoadError, UnavailableError

TIMEOUT_S = 60.0
PROMPT = "def fibonacci(n):"
SMALL = ("--cache-memory", "0.1", "--max-model-len", "512")


def complete(stack: Stack) -> str:
    """A greedy answer."""
    body = {"model": stack.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def is_gone(pid: int) -> bool:
    """It has ended; its parent may not have asked for the exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_up_and_serve_give_the_same_answer(stacks: Stacks):
    pair, single = stacks("up", *SMALL), stacks("serve", *SMALL)
    assert complete(pair) == complete(single)
    assert set(pair.processes()) == {"prefill-0", "decode-0", "router"}
    assert set(single.processes()) == {"both-0", "router"}
    assert pair.stats()["decode-0"].transfer_bytes > 0
    pair.wait_until(pair.is_idle, "every block, slot and lease is free again")


def test_progress_is_a_line_for_each_process_then_a_curl_that_works(stacks: Stacks):
    stack = stacks("up", *SMALL)
    for name, process in stack.processes().items():
        assert re.search(
            rf"^{name} +ready after [\d.]+ s +{process.address} +pid {process.pid}$", stack.log, re.M
        )
    curl = re.search(r"^  curl -N .*\\\n.*$", stack.log, re.M)
    assert curl is not None
    command = ["bash", "-c", curl[0]]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert ran.stdout.rstrip().endswith("data: [DONE]")
    pages = dict(re.findall(r"^  metrics +(\S+) +(\S+)$", stack.log, re.M))
    assert set(pages.values()) == {"router", "prefill-0", "decode-0"}
    assert all(httpx.get(url, timeout=TIMEOUT_S).status_code == 200 for url in pages)
    assert re.search(r"^  dashboard +with --admin-token-file FILE", stack.log, re.M)


@pytest.mark.exhaustive
def test_several_servers_of_a_role_share_the_work():
    in_turn = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin")
    with running_stack("up", "--prefill", "2", "--decode", "2", *in_turn, *SMALL) as stack:
        assert len({complete(stack) for _ in range(4)}) == 1
        stats = stack.stats()
        assert set(stats) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
        assert all(server.prefill_tokens + server.decode_tokens > 0 for server in stats.values())


def test_a_killed_server_comes_back_and_nothing_outlives_a_killed_supervisor():
    with running_stack("up", *SMALL) as stack:
        assert stack.log.count("loaded before this process was forked") == 2, "weights are loaded once"
        answer = complete(stack)
        for name in ("decode-0", "prefill-0", "router"):
            old_pid = stack.kill(name)
            restarted = partial(stack.has_restarted, name, old_pid)
            stack.wait_until(restarted, f"{name} is restarted", START_DEADLINE_S)
            assert complete(stack) == answer
        assert re.search(r"child died: name=decode-0 exit=SIGKILL restarts=1", stack.log)

        processes = stack.processes().values()
        stack.supervisor.kill()
        stack.supervisor.wait(TIMEOUT_S)
        for process in processes:
            stack.wait_until(lambda pid=process.pid: is_gone(pid), f"{process.name} has ended")
            assert is_free(process.address)


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_signal_stops_everything_with_exit_code_0(signum: signal.Signals):
    with running_stack("serve", *SMALL) as stack:
        processes = stack.processes().values()
        stack.supervisor.send_signal(signum)
        assert stack.supervisor.wait(TIMEOUT_S) == 0
        assert all(is_gone(process.pid) for process in processes)
        assert all(is_free(process.address) for process in processes)
        assert stack.status() == {}, "the status file is removed"
        assert stack.log.rstrip().endswith("stopped")


def test_a_signal_while_it_starts_stops_everything(tmp_path: Path):
    stack = start_stack(tmp_path, "up", *SMALL)
    children = psutil.Process(stack.supervisor.pid)
    stack.wait_until(lambda: len(children.children()) == 3, "servers and router are being started")
    pids = [child.pid for child in children.children()]
    stack.supervisor.send_signal(signal.SIGTERM)
    assert stack.supervisor.wait(TIMEOUT_S) == 0
    assert all(is_gone(pid) for pid in pids)


def test_an_idle_stack_stops_without_a_kill_however_long_its_interpreters_would_take():
    """They would take for ever here; on a busy machine they took longer than their grace."""
    with running_stack("up", *SMALL, module=endless.MODULE) as stack:
        complete(stack)
        assert stack.stop() == 0
        assert "was killed" not in stack.log
        assert "was told to stop and ended with" not in stack.log


BROKEN = {
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "chat template": lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"),
    "generation config": lambda folder: (folder / "generation_config.json").write_text('{"top_p": "x"}'),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(
    "command", [("up",), ("serve",), ("router", "--decode", "127.0.0.1:1", "--workers", "2")], ids=" ".join
)
def test_what_is_wrong_with_a_model_s_files_is_said_before_any_process_starts(
    tmp_path, bundled_model, monkeypatch, capsys, command, broken
):
    folder = tmp_path / "model"
    shutil.copytree(bundled_model, folder)
    BROKEN[broken](folder)
    with pytest.raises(ModelLoadError) as refused:
        ModelFolder.read(ModelSource("model", folder))
    started: list[Child] = []

    async def start(child: Child, **_: Any) -> None:
        started.append(child)
        raise ConfigError("a process was started")

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr("twinfang.cli.configure_logs", lambda *_: None)  # this process's logs are pytest's
    assert main([*command, "--port", "0", "--model", str(folder)]) == 1
    assert capsys.readouterr().err == f"twinfang {command[0]}: error: {refused.value.message}\n"
    assert not started


def test_a_server_that_can_not_start_ends_the_stack_with_its_reason(tmp_path: Path):
    stack = start_stack(tmp_path, "up", "--cache-memory", "0.0001")
    with pytest.raises(UnavailableError):
        stack.wait_until_ready(START_DEADLINE_S)
    assert stack.supervisor.returncode == 1
    assert re.search(r"^(prefill|decode)-0: error: .*--cache-memory", stack.log, re.M)
    assert re.search(r"^twinfang up: error: (prefill|decode)-0 could not start", stack.log, re.M)
    assert "Traceback" not in stack.log


@pytest.mark.exhaustive
def test_a_stack_with_an_admin_token_says_where_its_dashboard_is(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("a-token-for-tests-0123456789\n")
    with running_stack("serve", *SMALL, "--admin-token-file", str(token)) as stack:
        (url,) = re.findall(rf"^  dashboard +(\S+) +asks for the token in {token}$", stack.log, re.M)
        assert httpx.get(url, timeout=TIMEOUT_S, follow_redirects=True).status_code == 200


@pytest.mark.exhaustive
def test_flags_in_the_environment_are_for_the_stack_not_for_its_children():
    environment = {
        "TWINFANG_MAX_MODEL_LEN": "256",
        "TWINFANG_CACHE_MEMORY": "0.1",
        "TWINFANG_SERVED_MODEL_NAME": "from-the-environment",
        "TWINFANG_PREFILL": "1",  # a count for `up`, an address for the router
        "TWINFANG_ADVERTISE_HOST": "203.0.113.1",
    }
    with running_stack("up", environment=environment) as stack:
        model = httpx.get(f"{stack.url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]
        assert (model["id"], model["max_model_len"]) == ("from-the-environment", 256)
        assert complete(stack)
