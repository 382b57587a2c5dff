"""What stands in place of a tensor, or is one of the wrong kind of numbers, is refused by name in every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer import ops


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


HEADS = torch.randn(2, 5, 4, 8)
ROWS, CU = torch.randn(5, 2, 8), ints(0, 3, 5)
SEED = torch.tensor([1, 2])
TABLE = torch.randn(9, 4)
Q = HEADS[:, :1]

# Op -> (the function, its tensors by name, other arguments). All tensors are those of a call that is right.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "attention": (
        ops.attention,
        {"q": HEADS, "k": HEADS, "v": HEADS, "attn_mask": torch.ones(5, 5), "seqlens_k": ints(5, 3),
         "dropout_seed": SEED},
        {"dropout_p": 0.5},
    ),
    "varlen_attention": (
        ops.varlen_attention,
        {"q": ROWS, "k": ROWS, "v": ROWS, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "dropout_seed": SEED},
        {"max_seqlen_q": 3, "max_seqlen_k": 3, "dropout_p": 0.5},
    ),
    "attention_weights": (
        ops.attention_weights,
        {"q": HEADS, "k": HEADS, "lse": torch.randn(2, 4, 5), "attn_mask": torch.ones(5, 5), "seqlens_k": ints(5, 3)},
        {},
    ),
    "decode_attention": (
        ops.decode_attention,
        {"q": Q, "k_cache": HEADS.clone(), "v_cache": HEADS.clone(), "cache_seqlens": ints(2, 3), "k": Q, "v": Q,
         "slot_table": ints(0, 1, 2, 3, 4, 5, 6, 7, 8, 9).view(2, 5), "cos": TABLE, "sin": TABLE},
        {},
    ),
    "decode_attention, by rows": (
        ops.decode_attention,
        {"q": Q, "k_cache": HEADS, "v_cache": HEADS, "cache_seqlens": ints(2, 3), "cache_batch_idx": ints(1, 0)},
        {},
    ),
    "feed_forward": (
        ops.feed_forward,
        {"x": TABLE, "weight1": torch.randn(6, 4), "bias1": torch.randn(6), "weight2": torch.randn(4, 6),
         "bias2": torch.randn(4), "dropout_seed": SEED},
        {"dropout_p": 0.5},
    ),
    "add_layer_norm": (
        ops.add_layer_norm,
        {"x": TABLE, "residual": TABLE, "weight": TABLE[0], "bias": TABLE[0], "dropout_seed": SEED},
        {"dropout_p": 0.5},
    ),
    "embedding": (
        ops.embedding,
        {"ids": ints(1, 2), "weight": TABLE, "position_table": TABLE, "positions": ints(3, 4), "dropout_seed": SEED},
        {"dropout_p": 0.5},
    ),
    "rotary": (
        ops.rotary,
        {"x": HEADS, "cos": TABLE, "sin": TABLE, "positions": torch.zeros(2, 5, dtype=torch.int64)},
        {},
    ),
    "linear": (ops.linear, {"x": TABLE, "weight": torch.randn(6, 4), "bias": torch.randn(6)}, {}),
    "linear_cross_entropy": (
        ops.linear_cross_entropy,
        {"x": TABLE, "weight": torch.randn(6, 4), "target": torch.arange(9) % 6, "bias": torch.randn(6)},
        {},
    ),
    "linear_topk": (ops.linear_topk, {"x": TABLE, "weight": torch.randn(6, 4)}, {"k": 2}),
}  # fmt: skip
# An op takes None for these; for k alone it does not take None without v.
OPTIONAL = {"attn_mask", "seqlens_k", "dropout_seed", "slot_table", "cache_batch_idx", "bias", "bias1", "bias2",
            "residual", "position_table", "positions"}  # fmt: skip
CASES = [(op, name) for op, (_, tensors, _) in CALLS.items() for name in tensors]


def wrong(op: str, name: str, tensor: Tensor) -> dict[str, object]:
    found: dict[str, object] = {
        "a list": tensor.tolist(),
        "an array": tensor.numpy(),
        "complex": tensor.to(torch.complex64),
    }
    is_optional = name in OPTIONAL or (op == "add_layer_norm" and name == "weight")
    if not is_optional:
        found["nothing"] = None
    found |= {"integers": tensor.long()} if tensor.is_floating_point() else {"numbers": tensor.float()}
    if name == "attn_mask":
        found["integers"] = tensor.int()
    return found


@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda each: each)
def test_it_is_refused_by_name(op: str, name: str) -> None:
    function, tensors, options = CALLS[op]
    with torch.no_grad():
        function(**tensors, **options)
    for kind, value in wrong(op, name, tensors[name]).items():
        with pytest.raises((ValueError, TypeError)) as caught:
            function(**tensors | {name: value}, **options)
        message = str(caught.value)
        assert name in message.replace(",", " ").split(), (kind, message)
