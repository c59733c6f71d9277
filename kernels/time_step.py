"""The time step of a Mamba-2 layer, for Triton kernels: ``clamp(softplus(dt + dt_bias), *dt_limit)``."""

from __future__ import annotations

from kernels.triton_jit import tl, triton_jit


@triton_jit
def time_step(biased, dt_min, dt_max):
    """``biased`` is dt + dt_bias in float32. NaN stays NaN."""
    # Above 20 the line is softplus to float32's last digit, and exp would overflow at 89.
    e = tl.exp(tl.where(biased > 20.0, 20.0, biased))
    # log1p(e): the rounding of 1 + e cancels between numerator and denominator (Kahan).
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    step = tl.where(biased > 20.0, biased, log1p)
    step = tl.where(step < dt_min, dt_min, step)
    return tl.where(step > dt_max, dt_max, step)
