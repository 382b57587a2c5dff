"""Attention through PyTorch's own fused CPU kernels, for machines without the C++ extension.

This module directly calls the functions of `scaled_dot_product_attention`, because they also return and accept lse.
They process the keys in blocks, so only a mask (not the scores) is ever materialised. They treat NaN under a mask
differently from the reference, so a result that is not finite is computed again by the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastformer.ops._attention_reference import AttentionOptions, attend, attend_backward

_ATEN = torch.ops.aten
_FORWARD, _BACKWARD = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


def unsupported(
    op_name: str,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    attn_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    needs_mask_grad: bool = False,
    softcap: float = 0.0,
    dout: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> str | None:
    """Returns why these kernels can't compute a call of a dense or packed attention op; None if they can.

    Every argument is named, even if these kernels support all of its values, so that one that the ops gain later
    is a TypeError instead of being ignored.
    """
    if q.device.type != "cpu" or not (hasattr(_ATEN, _FORWARD) and hasattr(_ATEN, _BACKWARD)):
        return "this PyTorch has no fused attention for CPUs"
    if dropout_p > 0.0:
        return "it would drop other weights than the definition of dropout"
    if softcap:
        return "it caps no scores"
    if needs_mask_grad:
        return "it has no gradient for the mask"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, q.dtype):
        return f"it would round the mask from {attn_mask.dtype} to {q.dtype}"
    return "there is nothing to compute" if q.numel() == 0 else None


def _as_read(t: Tensor) -> Tensor:
    """Returns (batch, num_heads, seqlen, head_dim) with contiguous rows, which the kernels assume."""
    return (t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2)


def _causal_and_mask(q: Tensor, k: Tensor, scores: AttentionOptions) -> tuple[bool, Tensor | None]:
    """Returns whether the kernel's own causal mask is enough, and else an additive mask in q's dtype, or None."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    square = isinstance(scores.diagonal, int) and scores.diagonal == 0  # as many queries as keys
    lengths = scores.keys is not None or scores.queries is not None
    if square and not lengths and scores.attn_mask is None and scores.window_left is None and scores.window_right == 0:
        return True, None
    visible, added = scores.visible(seqlen_q, seqlen_k, q.device), scores.attn_mask
    if added is not None and added.dtype == torch.bool:
        added = None
    if visible is not None:
        mask = (q.new_zeros(()) if added is None else added).where(visible, -torch.inf)
    elif added is not None:
        mask = added
    else:
        return False, None
    return False, mask.expand(*mask.shape[:2], seqlen_q, seqlen_k)


def attend_torch(q: Tensor, k: Tensor, v: Tensor, scores: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Computes `attend` for calls that `unsupported` accepts."""
    if k.shape[1] == 0:
        return attend(q, k, v, scores)
    is_causal, mask = _causal_and_mask(q, k, scores)
    heads = map(_as_read, (q, k, v))
    out, lse = getattr(_ATEN, _FORWARD)(*heads, 0.0, is_causal, attn_mask=mask, scale=scores.softmax_scale)
    if not (out.isfinite().all() and lse.isfinite().all()):
        return attend(q, k, v, scores)
    if mask is not None:
        lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)  # the kernel returns 0 for a row without keys
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def attend_torch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes (dq, dk, dv) of `attend_backward` for calls that `unsupported` accepts."""
    if k.shape[1] == 0:
        return attend_backward(dout, q, k, v, out, lse, scores)[:3]
    is_causal, mask = _causal_and_mask(q, k, scores)
    num_kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    # The forward kernel shares keys and values among the heads of a group; the backward kernel doesn't support groups.
    keys, values = (t.repeat_interleave(group, 2) if group > 1 else t for t in (k, v))
    heads = map(_as_read, (dout, q, keys, values, out))
    gradients = getattr(_ATEN, _BACKWARD)(
        *heads, lse.masked_fill(lse == -torch.inf, 0.0), 0.0, is_causal, attn_mask=mask, scale=scores.softmax_scale
    )
    dq, dk, dv = (t.transpose(1, 2) for t in gradients)
    if not all(t.isfinite().all() for t in (dq, dk, dv)):
        return attend_backward(dout, q, k, v, out, lse, scores)[:3]
    if group > 1:
        dk, dv = (t.unflatten(2, (num_kv_heads, group)).sum(3) for t in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()
