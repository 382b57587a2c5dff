"""Inputs and the plain comparison for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.checks import keep_mask, keep_scale


@dataclass(frozen=True)
class Case:
    """The shapes and options of a call of attention."""

    name: str
    seqlen_q: int = 33
    seqlen_k: int = 33
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    is_causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    mask: str | None = None  # "bool" or "float"
    mask_shape: tuple[int, int] = (1, 1)  # batch and heads of the mask: 0 = all
    seqlens_k: tuple[int, int] | None = None
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    logits: float = 1.0  # factor of q
    batch: int = 2
    softcap: float = 0.0

    def __str__(self) -> str:
        return self.name

    def options(self) -> dict[str, Any]:
        """Returns the options of the ops, but for dropout's, by name."""
        return {name: getattr(self, name) for name in ("is_causal", "window_size", "softmax_scale", "softcap")}


CASES = [
    Case("full"),
    Case("causal", is_causal=True),
    Case("causal-longer-keys", seqlen_q=17, seqlen_k=70, is_causal=True),
    Case("causal-longer-queries", seqlen_q=40, seqlen_k=9, is_causal=True),
    Case("window", window_size=(5, 3)),
    Case("window-right", window_size=(None, 3)),
    Case("window-causal", seqlen_q=70, seqlen_k=70, window_size=(9, None), is_causal=True),
    Case("window-negative", window_size=(-2, 9)),
    Case("window-nothing", window_size=(-40, 3)),
    Case("bool-mask", mask="bool"),
    Case("bool-mask-heads", mask="bool", mask_shape=(0, 0), is_causal=True),
    Case("float-mask", mask="float", mask_shape=(1, 0)),
    Case("float-mask-all", mask="float", mask_shape=(0, 0), window_size=(None, 4)),
    Case("lengths", seqlens_k=(33, 7)),
    Case("lengths-causal-empty", seqlens_k=(20, 0), is_causal=True),
    Case("gqa", num_heads=4, num_kv_heads=2, is_causal=True),
    Case("mqa-mask", num_heads=4, num_kv_heads=1, mask="float"),
    Case("gqa-many-sequences", seqlen_q=9, seqlen_k=12, num_heads=4, num_kv_heads=2, batch=17),
    Case("gqa-mask-of-many", seqlen_q=9, seqlen_k=12, num_heads=4, num_kv_heads=2, mask="float", batch=5),
    Case("dropout", dropout_p=0.2),
    Case("dropout-causal-gqa", dropout_p=0.3, is_causal=True, num_heads=4, num_kv_heads=2, seqlen_q=20, seqlen_k=37),
    Case("dropout-mask-lengths", dropout_p=0.1, mask="bool", seqlens_k=(30, 11)),
    Case("one-query", seqlen_q=1, seqlen_k=37),
    Case("head-dim-40", head_dim=40, is_causal=True),
    Case("scale", softmax_scale=0.7),
    Case("softcap-causal-gqa", softcap=1.5, is_causal=True, num_kv_heads=1),
    Case("softcap-mask", softcap=0.8, mask="float", mask_shape=(1, 0)),
    Case("softcap-bool-mask-dropout", softcap=2.0, mask="bool", dropout_p=0.1, seqlens_k=(30, 11), softmax_scale=0.6),
    Case(
        "softcap-far",
        softcap=5.0,
        logits=8.0,
        seqlen_q=70,
        seqlen_k=150,
        num_heads=1,
        num_kv_heads=1,
        batch=1,
        window_size=(40, 0),
    ),
    Case("head-dim-96", head_dim=96, seqlen_q=20, seqlen_k=20, is_causal=True),
    Case(
        "head-dim-256",
        head_dim=256,
        seqlen_q=20,
        seqlen_k=70,
        num_kv_heads=1,
        batch=1,
        softcap=50.0,
        window_size=(30, 0),
    ),
    Case("several-blocks", seqlen_q=140, seqlen_k=150, num_heads=1, num_kv_heads=1, batch=1, is_causal=True),
]


@dataclass
class AttentionInputs:
    """The tensors of a case, in fp64; tests cast them."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    seqlens_k: Tensor | None
    dropout_seed: Tensor
    dout: Tensor

    def cast(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns q, k, v and a floating-point mask as leaves of this dtype, with values that the smallest dtype can
        represent.
        """
        leaves = [t.detach().to(device, dtype).requires_grad_() for t in (self.q, self.k, self.v)]
        mask = self.attn_mask
        if mask is not None:
            mask = mask.detach().to(device)
            if mask.is_floating_point():
                mask = mask.to(dtype).requires_grad_()
        return leaves[0], leaves[1], leaves[2], mask


def make_inputs(case: Case, dtype: torch.dtype) -> AttentionInputs:
    """Makes random inputs that `dtype` represents exactly, so that fp64 gets the same numbers."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).double()

    mask: Tensor | None = None
    if case.mask is not None:
        batch, heads = (size or full for size, full in zip(case.mask_shape, (case.batch, case.num_heads), strict=True))
        shape = (batch, heads, case.seqlen_q, case.seqlen_k)
        mask = torch.rand(shape) > 0.3 if case.mask == "bool" else random(*shape)
    seqlens_k = None if case.seqlens_k is None else torch.tensor(case.seqlens_k[: case.batch], dtype=torch.int32)
    return AttentionInputs(
        (random(case.batch, case.seqlen_q, case.num_heads, case.head_dim) * case.logits).to(dtype).double(),
        random(case.batch, case.seqlen_k, case.num_kv_heads, case.head_dim),
        random(case.batch, case.seqlen_k, case.num_kv_heads, case.head_dim),
        mask,
        seqlens_k,
        torch.tensor([1234567890123, 77]),
        random(case.batch, case.seqlen_q, case.num_heads, case.head_dim),
    )


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    seqlens_k: Tensor | None,
    case: Case,
    dropout_seed: Tensor,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention in plain PyTorch, with all intermediate results, in the dtype of the inputs.

    `visible`: bool, broadcastable to the scores: what each query may see by other rules than those of the call.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k = k.shape[1]
    k, v = (t.repeat_interleave(num_heads // t.shape[2], dim=2).transpose(1, 2) for t in (k, v))
    scale = head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    scores = q.transpose(1, 2) @ k.transpose(-2, -1) * scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    i = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=q.device)
    if visible is None:
        visible = torch.ones(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    left, right = case.window_size
    if case.is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None:
        visible = visible & (j >= i - left)
    if right is not None:
        visible = visible & (j <= i + right)
    if seqlens_k is not None:
        visible = visible & (j < seqlens_k.to(q.device).view(-1, 1, 1, 1))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            visible = visible & attn_mask
        else:
            visible = visible & (attn_mask != -torch.inf)
            scores = scores + attn_mask
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.detach().logsumexp(-1)
    empty = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if case.dropout_p:
        keep = keep_mask(dropout_seed.to(q.device), case.dropout_p, seqlen_q, seqlen_k, batch * num_heads)
        weights = weights * keep.view(batch, num_heads, seqlen_q, seqlen_k).to(weights.dtype)
        weights = weights * keep_scale(case.dropout_p)
    return (weights @ v).transpose(1, 2), lse
