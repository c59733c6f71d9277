import pytest
import torch

from kernels.norms import relu_squared as module
from kernels.norms.relu_squared import relu_squared, relu_squared_reference


@pytest.mark.parametrize(
    ("dtype", "rtol"),  # atol: half of what float16 can hold
    [
        (torch.float32, 1e-6),
        (torch.float16, 1e-3),
        # Triton's interpreter truncates where a GPU rounds to bfloat16.
        (torch.bfloat16, 2**-7),
    ],
)
@pytest.mark.parametrize("shape", [(1, 7), (3, 2048), (0, 5), (5, 1000)])
def test_the_square_of_what_is_positive_in_place(target, shape, dtype, rtol):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(dtype).to(target.device)
    if x.numel():
        x[0, 1], x[0, 2] = torch.nan, torch.inf
    expected = relu_squared_reference(x.double())
    y = module._launch(x) if target.name == "triton" else relu_squared(x)
    assert y is x
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=6e-8, equal_nan=True)
