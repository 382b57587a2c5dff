"""The activations of the feed-forward network and their derivatives inside Triton kernels, in fp32 on a tile."""

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _normal_cdf(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _tanh_gelu_weight(x):
    """Returns 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), and the sigmoid's derivative.

    Both are computed from exp(-|2 u|), which can't overflow, and without the cancellation of 1 - sigmoid.
    """
    argument = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
    small = tl.exp(-tl.abs(argument))
    weight = 1.0 / (1.0 + small)
    derivative = small * weight * weight
    return tl.where(argument < 0.0, small * weight, weight), derivative


@triton.jit
def activate(pre, up, ACTIVATION: tl.constexpr):
    """Returns the activation of a tile. For a gated activation, `pre` is the gate and `up` the other factor."""
    if ACTIVATION == "relu":
        # Not maximum(pre, 0), which would hide a NaN.
        return tl.where(pre < 0.0, 0.0, pre)
    elif ACTIVATION == "gelu":
        return pre * _normal_cdf(pre)
    elif ACTIVATION == "gelu_tanh":
        return pre * _tanh_gelu_weight(pre)[0]
    elif ACTIVATION == "silu":
        return pre * _sigmoid(pre)
    elif ACTIVATION == "geglu_tanh":
        return pre * _tanh_gelu_weight(pre)[0] * up
    else:
        return pre * _sigmoid(pre) * up


@triton.jit
def differentiate(dhidden, pre, up, ACTIVATION: tl.constexpr):
    """Returns (activation, dpre, dup) of a tile, given the gradient of the activation. dup is for gates only.

    For relu, `pre` may be the activation after dropout, which is positive for those positive elements that were kept.
    """
    if ACTIVATION == "relu":
        # Not pre > 0.0, which would give a NaN input the gradient 0. Eager PyTorch passes the gradient.
        dpre = tl.where(pre <= 0.0, 0.0, dhidden)
        return pre, dpre, dpre
    elif ACTIVATION == "gelu":
        weight = _normal_cdf(pre)
        dpre = dhidden * (weight + pre * 0.3989422804014327 * tl.exp(-0.5 * pre * pre))
        return pre * weight, dpre, dpre
    elif ACTIVATION == "gelu_tanh":
        weight, derivative = _tanh_gelu_weight(pre)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * pre * pre)
        dpre = dhidden * (weight + pre * slope * derivative)
        return pre * weight, dpre, dpre
    elif ACTIVATION == "silu":
        sigmoid = _sigmoid(pre)
        dpre = dhidden * sigmoid * (1.0 + pre * (1.0 - sigmoid))
        return pre * sigmoid, dpre, dpre
    elif ACTIVATION == "geglu_tanh":
        weight, derivative = _tanh_gelu_weight(pre)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * pre * pre)
        gelu = pre * weight
        return gelu * up, dhidden * up * (weight + pre * slope * derivative), dhidden * gelu
    else:
        sigmoid = _sigmoid(pre)
        silu = pre * sigmoid
        dgate = dhidden * up * sigmoid * (1.0 + pre * (1.0 - sigmoid))
        return silu * up, dgate, dhidden * silu
