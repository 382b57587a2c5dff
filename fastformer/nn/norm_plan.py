"""The plan of a norm, for code that computes the norm without calling its module."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from fastformer.nn.dropout import dropout_seed
from fastformer.nn.guards import is_untouched_norm
from fastformer.nn.norm import AddLayerNorm
from fastformer.ops.add_layer_norm import add_layer_norm


class NormPlan(NamedTuple):
    """The places of an untouched norm's parameters, and its settings for `ops.add_layer_norm`."""

    module: nn.Module
    parameters: dict[str, Any]
    eps: float
    rms_norm: bool

    def apply(self, x: Tensor) -> Tensor:
        """Computes norm(x) in the same way as `AddLayerNorm`."""
        weight, bias = self.parameters["weight"], self.parameters.get("bias")
        return add_layer_norm(x, None, weight, bias, eps=self.eps, rms_norm=self.rms_norm)[0]

    def join(self, x: Tensor, residual: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
        """Computes (norm(dropout(x) + residual), the sum)."""
        return add_layer_norm(
            x,
            residual,
            self.parameters["weight"],
            self.parameters.get("bias"),
            eps=self.eps,
            rms_norm=self.rms_norm,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed(dropout_p, x.device),
        )


def find_norm_plan(norm: object) -> NormPlan | None:
    """Finds the plan of a norm of the last dimension; None for any other module."""
    if not is_untouched_norm(norm):
        return None
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.eps is not None
    # Some modules, such as the replicas of DataParallel, store their parameters elsewhere.
    expected = ("weight",) if type(norm) is nn.RMSNorm else ("weight", "bias")
    if any(name not in norm._parameters for name in expected):
        return None
    rms_norm = norm.rms_norm if isinstance(norm, AddLayerNorm) else isinstance(norm, nn.RMSNorm)
    return NormPlan(norm, norm._parameters, norm.eps, rms_norm)
