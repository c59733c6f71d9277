"""Environment of every test: must be in place before a module under test is imported."""

import os
from pathlib import Path

import certifi
import pytest
import torch
from hypothesis import HealthCheck, settings

from testing.checkpoints.model_table import ModelTable
from testing.repository import ROOT

os.environ.setdefault("TWINFANG_SANITIZE", "1")
if not torch.cuda.is_available():
    # Triton decides at decoration time whether a kernel is compiled or interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Test processes share the cores, and models this small lose time to a second thread. Tests of how work is
# shared among threads say themselves how many there are.
torch.set_num_threads(1)
# How long an example takes says how busy the machine is, and nothing about the code.
any_machine = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.register_profile("new-examples", any_machine)
settings.register_profile("same-examples", any_machine, derandomize=True)
settings.load_profile("new-examples")


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each new client of httpx, also of each ``httpx.get``, reads the file of the authorities that it trusts.
    The web's 140 take 60 ms of the processor, which the servers that a test waits for would lack. Tests
    speak to this machine alone, so they trust one of them."""
    pem = certifi.contents()
    end = "-----END CERTIFICATE-----\n"
    one = tmp_path_factory.mktemp("authorities") / "one.pem"
    one.write_text(pem[: pem.index(end) + len(end)])
    os.environ["SSL_CERT_FILE"] = str(one)


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """Directory of the model that the project ships."""
    return ROOT / "twinfang" / "bundled_model"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--with-tls", action="store_true", help="end-to-end tests: stacks with mutual TLS")
    parser.addoption("--model-table", action="store_true", help="write the table of docs/models.md anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--model-table") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ModelTable())
