"""Environment of every test: must be in place before a module under test is imported."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TWINFANG_SANITIZE", "1")
if not torch.cuda.is_available():
    # Triton decides at decoration time whether a kernel is compiled or interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """Directory of the model that the project ships."""
    return Path(__file__).parent.parent / "twinfang" / "bundled_model"
