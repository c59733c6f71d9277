"""``twinfang batch`` as a user meets it: what is refused, what is said, exit codes, signals."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading

import psutil
import pytest

from testing.batch_files import check_each_once, lines, num_lines, request, write_requests
from testing.conditions import wait_until
from testing.fleets.stack import running_stack
from testing.openai_endpoint import Reply, openai_endpoint
from twinfang.cli import main

SMALL = ("--cache-memory", "0.1", "--max-model-len", "512")
TIMEOUT_S = 60.0
NOBODY = "http://127.0.0.1:1"


def answered(call):
    return Reply(200, {"object": "response", "usage": {"output_tokens": 1}})


@pytest.fixture
def files(tmp_path):
    """An input of nine requests, and the flags that name it and an output."""
    source = write_requests(tmp_path / "in.jsonl", map(request, range(9)))
    return [str(source), "--output", str(tmp_path / "out.jsonl")]


def start(*arguments, **options):
    command = [sys.executable, "-m", "twinfang", "batch", *arguments]
    return subprocess.Popen(command, **{"stdin": subprocess.DEVNULL} | options)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda files: files[:1], ["IN.jsonl --output OUT.jsonl"]),
        (lambda files: files[1:], ["IN.jsonl --output OUT.jsonl"]),
        (lambda files: [*files[:2], files[0]], ["--output", "is the input"]),
        (lambda files: [*files, "--errors", files[0]], ["--errors", "is the input"]),
        (lambda files: ["/nowhere", *files[1:]], ["--input", "/nowhere"]),
        (lambda files: [*files, "--base-url", NOBODY, "--block-size", "32"], ["--block-size", "--base-url"]),
        (lambda files: [*files, "--base-url", "http://me:secret@host"], ["--base-url", "--api-key-file"]),
        (lambda files: [*files, "--base-url", NOBODY, "--concurrency", "2000"], ["--concurrency", "1024"]),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(files, change, named, capsys):
    assert main(["batch", *change(files)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in named)


def test_what_can_not_start_is_one_line_and_exit_code_1(files, capsys, tmp_path):
    assert main(["batch", *files, "--base-url", NOBODY]) == 1
    assert "can't connect to http://127.0.0.1:1/v1" in capsys.readouterr().err
    with openai_endpoint(answered, owner="twinfang") as endpoint:
        assert main(["batch", *files, "--base-url", endpoint.url]) == 1
    said = capsys.readouterr().err
    assert "line 1 of " in said
    assert "asks for model 'bundled_model'; served are: large, small" in said
    assert "--alias bundled_model=large" in said
    write_requests(tmp_path / "in.jsonl", [request(0), request(0)])
    assert main(["batch", *files, "--base-url", endpoint.url]) == 1
    assert "lines 1 and 2 have the same custom_id 'line-0'" in capsys.readouterr().err


def test_only_a_router_of_ours_gets_a_priority_unless_one_is_given(files, tmp_path):
    def priorities(*flags, owner="somebody"):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        with openai_endpoint(answered, owner=owner) as endpoint:
            endpoint.models[0]["id"] = "bundled_model"
            assert main(["batch", *files, "--base-url", endpoint.url, *flags]) == 0
        return {call.body.get("priority") for call in endpoint.calls}

    assert priorities() == {None}
    assert priorities("--priority", "7") == {7}
    assert priorities(owner="twinfang") == {100}
    assert priorities("--priority", "-7", owner="twinfang") == {-7}


def test_progress_is_lines_and_errors_are_counted(files, tmp_path):
    """In a process of its own: here, a warning about what another test left would be a line more."""

    def answer(call):
        return Reply(400, {"error": {"message": "no"}}) if call.path == "/v1/responses" else answered(call)

    with openai_endpoint(answer) as endpoint:
        batch = start(*files, "--base-url", endpoint.url, stderr=subprocess.PIPE, text=True)
        said = batch.communicate(timeout=TIMEOUT_S)[1].splitlines()
    assert batch.returncode == 0
    first, *progress, answers, errors = said  # one line more for each ten seconds that a disk takes
    assert first == "0 of 9 lines (0.0 %), 0 errors"
    rates = r"[\d,.]+ lines/s, [\d,]+ tokens/s"
    assert re.fullmatch(rf"9 of 9 lines \(100\.0 %\), 3 errors, {rates}", progress[-1])
    assert all(re.match(r"\d of 9 lines \(", line) for line in progress)
    assert answers == f"6 answers of 9 lines in {tmp_path / 'out.jsonl'}"
    assert errors.startswith(f"3 errors in {tmp_path / 'out.errors.jsonl'}; to try these lines again, remove")


def test_ctrl_c_on_a_terminal_ends_it_with_exit_code_3(files, tmp_path):
    may_answer = threading.Event()
    main_side, side = pty.openpty()
    termios.tcsetwinsize(side, (24, 100))
    with openai_endpoint(lambda call: may_answer.wait(TIMEOUT_S) and answered(call)) as endpoint:
        batch = start(*files, "--base-url", endpoint.url, "--concurrency", "2", stdout=side, stderr=side)
        os.close(side)
        try:
            wait_until(lambda: endpoint.num_running == 2, "all that may run are sent", TIMEOUT_S)
            batch.send_signal(signal.SIGINT)
            shown = b""
            while b"stopping when" not in shown:
                shown += os.read(main_side, 65536)
            may_answer.set()
            while b"again to" not in shown:
                shown += os.read(main_side, 65536)
            assert batch.wait(TIMEOUT_S) == 3
        finally:
            batch.kill()
            batch.wait()
            os.close(main_side)
        assert re.search(r" 22% \|█+\S* *\| 2/9 lines ", shown.decode())
        assert b"7 of 9 lines have no answer yet: run the same command again to" in shown
        assert main(["batch", *files, "--base-url", endpoint.url]) == 0
    assert sorted(line["custom_id"] for line in lines(tmp_path / "out.jsonl")) == [
        f"line-{number}" for number in range(9)
    ]


@pytest.mark.exhaustive
def test_a_stopped_batch_stops_its_stack_and_the_next_one_continues(tmp_path):
    requests = [request(number) for number in range(400)]
    files = [str(write_requests(tmp_path / "in.jsonl", requests)), "--output", str(tmp_path / "out.jsonl")]
    batch = start(*files, *SMALL, "--concurrency", "4")
    try:
        wait_until(lambda: num_lines(tmp_path / "out.jsonl") > 20, "lines are answered", TIMEOUT_S)
        children = psutil.Process(batch.pid).children()
        batch.send_signal(signal.SIGTERM)
        assert batch.wait(TIMEOUT_S) == 3
        assert not any(child.is_running() for child in children)
    finally:
        batch.kill()
        batch.wait()
    assert start(*files, *SMALL, "--alias", "other=bundled_model").wait(2 * TIMEOUT_S) == 0
    check_each_once(requests, lines(tmp_path / "out.jsonl"))


@pytest.mark.exhaustive
def test_servers_and_the_router_are_killed_and_no_line_is_lost(tmp_path):
    requests = [request(number) for number in range(1500)]
    files = [str(write_requests(tmp_path / "in.jsonl", requests)), "--output", str(tmp_path / "out.jsonl")]
    with running_stack("up", "--decode", "2", *SMALL) as stack:
        batch = start(*files, "--base-url", stack.url)
        try:
            for number, name in enumerate(("decode-0", "router", "prefill-0", "router"), start=1):
                wait_until(
                    lambda least=200 * number: num_lines(tmp_path / "out.jsonl") >= least,
                    "more lines are answered",
                    TIMEOUT_S,
                )
                stack.kill(name)
            assert batch.wait(3 * TIMEOUT_S) == 0
        finally:
            batch.kill()
            batch.wait()
    check_each_once(requests, lines(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.errors.jsonl").exists()
