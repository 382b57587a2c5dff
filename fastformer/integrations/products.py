"""The products of transformers' models, by the library that is fast at them: see `nn.linear`."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import pytorch_utils as theirs

from fastformer.integrations.hugging_face import is_known
from fastformer.integrations.swap import Swap, by_original
from fastformer.nn.linear import Linear, linear

_CONV1D = theirs.Conv1D.forward


class Conv1D(theirs.Conv1D):
    """GPT-2's linear map, whose weight is (in_features, out_features)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """See transformers."""
        if not _is_as_written():
            return super().forward(x)
        return linear(x, self.weight.t(), self.bias)


def _is_as_written() -> bool:
    return theirs.Conv1D.forward is _CONV1D


def is_plain_conv1d(module: nn.Module) -> bool:
    """Whether a call of a module is this product, and nothing else."""
    return is_known(module, theirs.Conv1D, Conv1D) and _is_as_written()


SWAPS = by_original([Swap(nn.Linear, Linear), Swap(theirs.Conv1D, Conv1D)])


def products_of(model: nn.Module) -> dict[nn.Module, Swap]:
    """What to swap of the linear maps inside of models of transformers. What is derived from their classes stays."""
    inside = {inner for module in model.modules() if isinstance(module, PreTrainedModel) for inner in module.modules()}
    return {module: SWAPS[type(module)] for module in inside if type(module) in SWAPS}
