"""The stages of `make gpu` that have code of their own, as far as a CPU can run them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import handoffs, step_checks, waits
from benchmarks.gpu.handoffs import read_methods
from benchmarks.gpu.publish import merged
from benchmarks.steps.device_kernels import KEPT, REST, Kernel, longest
from benchmarks.steps.limit import _loads
from benchmarks.steps.limit_report import table
from benchmarks.steps.measured_steps import SAMPLING
from benchmarks.steps.model_shape import configuration, write_configuration
from engine.cost.weight_size import weight_bytes
from engine.models import read_config
from testing.repository import ROOT

CPU = torch.device("cpu")


# --- step checks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = write_configuration("2m", tmp_path_factory.mktemp("model"), max_model_len=512)
    return step_checks.make_engine(directory, 3, "cpu")


class AllCaptured:
    """Stands for graphs of all sizes and kinds; a CPU has none."""

    num_asked = 0

    def __bool__(self):
        self.num_asked += 1
        return True


def test_steps_launched_singly_give_the_tokens_of_the_engine(engine, monkeypatch):
    captured = AllCaptured()
    graphs = engine._runner._graphs
    monkeypatch.setattr(graphs, "_captured", captured)
    monkeypatch.setattr(graphs, "_logits", graphs._program.empty_logits(step_checks.ROWS), raising=False)
    monkeypatch.setattr(graphs, "replay", lambda *_: None)
    monkeypatch.setattr(engine._runner, "_recorded", None)  # a GPU has no recorded steps
    found = step_checks.check(engine, "2m", "top-p", 12)
    assert captured.num_asked > 10
    assert found.steps > 10
    assert (found.num_different, found.num_different_without_graphs, found.num_different_alone) == (0, 0, 0)
    assert (found.failed, list(found.faults())) == ([], [])


def test_other_tokens_a_wait_and_a_step_without_a_graph_are_faults(engine, monkeypatch):
    def shifted(engine):
        launch = engine._runner._program._sampler.sample

        def sample(*args):
            token_ids, is_finite = launch(*args)
            return (token_ids + 1) % 500, is_finite

        monkeypatch.setattr(engine._runner._program._sampler, "sample", sample)
        return lambda *_: None

    monkeypatch.setattr(step_checks, "launch_singly", shifted)
    found = step_checks.check(engine, "2m", "greedy", 4)
    assert found.num_different == 4
    assert found.different[0].startswith("request 0 at token 0: ")
    (fault,) = found.faults()
    assert fault == "2m, k = 3, greedy: 4 answers of graphs differ from single launches"
    changes = {"num_different": 0, "waits": {"engine/a.py:1 f": 2}, "graph_steps": found.steps - 1}
    waited, eager = step_checks.replace(found, **changes).faults()
    assert "the host waited at engine/a.py:1 f" in waited
    assert f"1 of {found.steps} decode steps had no graph" in eager


def test_a_wait_is_found_at_the_line_of_ours_that_makes_it():
    with waits.watched(CPU) as found:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (function memcpy_and_sync)", stacklevel=1)
        warnings.warn("of something else", stacklevel=1)
    ((place, count),) = found.items()
    assert place.startswith("tests/benchmarks/test_gpu_stages.py:")
    assert place.endswith(" test_a_wait_is_found_at_the_line_of_ours_that_makes_it")
    assert count == 3


def test_an_engine_that_fails_does_not_prevent_the_next(tmp_path, monkeypatch):
    def fail(directory, num_drafts, device, speculative_state):
        raise RuntimeError(f"no engine with {num_drafts}")

    monkeypatch.setattr(step_checks, "make_engine", fail)
    options = step_checks.parser().parse_args(["--device", "cpu", "--models", "2m"])
    *_, figures = step_checks.check_all(options, tmp_path)
    assert figures["faults"] == [f"2m, k = {k}: RuntimeError: no engine with {k}" for k in (0, 3)]


# --- whole steps -----------------------------------------------------------------------------------


def test_nano_has_the_layers_and_the_size_that_its_name_says(tmp_path):
    config = read_config(write_configuration("nano", tmp_path, max_model_len=1024), device="cuda")
    counts = {kind: config.layer_types.count(kind) for kind in ("mamba", "moe", "attention")}
    assert counts == {"mamba": 23, "moe": 23, "attention": 6}
    assert weight_bytes(config) / 2e9 == pytest.approx(31.6, abs=0.2)  # billions of parameters


@pytest.mark.parametrize("name", ["8b", "nano"])
def test_a_slice_has_layers_of_every_kind(name):
    whole, few = (configuration(one)["hybrid_override_pattern"] for one in (name, f"{name}-slice"))
    assert set(few) == set(whole)
    assert len(few) == 6


def test_sampled_steps_are_measured_at_the_shortest_context_before_longer_ones():
    options = SimpleNamespace(sampling=["greedy", "top-p"], contexts=[8192, 512], batches=[1, 8])
    assert list(_loads(options)) == [
        *(("greedy", 512, 1), ("greedy", 512, 8), ("top-p", 512, 1), ("top-p", 512, 8)),
        *(("greedy", 8192, 1), ("greedy", 8192, 8)),
    ]


def test_kernels_beyond_the_longest_are_added_up():
    kernels = [Kernel(f"k{i}", 2, float(i)) for i in range(KEPT + 3)]
    *kept, rest = longest(kernels)
    assert [one.ms for one in kept] == sorted((one.ms for one in kernels[3:]), reverse=True)
    assert rest == Kernel(REST, 6, 3.0)
    assert longest(kernels[:2]) == [kernels[1], kernels[0]]


DECODE = {
    "model": "Nemotron-H 8B",
    "sampling": "top-p",
    "num_drafts": 0,
    "batch": 8,
    "context": 512,
    "bytes": dict.fromkeys(("weights", "states", "kv", "logits", "total"), 1e9),
    "bytes_per_s": 3e12,
    "limit_ms": 1.0,
    "device_ms": 1.25,
    "step_ms": 1.5,
    "kernels": [],
}


def report_of(name):
    return {
        "machine": {"gpu": "A GPU", "torch": "2"},
        "device": "cuda",
        "threads": 1,
        "models": {name: {"decode": [DECODE], "prefill": [], "start_up": []}},
    }


def test_stages_of_one_model_become_one_table():
    report = merged([report_of("8b"), report_of("nano"), report_of("8b")])
    assert {name: len(parts["decode"]) for name, parts in report["models"].items()} == {"8b": 2, "nano": 1}
    assert "| Nemotron-H 8B | top-p | 8 | 0 |  | 512 |" in table(report)
    assert "1.25 ms, 1.25 ×" in table(report)


def test_kinds_of_sampling_have_parameters_that_a_request_can_have():
    assert set(SAMPLING) == {"greedy", "temperature", "top-p"}


# --- handoffs --------------------------------------------------------------------------------------

UCX_LOG = """
[1.0] | sink self cfg#0 |
[1.0] | remote memory read by ucp_get*(multi) into cuda memory from cuda |
[1.0] +-----+-----+
[1.0] | 0..inf | zero-copy | cuda_copy/cuda |
[1.0] +-----+-----+
[1.0] | sink intra-node cfg#1 |
[1.0] | remote memory read by ucp_get*(multi) into cuda/GPU0 memory from cuda |
[1.0] +-----+-----+
[1.0] | Range | Description | Config |
[1.0] +-----+-----+
[1.0] | 0..7 | short | tcp/lo |
[1.0] | 8..inf | zero-copy | cuda_ipc/cuda |
[1.0] +-----+-----+
[1.0] | sink intra-node cfg#1 |
[1.0] | remote memory write by ucp_put*(multi) from host memory to host |
[1.0] | 0..inf | zero-copy | cma/memory |
"""


def test_ucx_log_tells_the_method_of_each_kind_of_read():
    assert read_methods(UCX_LOG) == {
        "into cuda/GPU0 memory from cuda": ["0..7, short, tcp/lo", "8..inf, zero-copy, cuda_ipc/cuda"]
    }
    assert read_methods("") == {}


def run_module(name, *arguments):
    command = [sys.executable, "-m", name, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def handed_over(tmp_path_factory):
    path = tmp_path_factory.mktemp("handoffs") / "figures.json"
    done = run_module(
        *("benchmarks.gpu.handoffs", "--device", "cpu", "--model", "2m", "--handoffs", 8, "--json", path)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_handoffs_between_two_processes_bring_the_bytes_and_the_tokens(handed_over):
    assert (handed_over["handoffs"], handed_over["num_failed"], handed_over["num_wrong"]) == (8, 0, 0)
    assert (handed_over["compared"], handed_over["different"]) == (8, 0)
    assert handed_over["memory"] == "DRAM"
    assert "into host memory from host" in handed_over["reads"]
    assert handed_over["transfer_ms"]["p50"] > 0


def test_without_nixl_the_stage_is_skipped_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(handoffs, "NEEDED", ("no_such_package",))
    monkeypatch.setattr(sys, "argv", ["handoffs"])
    with pytest.raises(SystemExit) as end:
        handoffs.main()
    assert end.value.code == handoffs.SKIPPED
    assert capsys.readouterr().err.startswith("no handoffs: no_such_package not installed")


@pytest.mark.exhaustive
def test_a_whole_stack_is_measured(tmp_path):
    path = tmp_path / "figures.json"
    done = run_module(
        *("benchmarks.gpu.serving", "--device", "cpu", "--model", "2m", "--concurrency", 1, 2),
        *("--least-requests", 2, "--json", path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    kinds = [("greedy", 1), ("greedy", 2), ("temperature", 1), ("temperature", 2), ("top-p", 1), ("top-p", 2)]
    assert [(row["sampling"], row["concurrency"]) for row in rows] == kinds
    assert all(row["tpot_ms"]["p50"] > 0 and row["limit_ms"] > 0 for row in rows)
