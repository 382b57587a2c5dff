"""Compares attention_weights with the materialised softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastformer.ops import attention, attention_weights, use_backend
from tests.checks import assert_accurate, assert_op_accurate
from tests.ops.attention_cases import CASES, Case, make_inputs, plain_attention

# A larger scale makes a larger lse, whose rounding then shifts whole rows (see tests.checks.RELAXED).
UNDROPPED = [case for case in CASES if not case.dropout_p and case.mask != "float" and case.name != "scale"]
UNDROPPED.append(Case("scale", softmax_scale=0.35))


def plain_weights(q: Tensor, k: Tensor, attn_mask: Tensor | None, seqlens_k: Tensor | None, case: Case) -> Tensor:
    """Returns the weights (batch, num_heads, seqlen_q, seqlen_k), as attention to unit vectors."""
    units = torch.eye(k.shape[1], dtype=q.dtype, device=q.device)[None, :, None]
    units = units.expand(k.shape[0], -1, k.shape[2], -1)
    seed = torch.zeros(2, dtype=torch.int64)
    return plain_attention(q, k, units, attn_mask, seqlens_k, case, seed)[0].transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", UNDROPPED, ids=str)
def test_accuracy(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype)
    q, k, v, mask = inputs.cast(dtype, device)
    seqlens_k = None if inputs.seqlens_k is None else inputs.seqlens_k.to(device)

    def ours(q: Tensor, k: Tensor) -> Tensor:
        _, lse = attention(q, k, k, attn_mask=mask, seqlens_k=seqlens_k, return_lse=True, **case.options())
        return attention_weights(q, k, lse, attn_mask=mask, seqlens_k=seqlens_k, **case.options())

    def plain(q: Tensor, k: Tensor) -> Tensor:
        return plain_weights(q, k, mask, seqlens_k, case)

    with use_backend("reference"):
        assert_op_accurate(ours, plain, {"q": q.detach(), "k": k.detach()})


def test_an_additive_mask_takes_effect(device: str) -> None:
    case = next(case for case in CASES if case.name == "float-mask-all")
    inputs = make_inputs(case, torch.float32)
    q, k, v, mask = (x.detach() for x in inputs.cast(torch.float32, device))
    _, lse = attention(q, k, v, attn_mask=mask, window_size=case.window_size, return_lse=True)
    ours = attention_weights(q, k, lse, attn_mask=mask, window_size=case.window_size)
    exact = plain_weights(q.double(), k.double(), mask.double(), None, case)
    assert_accurate(ours, plain_weights(q, k, mask, None, case), exact)
    torch.testing.assert_close(ours.sum(-1), (lse > -torch.inf).float())
