"""torch.nn's linear map with the product of `ops.linear`, which runs the library that is faster at it on this CPU."""

from __future__ import annotations

from torch import Tensor, nn

from fastformer.nn import guards
from fastformer.nn.guards import is_plain, is_written_as_known
from fastformer.ops.linear import unchecked_linear

# `F.linear(x, weight, bias)`, with its errors.
linear = unchecked_linear


class Linear(nn.Linear):
    """torch.nn's, by `linear`: the class that `fastformer.accelerate` gives to those of models that it knows."""

    def forward(self, input: Tensor) -> Tensor:
        """See torch.nn."""
        if not is_written_as_known(Linear):
            return super().forward(input)
        return linear(input, self.weight, self.bias)


LINEARS = (*guards.LINEARS, Linear)


def project(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, which is `linear` where that is all that the module does."""
    if is_plain(module, *LINEARS):
        assert isinstance(module, nn.Linear)
        return linear(x, module.weight, module.bias)
    return module(x)
