"""The command line as a user meets it: real processes, exit codes, what is printed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from testing.conditions import wait_until
from testing.repository import project_version
from twinfang.commands.table import COMMANDS
from twinfang.stack.ports import free_ports

TIMEOUT_S = 60


def twinfang(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "twinfang", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | environment,
        check=False,
    )


def loaded_modules(*arguments: str) -> set[str]:
    """Modules that ``twinfang ARGUMENTS`` has loaded when it ends."""
    code = (
        "import sys\nfrom twinfang.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print('LOADED', *sys.modules, flush=True)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return set(ran.stdout.rpartition("LOADED ")[2].split())


def test_the_version_is_printed():
    ran = twinfang("--version")
    assert ran.returncode == 0
    assert ran.stdout == f"twinfang {project_version()}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_every_flag_with_its_default_and_an_example(command):
    ran = twinfang(command.name, "--help")
    assert ran.returncode == 0
    text = " ".join(ran.stdout.split())
    for group in command.groups:
        for flag in group.flags:
            if flag.is_internal:
                continue
            assert f"{flag.name} {flag.metavar}" in text
            assert " ".join(flag.described.split()) in text
    assert command.example in ran.stdout
    assert "lifeline" not in ran.stdout


def test_help_loads_no_torch_no_grpc_and_no_http_server():
    assert not {"torch", "grpc", "fastapi", "numpy"} & loaded_modules("up", "--help")


def test_where_there_is_no_torch_a_server_says_so_in_one_line():
    """As in the container image of routers."""
    code = (
        "import sys\nfrom twinfang.cli import main\nsys.modules['torch'] = None\n"
        "sys.exit(main(['decode', '--device', 'cpu']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 1
    assert ran.stderr.startswith("twinfang decode: error: the package torch is not installed")
    assert ran.stderr.count("\n") == 1


def test_the_router_loads_no_torch(bundled_model: Path):
    with socket.socket() as taken:  # so that it ends right after it has loaded everything
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        loaded = loaded_modules("router", "--decode", "127.0.0.1:1", "--port", port)
    assert "fastapi" in loaded
    assert not {"torch", "numba", "nixl"} & loaded


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["up", "--port", "99999"], ["--port", "99999", "65535"]),
        (["up", "--prefill", "0"], ["--prefill", "0", "from 1"]),
        (["serve", "--cache-memory", "lots"], ["--cache-memory", "lots", "GiB"]),
        (["decode", "--dtype", "float16"], ["--dtype", "float16", "float32 or bfloat16"]),
        (["decode", "--model", "/nowhere"], ["--model", "/nowhere", "directory"]),
        (["decode", "--model", "/"], ["--model", "config.json"]),
        (["router", "--decode", "somewhere"], ["--decode", "somewhere", "host:port"]),
        (["router"], ["--decode"]),
        (["router", "--decode", "a:1", "--decode", "a:1"], ["a:1", "twice"]),
        (["prefill", "--host", "0.0.0.0"], ["--host", "0.0.0.0", "--advertise-host"]),
        (["decode", "--host", "0.0.0.0"], ["--host", "0.0.0.0", "--advertise-host"]),
        (["prefill", "--max-num-seqs", "9", "--max-batch-tokens", "8"], ["--max-num-seqs 9", "raise"]),
        (["up", "--speed", "high"], ["--speed", "twinfang up --help"]),
        (["up", "--status-file", "/nowhere/status"], ["--status-file", "/nowhere"]),
        (["fly"], ["fly", "up", "serve"]),
        ([], ["COMMAND"]),
    ],
    ids=" ".join,
)
def test_a_bad_value_is_one_line_and_exit_code_2(arguments, named):
    ran = twinfang(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    for part in named:
        assert part in ran.stderr


def test_a_bad_variable_is_named():
    ran = twinfang("up", TWINFANG_BLOCK_SIZE="none")
    assert ran.returncode == 2
    assert "TWINFANG_BLOCK_SIZE 'none'" in ran.stderr


def test_a_port_that_is_taken_is_refused_before_anything_is_started():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ran = twinfang("up", "--port", port)
    assert ran.returncode == 2
    assert f"--port {port}" in ran.stderr
    assert "choose another" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_an_error_at_start_ends_with_its_message_and_exit_code_1(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    ran = twinfang("router", "--model", str(tmp_path), "--decode", "127.0.0.1:1")
    assert ran.returncode == 1
    assert "tokenizer.json" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_router_that_is_asked_to_stop_exits_with_0(signum: signal.Signals):
    port = free_ports(1)[0]
    router = subprocess.Popen(
        [sys.executable, "-m", "twinfang", "router", "--decode", "127.0.0.1:1", "--port", str(port)],
        stderr=subprocess.DEVNULL,
    )
    try:
        with socket.socket() as probe:
            wait_until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, "it listens", TIMEOUT_S)
        router.send_signal(signum)
        assert router.wait(TIMEOUT_S) == 0
    finally:
        router.kill()
        router.wait()
