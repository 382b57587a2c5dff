"""The 16 levels of weights of 4 bits in files, as `models.quantization.Groups` has them."""

from __future__ import annotations

import torch
from torch import Tensor

# Twice MXFP4's numbers (E2M1).
E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
# GGUF's IQ4_NL and IQ4_XS.
IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


def scales_of(exponents: Tensor) -> Tensor:
    """Returns the fp32 scales by which `E2M1` gives MXFP4's numbers, of exponents plus 127 in uint8 (E8M0)."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)
