"""Benchmarks are run now and then; what they import moves on in between."""

import importlib
import pkgutil

import pytest

import benchmarks

MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_every_benchmark_finds_what_it_imports(name):
    importlib.import_module(name)
