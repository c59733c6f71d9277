"""Both GEMMs of a linear layer, on either side of the threshold between them."""

from __future__ import annotations

import pytest
import torch

from engine.models.linear import ONEDNN_MIN_WORK, Linear, _padded


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(7, 5), (160, 96), (1024, 512)])
@pytest.mark.parametrize("num_rows", [1, 2, 32, 33, 100, 1000])
def test_equals_float64(num_rows, out_features, in_features, bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    offset = torch.randn(out_features, generator=generator) if bias else None
    wide = torch.randn(num_rows, in_features + 3, generator=generator)
    x = wide[:, :in_features]  # rows further apart than they are long
    with torch.inference_mode():
        y = Linear(weight, offset)(x)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_weight_is_kept_once_where_onednn_always_takes_it():
    assert Linear(torch.zeros(ONEDNN_MIN_WORK // 64, 64)).weight is None
    assert Linear(torch.zeros(64, 64)).weight is not None


def test_bfloat16_stays_with_torch():
    layer = Linear(torch.ones(1024, 1024, dtype=torch.bfloat16))
    assert layer.packed is None
    assert torch.equal(
        layer(torch.ones(2, 1024, dtype=torch.bfloat16)).float(), torch.full((2, 1024), 1024.0)
    )


def test_rows_are_rounded_up_a_little_to_few_sizes():
    sizes = {_padded(num_rows) for num_rows in range(1, 8193)}
    assert len(sizes) < 120
    assert all(num_rows <= _padded(num_rows) <= num_rows * 1.25 for num_rows in range(1, 64))
    assert all(num_rows <= _padded(num_rows) <= num_rows * 1.125 for num_rows in range(64, 8193))
