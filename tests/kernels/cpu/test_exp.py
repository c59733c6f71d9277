import numpy as np

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import cpu_jit


@cpu_jit
def _exp_all(x, y):
    for i in range(x.shape[0]):
        y[i] = exp_f32(x[i])


def exp(values):
    x = np.asarray(values, dtype=np.float32)
    y = np.empty_like(x)
    _exp_all(x, y)
    return x, y


def test_relative_error_is_that_of_float32():
    for bound, limit in ((1, 1.5e-7), (20, 2e-7), (87.3, 4e-7)):
        x, y = exp(np.linspace(-bound, bound, 50001))
        expected = np.exp(x.astype(np.float64))
        assert np.max(np.abs(y - expected) / expected) < limit


def test_exponential_at_the_ends():
    _, y = exp([0, -88, -1000, -np.inf, 88, 100, np.inf, np.nan])
    assert y[0] == 1
    assert not y[1:4].any()
    assert np.all(y[4:7] > 1e38)
    assert np.isnan(y[7])
