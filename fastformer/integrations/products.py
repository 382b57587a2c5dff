"""Runs the linear maps of transformers' models on the library that is fastest at them (see `ops.linear`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import pytorch_utils as theirs

from fastformer.engine.checks import is_written_as_known
from fastformer.integrations.known import is_known
from fastformer.integrations.replace import Replacement, by_original
from fastformer.nn.linear import Linear, linear
from fastformer.ops.linear import runs_as_op


class Conv1D(theirs.Conv1D):
    """GPT-2's linear map, whose weight is (in_features, out_features)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        # A parametrized weight is computed at each access, so it isn't touched. C++ is never faster for one row.
        has_both = x.numel() > x.shape[-1] and self._parameters.keys() >= {"weight", "bias"}
        if has_both and is_written_as_known(Conv1D) and _has_its_product():
            weight, bias = self.weight.t(), self.bias
            if runs_as_op(x, weight, bias):
                return linear(x, weight, bias)
        return super().forward(x)  # by torch.addmm


def _has_its_product() -> bool:
    """Returns whether the function by which transformers multiplies is PyTorch's."""
    return torch.addmm is torch._C._VariableFunctions.addmm


def is_plain_conv1d(module: nn.Module) -> bool:
    """Returns whether calling a module computes only Conv1D's product, without hooks or other changes."""
    return is_known(module, theirs.Conv1D, Conv1D) and _has_its_product()


REPLACEMENTS = by_original([Replacement(nn.Linear, Linear), Replacement(theirs.Conv1D, Conv1D)])


def products_of(model: nn.Module) -> dict[nn.Module, Replacement]:
    """Returns the linear maps in models of transformers and their replacements, without subclasses of the maps."""
    inside = {inner for module in model.modules() if isinstance(module, PreTrainedModel) for inner in module.modules()}
    return {module: REPLACEMENTS[type(module)] for module in inside if type(module) in REPLACEMENTS}
