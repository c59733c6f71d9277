"""What Triton's interpreter, which runs kernels on a CPU, can't do."""

from __future__ import annotations

import pytest
import torch

from testing.kernels.target import Target


def skip_bfloat16_in_the_interpreter(target: Target, dtype: torch.dtype) -> None:
    if target.name == "triton" and target.device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers in tl.dot")
