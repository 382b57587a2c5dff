"""torch.nn's linear map with the product of `ops.linear`, which uses the fastest library for it on this CPU."""

from __future__ import annotations

from torch import Tensor, nn

from fastformer.engine import checks
from fastformer.engine.checks import is_written_as_known
from fastformer.ops.linear import unchecked_linear

# `F.linear(x, weight, bias)`, with its errors.
linear = unchecked_linear


class Linear(nn.Linear):
    """torch.nn's Linear on `linear`; `fastformer.accelerate` changes linear maps of known models to this class."""

    def forward(self, input: Tensor) -> Tensor:
        """See torch.nn."""
        if not is_written_as_known(Linear):
            return super().forward(input)
        return linear(input, self.weight, self.bias)


LINEARS = (*checks.LINEARS, Linear)
