"""Twinfang runs on x86_64 and on aarch64 (Grace): packages, their pinned versions and the CPU kernels."""

import subprocess
import sys
import tomllib

import pytest
from llvmlite import binding
from packaging.requirements import Requirement

from kernels.linear import panel_tile
from testing.repository import ROOT

PLATFORMS = ("x86_64", "aarch64")


def installed_on(machine, lines):
    """Returns the names of the packages that pip installs on Linux on this machine."""
    environment = {"platform_system": "Linux", "platform_machine": machine}
    wanted = [Requirement(line) for line in lines]
    return {one.name for one in wanted if one.marker is None or one.marker.evaluate(environment)}


def test_both_platforms_get_the_same_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for lines in (project["dependencies"], *project["optional-dependencies"].values()):
        first, second = (installed_on(machine, lines) for machine in PLATFORMS)
        assert first == second == {Requirement(line).name for line in lines}


def test_pinned_versions_are_for_both_platforms():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pinned = [line for line in lines if line]
    assert all(installed_on(machine, pinned) == installed_on("x86_64", pinned) for machine in PLATFORMS)


@pytest.mark.parametrize(
    ("features", "shape"), [({"avx512f": True}, (16, 4)), ({"avx2": True}, (8, 2)), ({"neon": True}, (4, 4))]
)
def test_cpu_kernels_have_a_tile_for_every_processor(features, shape, monkeypatch):
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    assert panel_tile.vector_shape.__wrapped__() == shape


def test_cpu_kernels_are_imported_on_a_processor_without_avx():
    code = (
        "from llvmlite import binding; binding.get_host_cpu_features = lambda: {'neon': True}; "
        "import kernels.cpu.vector_ir as ir, kernels.linear.packed_linear, kernels.ssm; print(ir.LANES)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"8\n"
