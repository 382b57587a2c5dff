"""The products of transformers' models, by the library that is fast at them: see `nn.linear`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import pytorch_utils as theirs

from fastformer.integrations.hugging_face import is_known, know
from fastformer.integrations.swap import Swap, by_original
from fastformer.nn.guards import is_written_as_known
from fastformer.nn.linear import Linear, own_product

know(theirs)


class Conv1D(theirs.Conv1D):
    """GPT-2's linear map, whose weight is (in_features, out_features)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """See transformers."""
        # What parametrizations make at each access is left to be made once. A step's one row is never ours.
        has_both = x.numel() > x.shape[-1] and self._parameters.keys() >= {"weight", "bias"}
        if has_both and is_written_as_known(Conv1D) and _has_its_product():
            out = own_product(x, self.weight.t(), self.bias)
            if out is not None:
                return out
        return super().forward(x)  # by torch.addmm, and not by F.linear


def _has_its_product() -> bool:
    """Whether nobody replaced the function by which transformers multiplies."""
    return torch.addmm is torch._C._VariableFunctions.addmm


def is_plain_conv1d(module: nn.Module) -> bool:
    """Whether a call of a module is this product, and nothing else."""
    return is_known(module, theirs.Conv1D, Conv1D) and _has_its_product()


SWAPS = by_original([Swap(nn.Linear, Linear), Swap(theirs.Conv1D, Conv1D)])


def products_of(model: nn.Module) -> dict[nn.Module, Swap]:
    """What to swap of the linear maps inside of models of transformers. What is derived from their classes stays."""
    inside = {inner for module in model.modules() if isinstance(module, PreTrainedModel) for inner in module.modules()}
    return {module: SWAPS[type(module)] for module in inside if type(module) in SWAPS}
