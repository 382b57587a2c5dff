"""Soft caps of scores and logits inside Triton kernels, c tanh(x / c) (Gemma 2), in fp32 on a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _exact_tanh(x):
    size = x * tl.where(x < 0.0, -1.0, 1.0)
    # Below 0.625, an odd polynomial (a least-squares fit of the relative error, 0.07 ulp).
    square = size * size
    p = tl.fma(square, -5.7170391e-3, 2.0650583e-2)
    p = tl.fma(p, square, -5.3743497e-2)
    p = tl.fma(p, square, 1.3331491e-1)
    p = tl.fma(p, square, -3.3333284e-1)
    near = tl.fma(p * square, size, size)
    # Above, 1 - 2 / (1 + exp(2 |x|)): the quotient is small where the result is near 1, and so is its error. Here
    # exp(2 |x|) = 2^n exp(r), 2 |x| = n ln 2 + r and |r| <= ln(2) / 2. Beyond 10 the result is 1.
    twice = size * 2.0
    twice = tl.where(twice > 20.0, 20.0, twice)
    n = tl.floor(tl.fma(twice, 1.4426950408889634, 0.5))
    power = tl.exp2(n)
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, twice))
    p = tl.fma(r, 1.9841270e-4, 1.3888889e-3)  # Taylor, of exp(r) - 1
    p = tl.fma(p, r, 8.3333333e-3)
    p = tl.fma(p, r, 4.1666667e-2)
    p = tl.fma(p, r, 1.6666667e-1)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p * r, r, r)
    beyond = 1.0 - 2.0 / tl.fma(power, p, power + 1.0)
    return tl.where(size < 0.625, near, beyond) * tl.where(x < 0.0, -1.0, 1.0)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """Returns tanh(x); NaN stays NaN. EXACT: to 1.2 ulp; else to about 1e-7, in fewer operations."""
    if EXACT:
        return _exact_tanh(x)
    else:
        return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def soft_capped(x, cap, EXACT: tl.constexpr):
    """Returns (cap tanh(x / cap), its derivative)."""
    bent = tanh(x * (1.0 / cap), EXACT)
    return bent * cap, 1.0 - bent * bent
