"""Soft caps of scores and logits inside Triton kernels, c tanh(x / c) (Gemma 2), in fp32 on a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _exact_tanh(x):
    # tanh |x| = -e / (2 + e) with e = exp(-2 |x|) - 1, computed without cancellation as e = 2^n p + (2^n - 1), where
    # p = exp(r) - 1, -2 |x| = n ln 2 + r and |r| <= ln(2) / 2. Beyond 10 the result is 1.
    far = x * -2.0 * tl.where(x < 0.0, -1.0, 1.0)
    twice = tl.where(far < -20.0, -20.0, far)
    n = tl.floor(tl.fma(twice, 1.4426950408889634, 0.5))
    power = tl.exp2(n)
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, twice))
    p = tl.fma(r, 1.9841270e-4, 1.3888889e-3)  # Taylor
    p = tl.fma(p, r, 8.3333333e-3)
    p = tl.fma(p, r, 4.1666667e-2)
    p = tl.fma(p, r, 1.6666667e-1)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p * r, r, r)
    e = tl.fma(power, p, power - 1.0)
    return -e / (2.0 + e) * tl.where(x < 0.0, -1.0, 1.0)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """Returns tanh(x); NaN stays NaN. EXACT: to a few ulp, also near 0; else to about 1e-7, in fewer operations."""
    if EXACT:
        return _exact_tanh(x)
    else:
        return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def soft_capped(x, cap, EXACT: tl.constexpr):
    """Returns (cap tanh(x / cap), its derivative)."""
    bent = tanh(x * (1.0 / cap), EXACT)
    return bent * cap, 1.0 - bent * bent
