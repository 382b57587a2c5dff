"""Attention in plain PyTorch with materialised scores: the reference for the kernels of every attention op.

Dense, packed and cached attention differ in the position of the diagonal and in the numbers of keys and queries of a
sequence; here each of these may be one number or one per sequence.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from fastformer.ops._common import accumulation_dtype, soft_capped
from fastformer.ops._dropout import keep_mask, keep_scale


@dataclass
class AttentionOptions:
    """The options of attention: everything that decides the visible scores and their values, except q, k and v.

    Attributes:
        softmax_scale: factor of the products.
        window_left, window_right: keys before and after the aligned one that are visible; None = open.
        dropout_p, dropout_seed: the dropout of the attention weights.
        softcap: c of c * tanh(score / c), which is applied to scaled scores before any mask; 0 = no cap.
        diagonal: key position that query 0 is aligned with; int, or (batch,).
        keys: (batch,) number of visible keys, or None for all.
        queries: (batch,) number of queries that are real, or None for all.
        attn_mask: boolean (True = attend) or floating (added), broadcastable to (batch, num_heads, seqlen_q, seqlen_k).
    """

    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    softcap: float = 0.0
    _: KW_ONLY
    diagonal: int | Tensor = 0
    keys: Tensor | None = None
    queries: Tensor | None = None
    attn_mask: Tensor | None = None

    def visible(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor | None:
        """Returns bool, broadcastable to (batch, num_heads, seqlen_q, seqlen_k); None if everything is visible."""
        query = torch.arange(seqlen_q, device=device).view(1, 1, -1, 1)
        key = torch.arange(seqlen_k, device=device).view(1, 1, 1, -1)
        aligned = query + _per_sequence(self.diagonal)
        conditions = []
        if self.window_left is not None:
            conditions.append(key >= aligned - self.window_left)
        if self.window_right is not None:
            conditions.append(key <= aligned + self.window_right)
        if self.keys is not None:
            conditions.append(key < _per_sequence(self.keys))
        if self.queries is not None:
            conditions.append(query < _per_sequence(self.queries))
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            conditions.append(self.attn_mask)
        visible = None
        for condition in conditions:
            visible = condition if visible is None else visible & condition
        return visible

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Computes scaled and masked scores (batch, num_heads, seqlen_q, seqlen_k), -inf for hidden keys."""
        scores = soft_capped(self._products(q, k), self.softcap)
        if self.attn_mask is not None and self.attn_mask.dtype != torch.bool:
            scores = (scores + self.attn_mask).to(scores.dtype)
        visible = self.visible(q.shape[1], k.shape[1], q.device)
        return scores if visible is None else scores.masked_fill(~visible, -torch.inf)

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        return grouped_matmul(q, k.permute(0, 2, 3, 1), k.shape[2]) * self.softmax_scale

    def through_cap(self, q: Tensor, k: Tensor, dscores: Tensor) -> Tensor:
        """Computes the gradient of scaled products from that of masked scores, (batch, num_heads, seqlen_q, seqlen_k).

        Hidden keys may contain any values: a gradient of 0 stays 0.
        """
        if not self.softcap:
            return dscores
        slope = 1.0 - (self._products(q, k) / self.softcap).tanh().square()
        return dscores.where(dscores == 0, dscores * slope)

    def keep(self, weights: Tensor) -> Tensor | None:
        """Returns the dropout multipliers of weights (batch, num_heads, seqlen_q, seqlen_k); None without dropout."""
        if self.dropout_p == 0.0:
            return None
        assert self.dropout_seed is not None
        batch, num_heads, seqlen_q, seqlen_k = weights.shape
        mask = keep_mask(self.dropout_seed, self.dropout_p, seqlen_q, seqlen_k, batch * num_heads)
        return mask.reshape(weights.shape).to(weights.dtype) * keep_scale(self.dropout_p)


def _per_sequence(value: int | Tensor) -> int | Tensor:
    return value.reshape(-1, 1, 1, 1) if isinstance(value, Tensor) else value


def grouped_matmul(x: Tensor, kv: Tensor, num_kv_heads: int) -> Tensor:
    """Multiplies x (batch, seqlen_q, num_heads, n) by kv (batch, num_kv_heads, n, m).

    Returns (batch, num_heads, seqlen_q, m). The query heads of a group are rows of one product: keys and values are not
    repeated.
    """
    batch, seqlen_q, num_heads, n = x.shape
    rows = x.transpose(1, 2).reshape(batch, num_kv_heads, num_heads // num_kv_heads * seqlen_q, n)
    return (rows @ kv).reshape(batch, num_heads, seqlen_q, kv.shape[-1])


def group_sum(weights: Tensor, rows: Tensor, num_kv_heads: int) -> Tensor:
    """Multiplies transposed weights by rows, summed over the query heads of a group.

    weights is (batch, num_heads, seqlen_q, seqlen_k), rows is (batch, seqlen_q, num_heads, n), and the result is
    (batch, seqlen_k, num_kv_heads, n).
    """
    batch, num_heads, seqlen_q, seqlen_k = weights.shape
    grouped = weights.reshape(batch, num_kv_heads, num_heads // num_kv_heads * seqlen_q, seqlen_k)
    right = rows.transpose(1, 2).reshape(batch, num_kv_heads, num_heads // num_kv_heads * seqlen_q, rows.shape[-1])
    return (grouped.transpose(-2, -1) @ right).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, scores: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of q (batch, seqlen_q, num_heads, head_dim), and k and v (batch, seqlen_k, num_kv_heads,
    head_dim).

    out has q's dtype; lse, (batch, num_heads, seqlen_q), is fp32 (fp64 for fp64), -inf for a row without visible keys.
    """
    acc = accumulation_dtype(q.dtype)
    batch, seqlen_q, num_heads, _ = q.shape
    seqlen_k = k.shape[1]
    if seqlen_k == 0:
        lse = torch.full((batch, num_heads, seqlen_q), -torch.inf, dtype=acc, device=q.device)
        return torch.zeros_like(q, memory_format=torch.contiguous_format), lse
    weights, total, lse = exponentials(scores(q.to(acc), k.to(acc)))
    keep = scores.keep(weights)
    if keep is not None:
        weights = weights * keep
    out = grouped_matmul(weights.transpose(1, 2), v.to(acc).transpose(1, 2), v.shape[2])
    return (out / total).transpose(1, 2).to(q.dtype).contiguous(), lse


def exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes (exp(scores - their largest), its sum over the keys, lse) of scores over at least one key.

    The sum keeps its last dimension, and is 1 for a row that sees no key. The quotient is therefore the softmax, or
    zeros, and derivatives of all three, of any order, are finite.
    """
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    sees_nothing = total == 0
    total = total.masked_fill(sees_nothing, 1.0)
    lse = (total.log() + largest).masked_fill(sees_nothing, -torch.inf)
    return weights, total, lse.squeeze(-1)


def probabilities(q: Tensor, k: Tensor, lse: Tensor, scores: AttentionOptions) -> Tensor:
    """Computes exp(scores - lse), before dropout, in the accumulation type; rows that see no key are 0."""
    lse = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    weights = (scores(q, k) - lse).exp()
    # If a huge mask value absorbs the scores, lse can't represent the logarithm of the number of equal keys.
    return weights / weights.sum(-1, keepdim=True).clamp_min(1.0).where(lse.abs() > 2**28, 1.0)


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes (dq, dk, dv, dscores).

    dscores, (batch, num_heads, seqlen_q, seqlen_k), is the gradient of the masked scores.
    """
    acc = accumulation_dtype(q.dtype)
    dtype, heads = q.dtype, k.shape[2]
    dout, q, k, v, out = (t.to(acc) for t in (dout, q, k, v, out))
    weights = probabilities(q, k, lse, scores)
    dweights = grouped_matmul(dout, v.permute(0, 2, 3, 1), heads)
    keep = scores.keep(weights)
    if keep is not None:
        dweights = dweights * keep
    delta = (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = (dweights - delta) * weights
    dproducts = scores.through_cap(q, k, dscores)
    dq = grouped_matmul(dproducts.transpose(1, 2), k.transpose(1, 2), heads).transpose(1, 2) * scores.softmax_scale
    dk = group_sum(dproducts, q, heads) * scores.softmax_scale
    dv = group_sum(weights if keep is None else weights * keep, dout, heads)
    return dq.to(dtype).contiguous(), dk.to(dtype).contiguous(), dv.to(dtype).contiguous(), dscores
