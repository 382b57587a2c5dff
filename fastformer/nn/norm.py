"""A norm that can be fused with the dropout and the addition before it, and the plan of a norm for fused code."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.engine.checks import is_untouched
from fastformer.nn.errors import InputError
from fastformer.ops.add_layer_norm import add_layer_norm


def check_dropout(dropout: float) -> float:
    """Checks a probability and returns it unchanged, in the form in which `nn.Dropout` holds it.

    Raises:
        InputError: the probability is not a number in [0, 1].
    """
    if not isinstance(dropout, int | float) or not 0.0 <= dropout <= 1.0:
        raise InputError(f"expected dropout in [0, 1], got {dropout!r}")
    return dropout


def _is_plain(tensor: Tensor | None) -> bool:
    return tensor is None or type(tensor) in (Tensor, nn.Parameter)


class AddLayerNorm(nn.LayerNorm):
    """A LayerNorm (or RMSNorm) that can be fused with the preceding sub-layer's dropout and residual addition.

    `norm(x)` is `torch.nn.LayerNorm`. `norm(x, residual)` returns both `norm(dropout(x) + residual)` and
    `dropout(x) + residual`, reading and writing each once: a pre-norm block uses both, a post-norm block only
    the first. Parameters: `weight` and `bias`, as in torch.nn.

    Args:
        normalized_shape: the size of the last dimension.
        eps: added to the variance.
        elementwise_affine: whether there is a weight (and a bias).
        bias: whether there is a bias; never with rms_norm.
        device, dtype: the device and dtype of the parameters.
        dropout: probability for x while training, rounded to a multiple of 1/256.
        rms_norm: divide by the root mean square instead of subtracting the mean (Zhang and Sennrich 2019).

    Raises:
        InputError: normalized_shape has more than one dimension.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dropout: float = 0.0,
        rms_norm: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias and not rms_norm, device, dtype)
        if len(self.normalized_shape) != 1:
            raise InputError(f"expected one normalised dimension, got normalized_shape {tuple(self.normalized_shape)}")
        self.dropout = check_dropout(dropout)
        self.rms_norm = rms_norm

    @overload
    def forward(self, x: Tensor, residual: None = None, *, dropout_p: float | None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor, *, dropout_p: float | None = None) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, dropout_p: float | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalises x, or dropout(x) + residual.

        Args:
            x: (..., dim).
            residual: x's shape; may be of a wider dtype than x.
            dropout_p: replaces the module's own dropout, in training and in evaluation.

        Returns:
            Without a residual: the normalised x. With one: (the normalised sum in x's dtype, the sum in residual's).
        """
        if x.shape[-1:] != self.normalized_shape:
            raise InputError(f"expected size {self.normalized_shape[0]} in the last dimension, got {tuple(x.shape)}")
        if dropout_p is None:
            dropout_p = self.dropout if self.training else 0.0
        if residual is None and dropout_p == 0.0 and not all(map(_is_plain, (x, self.weight, self.bias))):
            # A tensor subclass may override the norm, and knows torch.nn's function by name.
            if self.rms_norm:
                return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
            return super().forward(x)
        y, total = add_layer_norm(
            x,
            residual,
            self.weight,
            self.bias,
            eps=self.eps,
            dropout_p=dropout_p,
            rms_norm=self.rms_norm,
        )
        return y if residual is None else (y, total)

    def extra_repr(self) -> str:
        """Returns the options that print shows for the module."""
        return f"{super().extra_repr()}, dropout={self.dropout}, rms_norm={self.rms_norm}"


_FORWARD = AddLayerNorm.forward


class NormPlan(NamedTuple):
    """The dictionary of an untouched norm's parameters, and its settings for `ops.add_layer_norm`."""

    module: nn.Module
    parameters: dict[str, Any]
    eps: float
    rms_norm: bool

    def apply(self, x: Tensor) -> Tensor:
        """Computes norm(x) in the same way as `AddLayerNorm`."""
        weight, bias = self.parameters["weight"], self.parameters.get("bias")
        return add_layer_norm(x, None, weight, bias, eps=self.eps, rms_norm=self.rms_norm)[0]


def find_norm_plan(norm: object, *, is_lent: bool = False) -> NormPlan | None:
    """Finds the plan of a plain norm of the last dimension; None for any other module.

    It doesn't check `is_watched`. `is_lent` is that of `is_untouched`.
    """
    if not is_untouched(norm, AddLayerNorm, nn.LayerNorm, nn.RMSNorm, is_lent=is_lent):
        return None
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    if len(norm.normalized_shape) != 1 or norm.eps is None:
        return None
    if isinstance(norm, AddLayerNorm) and (AddLayerNorm.forward is not _FORWARD or (norm.dropout and norm.training)):
        return None
    # Some modules, such as the replicas of DataParallel, store their parameters elsewhere.
    expected = ("weight",) if type(norm) is nn.RMSNorm else ("weight", "bias")
    if any(name not in norm._parameters for name in expected):
        return None
    rms_norm = norm.rms_norm if isinstance(norm, AddLayerNorm) else isinstance(norm, nn.RMSNorm)
    return NormPlan(norm, norm._parameters, norm.eps, rms_norm)
