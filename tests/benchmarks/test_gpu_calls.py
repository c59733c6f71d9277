"""The calls of `make gpu`, with stub stages: what each leaves behind, and what is run again."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import source
from benchmarks.gpu.__main__ import main, run_stages
from benchmarks.gpu.plan import CALL_S, CALLS, stages
from benchmarks.gpu.record import Record
from benchmarks.gpu.requirements import missing, required
from benchmarks.gpu.stage import LOG_BYTES, SKIPPED, TAIL_BYTES, UNFINISHED, Stage, run
from testing.conditions import wait_until
from testing.repository import ROOT

HEADER = {"call": 1, "commit": "c", "source": "s", "device": {"name": "G", "torch": "1", "triton": "2"}}
WRITES_FIGURES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"ms\": 3}'); print('measured')"
GOES_ON = "import time; print('begun', flush=True); time.sleep(600)"


def stub(code, *arguments, name="stub", limit_s=30.0, **fields):
    return Stage(name, "stub", limit_s, ("-c", code, *map(str, arguments)), **fields)


@pytest.fixture
def log(tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    with open(tmp_path / "log", "wb") as file:
        yield file


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid_file):
    wait_until(lambda: not is_running(int(pid_file.read_text())), "the stage's child is gone")


# --- one stage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("print('fine')", "ok"),
        ("raise SystemExit('a fault')", "exit code 1"),
        (f"raise SystemExit({SKIPPED})", "skipped"),
        (f"raise SystemExit({UNFINISHED})", "unfinished"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import os, signal; os.killpg(0, signal.SIGKILL)", "killed by SIGKILL"),
    ],
)
def test_the_verdict_says_how_a_stage_ended(log, code, verdict):
    assert run(stub(code), 30, log).verdict == verdict


def test_a_stage_that_hangs_is_asked_to_end_and_shows_what_it_had(log):
    code = f"try:\n    {GOES_ON}\nexcept KeyboardInterrupt:\n    print('so far: 3 failed')"
    outcome = run(stub(code), 1.0, log)
    assert outcome.verdict == "stopped after 1 s"
    assert outcome.is_failure
    assert outcome.tail.split() == ["begun", "so", "far:", "3", "failed"]


def test_a_stage_that_ignores_the_request_is_killed(log, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.stage.GRACE_S", 0.2)
    began = time.monotonic()
    outcome = run(stub(f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {GOES_ON}"), 1.0, log)
    assert outcome.verdict == "stopped after 1 s"
    assert time.monotonic() - began < 30


def test_megabytes_of_output_are_cut_to_a_beginning_and_an_end(log):
    code = "print('first'); [print('x' * 1023) for _ in range(8192)]; print('last')"
    outcome = run(stub(code), 60, log)
    assert outcome.verdict == "ok"
    assert len(outcome.tail) == TAIL_BYTES
    assert outcome.tail.endswith("x\nlast\n")
    text = Path(log.name).read_text()
    assert "\nfirst\n" in text
    assert text.endswith("x\nlast\n")
    assert "bytes left out" in text
    assert len(text) < LOG_BYTES + TAIL_BYTES + 1000


@pytest.mark.parametrize("session", ["start_new_session=False", "start_new_session=True"])
@pytest.mark.parametrize("end", ["", "; time.sleep(600)"])
def test_children_end_with_their_stage_whatever_session_they_are_in(tmp_path, log, session, end):
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], {session})\n"
        f"pathlib.Path(sys.argv[1]).write_text(str(child.pid)){end}"
    )
    began = time.monotonic()
    outcome = run(stub(code, tmp_path / "pid"), 2.0, log)
    assert outcome.verdict == ("stopped after 2 s" if end else "ok")
    assert time.monotonic() - began < 30
    wait_until_gone(tmp_path / "pid")


def test_a_stage_that_can_not_run_here_is_skipped_and_says_why(log):
    outcome = run(stub("raise SystemExit(1)", missing="no such tool"), 30, log)
    assert (outcome.verdict, outcome.tail) == ("skipped", "no such tool")


def test_a_stage_learns_in_what_time_it_ends_by_itself(log):
    assert run(stub("import sys; print(sys.argv[1])", "{seconds}"), 20, log).tail == "18\n"


def test_only_its_own_stage_sees_a_folder_of_packages(tmp_path, log):
    (tmp_path / "peer_of_a_stage.py").write_text("")
    assert run(stub("import peer_of_a_stage", path=tmp_path), 30, log).verdict == "ok"
    assert run(stub("import peer_of_a_stage"), 30, log).verdict == "exit code 1"


# --- one call --------------------------------------------------------------------------------------


class Call:
    """Calls with the same folder and stub stages."""

    def __init__(self, folder):
        self.path = folder / "gpu-1.json"
        self.figures = folder / "gpu-1.figures.json"
        self._log = open(folder / "gpu-1.log", "ab")  # noqa: SIM115

    def run(self, *plan, header=HEADER, total_s=60.0):
        return run_stages(plan, Record(self.path, header), self.figures, self._log, total_s=total_s)

    def stages(self):
        return json.loads(self.path.read_text())["stages"]

    def verdicts(self):
        return {name: stage["verdict"] for name, stage in self.stages().items()}


@pytest.fixture
def call(tmp_path):
    return Call(tmp_path)


def counting(path, name="counted", code="", *arguments):
    """A stage that notes each time it is run."""
    return stub(f"import sys; open(sys.argv[1], 'a').write('.')\n{code}", path, *arguments, name=name)


def test_a_failed_stage_does_not_prevent_the_next_and_is_named(call):
    plan = [stub("raise SystemExit('broken')", name="a"), stub(WRITES_FIGURES, call.figures, name="b")]
    assert call.run(*plan) == ["a"]
    assert call.verdicts() == {"a": "exit code 1", "b": "ok"}
    assert call.stages()["a"]["output"] == ["broken"]
    assert call.stages()["b"]["figures"] == {"ms": 3}
    assert not call.figures.exists()


def test_the_file_says_where_and_of_what_the_figures_are(call):
    call.run(stub(WRITES_FIGURES, call.figures))
    content = json.loads(call.path.read_text())
    assert {name: content[name] for name in HEADER} == HEADER


def test_figures_of_a_stage_that_was_stopped_are_kept_and_those_of_another_are_not_mixed_in(call):
    stopped = stub(f"{WRITES_FIGURES}; {GOES_ON}", call.figures, name="stopped", limit_s=2.0)
    call.run(stopped, stub("pass", name="without figures"))
    assert call.stages()["stopped"]["figures"] == {"ms": 3}
    assert call.stages()["without figures"]["figures"] is None


def test_only_what_was_not_ok_is_run_again(call, tmp_path):
    plan = [
        counting(tmp_path / "ok", "ok"),
        counting(tmp_path / "failed", "failed", "raise SystemExit(1)"),
        counting(tmp_path / "skipped", "skipped", f"raise SystemExit({SKIPPED})"),
        counting(tmp_path / "unfinished", "unfinished", f"raise SystemExit({UNFINISHED})"),
    ]
    assert call.run(*plan) == call.run(*plan) == ["failed"]
    runs = {stage.name: len((tmp_path / stage.name).read_text()) for stage in plan}
    assert runs == {"ok": 1, "failed": 2, "skipped": 2, "unfinished": 2}


@pytest.mark.parametrize(
    "changed",
    [
        {"source": "another"},
        {"device": {**HEADER["device"], "name": "another"}},
        {"device": {**HEADER["device"], "torch": "another"}},
    ],
)
def test_results_of_another_source_or_device_are_not_reused(call, tmp_path, changed):
    call.run(counting(tmp_path / "runs"))
    call.run(counting(tmp_path / "runs"), header=HEADER | changed)
    assert (tmp_path / "runs").read_text() == ".."


def test_an_unknown_commit_and_more_facts_of_the_machine_do_not_matter(call, tmp_path):
    call.run(counting(tmp_path / "runs"))
    call.run(counting(tmp_path / "runs"), header=HEADER | {"commit": "unknown", "machine": {"cores": 3}})
    assert (tmp_path / "runs").read_text() == "."


def test_a_damaged_file_is_as_good_as_none(call, tmp_path):
    call.path.write_text('{"stages": {"counted"')
    call.run(counting(tmp_path / "runs"))
    assert call.verdicts() == {"counted": "ok"}


def test_when_time_is_over_the_rest_is_reported_and_can_be_run_later(call, tmp_path):
    plan = [stub("import time; time.sleep(1.5)", name="a"), counting(tmp_path / "runs", "b")]
    assert call.run(*plan, total_s=6.0) == ["b"]
    assert call.verdicts() == {"a": "ok", "b": "no time left"}
    assert call.run(*plan) == []
    assert call.verdicts() == {"a": "ok", "b": "ok"}


@pytest.mark.parametrize("cut", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_cut_off_loses_only_the_stage_in_progress(tmp_path, cut):
    """In a process of its own, which is killed in its second stage."""
    code = f"""
import signal, sys, pathlib
from tests.benchmarks.test_gpu_calls import *
signal.signal(signal.SIGTERM, signal.default_int_handler)
call = Call(pathlib.Path(sys.argv[1]))
child = "import os; open(sys.argv[2], 'w').write(str(os.getpid())); "
call.run(stub(WRITES_FIGURES, call.figures, name="a"),
         stub("import sys;" + child + {GOES_ON!r}, call.figures, sys.argv[2], name="b"))
"""
    arguments = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "pid")]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid_file = tmp_path / "pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the second stage runs", 60)
    process.send_signal(cut)
    process.wait(30)
    try:
        call = Call(tmp_path)
        assert call.verdicts() == {"a": "ok"}
        if cut == signal.SIGTERM:
            wait_until_gone(pid_file)
        assert call.run(counting(tmp_path / "runs", "a"), stub("pass", name="b")) == []
        assert not (tmp_path / "runs").exists()
    finally:
        if is_running(pid := int(pid_file.read_text())):
            os.kill(pid, 9)


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """Runs `python -m benchmarks.gpu` as on a machine with a GPU, with two stub stages a call."""

    def plan(call, out, figures, peers):
        return [
            stub(WRITES_FIGURES, figures, name=f"a{call}"),
            counting(out / "broken", f"b{call}", "raise SystemExit(int(sys.argv[2] == '2'))", call),
        ]

    def run_main(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--out", str(tmp_path), *arguments])
        try:
            main()
        except SystemExit as end:
            return end.code
        return None

    monkeypatch.setattr("benchmarks.gpu.__main__.device_facts", lambda: HEADER["device"])
    monkeypatch.setattr("benchmarks.gpu.__main__.stages", plan)
    before = signal.getsignal(signal.SIGTERM)
    yield run_main
    signal.signal(signal.SIGTERM, before)


def test_all_three_calls_run_one_after_the_other_and_leave_a_file_each(on_a_gpu, tmp_path, capsys):
    assert on_a_gpu() == "not ok: b2"
    for call in CALLS:
        content = json.loads((tmp_path / f"gpu-{call}.json").read_text())
        assert content["call"] == call
        assert content["device"] == HEADER["device"]
        assert content["source"] == source.source_hash()
        assert content["machine"]["python"]
        assert content["commit"]
        verdicts = {name: stage["verdict"] for name, stage in content["stages"].items()}
        assert verdicts == {f"a{call}": "ok", f"b{call}": "exit code 1" if call == 2 else "ok"}
        assert content["stages"][f"a{call}"]["figures"] == {"ms": 3}
    names = {f"gpu-{call}.{kind}" for call in CALLS for kind in ("json", "log")} | {"broken"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "b2: exit code 1, 0 s" in capsys.readouterr().out


def test_one_call_alone_runs_its_stages_and_no_others(on_a_gpu, tmp_path):
    assert on_a_gpu("--call", "3") is None
    assert [path.name for path in tmp_path.glob("*.json")] == ["gpu-3.json"]


# --- the plan --------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("call", CALLS)
def test_without_a_gpu_a_call_ends_at_once_with_one_line(tmp_path, call):
    command = [sys.executable, "-m", "benchmarks.gpu", "--call", str(call), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("make gpu needs a GPU: torch ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", CALLS)
def test_stages_have_names_of_their_own_and_modules_and_tests_that_exist(tmp_path, call):
    plan = stages(call, tmp_path, tmp_path / "figures.json", None)
    assert len({stage.name for stage in plan}) == len(plan)
    for stage in plan:
        assert 0 < stage.limit_s <= CALL_S
        module = stage.arguments[1].replace(".", "/")
        ours = stage.arguments[1] == "pytest" or (ROOT / f"{module}.py").exists() or (ROOT / module).is_dir()
        assert ours, stage.arguments
        assert all((ROOT / one).exists() for one in stage.arguments if one.startswith("tests/"))


@pytest.mark.parametrize("call", CALLS)
def test_modules_of_stages_take_their_options(tmp_path, call):
    """A stage whose options its module refuses would cost minutes of a GPU."""
    for stage in stages(call, tmp_path, tmp_path / "figures.json", None):
        _, name, *arguments = stage.command(100.0)[-len(stage.arguments) :]
        if name != "pytest":
            name += ".__main__" if (ROOT / name.replace(".", "/")).is_dir() else ""
            importlib.import_module(name).parser().parse_args(arguments)


def test_the_source_is_known_by_its_content_and_not_by_its_documents(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("a = 1\n")
    before = source.source_hash(tmp_path)
    (tmp_path / "engine" / "tiles.json").write_text("{}")
    assert source.source_hash(tmp_path) == before
    (tmp_path / "engine" / "a.py").write_text("a = 2\n")
    assert source.source_hash(tmp_path) != before


def test_the_commit_may_be_named_where_there_is_no_repository(monkeypatch):
    monkeypatch.setenv(source.COMMIT, "abc")
    assert source.commit() == "abc"
    monkeypatch.delenv(source.COMMIT)
    monkeypatch.setattr(source, "ROOT", Path("/"))
    assert source.commit() == "unknown"


def test_what_the_calls_require_has_a_version_that_the_project_is_tested_with():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in text.splitlines()}
    assert len(required()) > 30
    assert set(required()) <= pinned
    assert missing() == []
