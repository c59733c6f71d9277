"""Every kernel is compiled here for every architecture, without a GPU. The programs keep the rules of
testing/kernels/programs/rules.py."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from testing.kernels.programs.exemptions import EXEMPTIONS
from testing.repository import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's time is not for compiling")
RESULTS = ROOT / "benchmarks/results/programs.json"


def output_of_programs(*options):
    """Runs the command in a process that doesn't interpret kernels, and returns what it prints."""
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "testing.kernels.programs", *map(str, options)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def test_every_kernel_is_launched_by_some_model():
    names = output_of_programs("--quick", "--architectures", 90, "--list").split()
    assert set(names) == kernels_in_the_sources()


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_programs_keep_the_rules_and_need_all_exemptions(architecture):
    output_of_programs("--quick", "--architectures", architecture, "--processes", 1)


def kernels_in_the_sources():
    """The Triton functions that are launched, with their modules: ``rms_norm._rms_norm_kernel``."""
    found = set()
    for path in (ROOT / "kernels").rglob("*.py"):
        names = re.findall(r"@triton_jit\ndef (\w+_kernel)\(", path.read_text())
        found |= {f"{path.stem}.{name}" for name in names}
    return found


def test_the_stored_table_has_spills_exactly_where_an_exemption_says_so():
    for version, rows in json.loads(RESULTS.read_text()).items():
        spilled = {(row["kernel"], row["architecture"]) for row in rows if row["programs_with_spills"]}
        minor = version.rpartition(".")[0]
        exempted = {
            (entry.kernel, architecture)
            for entry in EXEMPTIONS
            for architecture in entry.architectures
            if entry.rule == "spills" and minor in entry.tritons
        }
        assert spilled == exempted, version
