"""Keys and values of all cross-attentions of a decoder in one product, since all read the same memory.

On a GPU, a small decoder is as fast as the host launches. Together, the gradient of the memory is also one product,
whose sum over the layers is in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastformer.nn.layout import SequenceLayout
from fastformer.nn.linear import linear

if TYPE_CHECKING:
    from fastformer.nn.attention import MultiheadAttention
    from fastformer.nn.stack import Stack, StackPlan

# The device types on which a launch costs more than the copy of the weights into one matrix.
DEVICES = {"cuda"}


class ProjectedMemory(NamedTuple):
    """Keys and values of a memory, and the weights of an attention that it still needs.

    Attributes:
        k, v: (total_k, kv_dim).
        q_weight, q_bias: the rows of its weight and bias for queries.
    """

    k: Tensor
    v: Tensor
    q_weight: Tensor
    q_bias: Tensor | None


def project_together(
    stack: Stack, plan: StackPlan, memory: Tensor | None, layout: SequenceLayout | None
) -> list[ProjectedMemory] | None:
    """Projects a packed memory for all layers; None if they have to do so, each for itself.

    They do without gradients, where the next layer's keys could take the memory of the last one's. They also do on a
    CPU, where it isn't faster, in a compiled model, if modules are called (they may change what follows, or gather
    their parameters), if a layer has one matrix for each of q, k and v, or weights of another class, and if layers are
    recomputed in the backward pass.
    """
    if torch.compiler.is_compiling() or memory is None or memory.device.type not in DEVICES:
        return None
    if not torch.is_grad_enabled() or layout is None or not layout.is_packed or stack.gradient_checkpointing:
        return None
    if len(plan.layers) < 2 or plan.why_padded is not None or plan.gathers:
        return None
    attentions: list[MultiheadAttention] = [layer.multihead_attn for layer in stack.layers]
    weights, biases = zip(*(attention.in_proj_parts() for attention in attentions), strict=True)
    if any(type(weight) is not Tensor or weight.shape[1] != memory.shape[-1] for _, weight in weights):
        return None
    if any((bias is None) != (biases[0][1] is None) for _, bias in biases):
        return None
    sizes = [attention.kv_dim for attention in attentions for _ in "kv"]
    weight = torch.cat([weight for _, weight in weights])
    bias = None if biases[0][1] is None else torch.cat([bias for _, bias in biases]).to(weight.dtype)
    parts = linear(memory, weight, bias).split(sizes, dim=-1)
    return [
        ProjectedMemory(k, v, weight, bias)
        for k, v, (weight, _), (bias, _) in zip(parts[::2], parts[1::2], weights, biases, strict=True)
    ]
