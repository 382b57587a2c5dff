"""The ops' formulas for torch.utils.flop_counter, which count products like those of PyTorch's own ops.

A multiplication and an addition count as two. As in PyTorch's formulas for fused attention, masked products count, and
so do the products that a backward pass computes again.

The counter's module imports triton, which takes long, so nothing is registered with it when fastformer is imported. The
first call of an op inside an open counter's block registers the formulas with this counter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def _scores(q: Tensor, k: Tensor) -> int:
    """Counts one product of queries with keys; weights with values and the gradients' products are as large."""
    batch, seqlen_q, num_heads, head_dim = q.shape
    return 2 * batch * num_heads * seqlen_q * k.shape[1] * head_dim


def _packed_scores(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int) -> int:
    if "cpu" == cu_seqlens_q.device.type == cu_seqlens_k.device.type and type(cu_seqlens_q) is Tensor:
        pairs = int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())
    else:  # PyTorch does the same if lengths can't be read
        pairs = (cu_seqlens_q.shape[0] - 1) * max_q * max_k
    return 2 * q.shape[1] * q.shape[2] * pairs


def _linear(x: Tensor, weight: Tensor) -> int:
    return 2 * math.prod(x.shape[:-1]) * math.prod(weight.shape)


def _feed_forward(x: Tensor, weight1: Tensor, weight2: Tensor) -> int:
    return 2 * math.prod(x.shape[:-1]) * (math.prod(weight1.shape) + math.prod(weight2.shape))


def _decode(q: Tensor, k_cache: Tensor, *args: Any) -> int:
    """Counts the products of cached attention as if the cache were full, since lengths may be on a GPU."""
    slot_table = args[5]
    batch, seqlen_q, num_heads, head_dim = q.shape
    return 4 * batch * seqlen_q * num_heads * head_dim * (k_cache if slot_table is None else slot_table).shape[1]


def _wanted(options: Sequence[Any]) -> int:
    """Counts the products for dx and dweight that output_mask, the only list in the arguments, requests."""
    (output_mask,) = (option for option in options if isinstance(option, list | tuple))
    return sum(output_mask[:2])


# Functions of the schema's arguments. Ops without matrix products are not included.
FORMULAS: dict[str, Callable[..., int]] = {
    "attention_fwd": lambda q, k, v, *_: 2 * _scores(q, k),
    "attention_bwd": lambda dout, q, k, v, *_: 5 * _scores(q, k),
    "varlen_attention_fwd": lambda q, k, v, *layout: 2 * _packed_scores(q, *layout[:4]),
    "varlen_attention_bwd": lambda dout, q, k, v, out, lse, *layout: 5 * _packed_scores(q, *layout[:4]),
    "attention_weights_fwd": lambda q, k, *_: _scores(q, k),
    "attention_weights_bwd": lambda dweights, weights, q, k, *_: 2 * _scores(q, k),
    "decode_attention": _decode,
    "feed_forward_fwd": lambda x, weight1, bias1, weight2, *_: _feed_forward(x, weight1, weight2),
    "feed_forward_bwd": lambda dout, x, weight1, bias1, weight2, *_: 2 * _feed_forward(x, weight1, weight2),
    "linear": lambda x, weight, *_: _linear(x, weight),
    "linear_weight_grad": lambda dout, x: 2 * dout.shape[0] * dout.shape[1] * x.shape[1],
    "linear_cross_entropy_fwd": lambda x, weight, *_: _linear(x, weight),
    "linear_cross_entropy_bwd": lambda dlosses, x, weight, *options: (1 + _wanted(options)) * _linear(x, weight),
    "linear_cross_entropy_fwd_bwd": lambda x, weight, *options: (1 + _wanted(options)) * _linear(x, weight),
    "quantized_linear": lambda x, q, *_: 2 * x.shape[0] * x.shape[1] * q.shape[0],
    "linear_topk": lambda x, weight, *_: _linear(x, weight),
    "quantized_topk": lambda x, q, *_: 2 * x.shape[0] * x.shape[1] * q.shape[0],
}


@functools.cache
def _by_packet() -> dict[Any, Callable[..., int]]:
    """Returns the formulas by op packet, in the form that the counter calls: with the result by name."""

    def without_result(formula: Callable[..., int]) -> Callable[..., int]:
        return lambda *args, out_val=None, **kwargs: formula(*args, **kwargs)

    return {getattr(torch.ops.fastformer, name): without_result(formula) for name, formula in FORMULAS.items()}


def tell_counters() -> None:
    """Registers the formulas with the counters that are active in this thread, unless they have a formula already."""
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            for packet, formula in _by_packet().items():
                registry.setdefault(packet, formula)
