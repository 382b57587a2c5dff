"""The RMSNorm of transformers' families: no mean, no bias, statistics in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.integrations.hugging_face import is_known
from fastformer.nn.dropout import dropout_seed
from fastformer.nn.guards import is_written_as_known
from fastformer.ops import add_layer_norm


class RMSNorm(nn.Module):
    """A norm with `weight` and `variance_epsilon`, as one op where x is of the weight's dtype, and not fp16."""

    weight: Any
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """See transformers."""
        if not _fits(self, hidden_states):
            normed: Tensor = super().forward(hidden_states)
            return normed
        return add_layer_norm(hidden_states, weight=self.weight, eps=self.variance_epsilon, rms_norm=True)[0]


def join_rms(x: Tensor, residual: Tensor, dropout_p: float, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(norm(dropout(x) + residual), the sum), in one op where the norm is ours and nobody touched it."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if not (isinstance(norm, RMSNorm) and is_known(norm, type(norm)) and _fits(norm, residual.to(dtype))):
        total = F.dropout(x, dropout_p) + residual
        return norm(total), total
    seed = dropout_seed(dropout_p, x.device)
    return add_layer_norm(
        x.to(dtype), residual.to(dtype), norm.weight, eps=norm.variance_epsilon, dropout_p=dropout_p,
        dropout_seed=seed, rms_norm=True,
    )  # fmt: skip


def _fits(norm: RMSNorm, x: Tensor) -> bool:
    weight = norm._parameters.get("weight")  # what reads another would make it once more
    if type(weight) is not nn.Parameter or type(x) not in (Tensor, nn.Parameter):
        return False
    return x.dtype == weight.dtype and x.dtype != torch.float16 and is_written_as_known(type(norm))
