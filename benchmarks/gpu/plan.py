"""The stages of the three calls. The most telling come first, in case that a call is cut short.

A stage's limit is the most that it may take. The limits of a call's first stages come to less than
:data:`CALL_S`; the last stages get the time that is left.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.stage import Stage

CALL_S = 480.0
CALLS = (1, 2, 3)
TEST_PROCESSES = 8
SANITIZER = "compute-sanitizer"
SANITIZER_OPTIONS = ("--error-exitcode", "3", "--print-limit", "20")
NO_POOLS = ("PYTORCH_NO_CUDA_MEMORY_CACHING=1",)
"""Has torch allocate each tensor by itself, so that an access behind its end is seen."""
RACE_TESTS = {
    "speculation": (
        "tests/kernels/speculation/test_accept_drafts.py",
        "tests/kernels/speculation/test_ngram_draft.py",
    ),
    "ssm": ("tests/kernels/ssm/test_causal_conv1d.py", "tests/kernels/ssm/test_ssd_chunk_scan.py"),
}
"""Tests of the kernels whose programs share memory or write what others read."""


def stages(call: int, out: Path, figures: Path, peers: Path | None) -> list[Stage]:
    """Returns the stages of a call. A stage writes its figures to ``figures`` as it goes."""
    if call == 1:
        return _correctness(figures)
    return _steps(figures, peers) if call == 2 else _processes(out, figures)


def _correctness(figures: Path) -> list[Stage]:
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    several = pytest
    if importlib.util.find_spec("xdist") is not None:
        several += ("-n", str(TEST_PROCESSES), "--dist", "worksteal")
    return [
        Stage(
            "step checks",
            "graphs captured; tokens of graphs against the same steps launched one kernel at a time; "
            "waits of the host while requests join and leave",
            200,
            ("-m", "benchmarks.gpu.step_checks", "--json", str(figures)),
        ),
        Stage(
            "kernel tests",
            "kernels against references",
            110,
            (*several, "-m", "not exhaustive", "tests/kernels"),
        ),
        Stage("engine tests", "tests that need CUDA", 60, (*pytest, "-m", "gpu", "tests/engine/step")),
        *(_races(name, files, "racecheck") for name, files in RACE_TESTS.items()),
        *(_races(name, files, "memcheck") for name, files in RACE_TESTS.items()),
        Stage("further kernel tests", "rarer shapes", 200, (*several, "-m", "exhaustive", "tests/kernels")),
    ]


def _races(name: str, tests: Sequence[str], tool: str) -> Stage:
    found = _sanitizer()
    return Stage(
        f"{tool}: {name}",
        f"{SANITIZER} --tool {tool} on the compiled kernels",
        60,
        (
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not exhaustive",
            "-k",
            "triton",
            *tests,
        ),
        program=("env", *NO_POOLS, str(found), "--tool", tool, *SANITIZER_OPTIONS, sys.executable),
        missing=None if found else f"{SANITIZER} is neither on the PATH nor in CUDA_HOME",
    )


def _sanitizer() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = (os.environ.get("PATH", ""), str(home / "bin"), str(home / "compute-sanitizer"))
    return shutil.which(SANITIZER, path=os.pathsep.join(folders))


def _steps(figures: Path, peers: Path | None) -> list[Stage]:
    kernels = ("-m", "benchmarks.kernels", "--device", "cuda", "--json", str(figures))
    all_kinds = "--sampling greedy temperature top-p"
    # Of 80 GB the weights leave 16, for caches, graphs and the buffers whose copy gives the memory's rate.
    nano = "--models nano --contexts 512 8192 --chunks 2048 --cache-memory 8"
    return [
        _limit(
            "steps 8b",
            "Nemotron-H 8B: decode greedy and sampled, prompts",
            210,
            figures,
            f"--models 8b --contexts 512 8192 --prompts 512 8192 --chunks 8192 {all_kinds}",
        ),
        _limit(
            "steps nano",
            "Nemotron 3 Nano (experts) without drafts: decode greedy and sampled, prompts",
            110,
            figures,
            f"{nano} --prompts 512 8192 --drafts 0 {all_kinds}",
        ),
        _limit(
            "steps nano drafts",
            "Nemotron 3 Nano with three drafts; 64 rows of four states each would not fit 80 GB",
            60,
            figures,
            f"{nano} --prompts --drafts 3 --batches 1 8",
        ),
        _limit(
            "steps 64k",
            "Nemotron-H 8B with long contexts and prompts",
            100,
            figures,
            "--models 8b --contexts 65536 --prompts 65536 --chunks 8192 --drafts 0 --batches 1 8",
        ),
        Stage("kernels", "kernels beside limits and peers", 180, kernels, path=peers),
    ]


def _limit(name: str, purpose: str, limit_s: float, figures: Path, options: str) -> Stage:
    arguments = ("-m", "benchmarks.steps.limit", "--device", "cuda", "--json", str(figures))
    return Stage(name, purpose, limit_s, (*arguments, *options.split()))


def _processes(out: Path, figures: Path) -> list[Stage]:
    return [
        Stage(
            "handoffs",
            "1,000 prompts from one process to another in GPU memory, digests on, while the reader decodes",
            170,
            ("-m", "benchmarks.gpu.handoffs", "--json", str(figures), "--seconds", "{seconds}"),
        ),
        Stage(
            "up",
            "`twinfang up` on one GPU: TTFT and TPOT of Nemotron-H 8B over HTTP",
            150,
            ("-m", "benchmarks.gpu.serving", "--json", str(figures), "--seconds", "{seconds}"),
        ),
        Stage(
            "tiles",
            "tiles of the kernels for shapes that have none yet",
            CALL_S,
            ("-m", "benchmarks.gpu.tune_tiles", "--missing", "--out", str(out), "--budget-s", "{seconds}"),
        ),
    ]
