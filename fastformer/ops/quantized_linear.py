"""Products of a few rows with matrices in int8 or int4 on a GPU, and the way in which modules find these matrices.

A step of decoding takes the time of reading the weights. Inside of `QuantizedWeights.acting`, `ops.linear`,
`feed_forward` and `linear_topk` read whole numbers in place of a weight that has them: half of the bytes of 16 bits in
int8, a good quarter in int4. A call with more rows multiplies the weight itself, whose numbers are the same, rounded to
its dtype. On a CPU the C++ engine has products of its own, which round the rows, too.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.ops._dispatch import forced_backend
from fastformer.ops._library import define_op

MOST_ROWS = 64  # with more rows, multiplying takes longer than reading the weight
GROUP = 32  # neighbours in a row that have one scale in int4


class QuantizedMatrix(NamedTuple):
    """A matrix (out_features, in_features) in int8 or int4, in the formats of `models.quantization`.

    Attributes:
        q: (out_features, in_features) int8; or (out_features, 16 * groups) uint8, two numbers in each.
        scale: (out_features,) fp32 for int8; (out_features, groups) fp16 for int4.
        zero: (out_features, groups) uint8 for int4; None: all are 8.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def rows(self, first: int, count: int) -> QuantizedMatrix:
        """Returns some rows, without a copy."""
        q, scale, zero = (None if x is None else x[first : first + count] for x in self)
        assert q is not None and scale is not None
        return QuantizedMatrix(q, scale, zero)

    def to(self, device: torch.device) -> QuantizedMatrix:
        """Returns the matrix on a device."""
        zero = None if self.zero is None else self.zero.to(device)
        return QuantizedMatrix(self.q.to(device), self.scale.to(device), zero)


def dequantized(
    q: Tensor, scale: Tensor, zero: Tensor | None, columns: int, dtype: torch.dtype, levels: Tensor | None = None
) -> Tensor:
    """Computes the numbers of a quantised matrix, (rows, columns) in a dtype: exact in fp32 and then rounded once.

    Args:
        q, scale, zero: see `QuantizedMatrix`.
        columns: the number of columns.
        dtype: the dtype of the result.
        levels: (16,) int8, the values of the numbers from 0 to 15 of int4; None: they are less `zero`.
    """
    if q.dtype == torch.int8:
        return (q.float() * scale[:, None]).to(dtype)
    numbers = torch.stack([q & 15, q >> 4], -1).view(*scale.shape, GROUP)
    if levels is not None:
        numbers = F.embedding(numbers.int(), levels.float()[:, None]).squeeze(-1)  # faster than an index
    else:
        numbers = numbers.float() - (8 if zero is None else zero[..., None].float())
    return (numbers * scale[..., None].float()).flatten(1)[:, :columns].to(dtype)


def quantized_linear_reference(
    x: Tensor, q: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, is_wide: bool
) -> Tensor:
    """Computes x weight^T + bias, from the weight in x's dtype."""
    weight = dequantized(q, scale, zero, x.shape[1], x.dtype)
    if is_wide and x.dtype.itemsize < 4:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    return F.linear(x, weight, bias)


def _fake(x: Tensor, q: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, is_wide: bool) -> Tensor:
    dtype = torch.float32 if is_wide and x.dtype.itemsize < 4 else x.dtype
    return x.new_empty(x.shape[0], q.shape[0], dtype=dtype)


_op = define_op(
    "quantized_linear(Tensor x, Tensor q, Tensor scale, Tensor? zero, Tensor? bias, bool is_wide) -> Tensor",
    quantized_linear_reference,
    fake=_fake,
    reference_only={"cpp": "on a CPU the C++ engine decodes quantised models, with products of its own"},
)


def why_no_kernel(weight: Tensor) -> str | None:
    """Returns why rows of a weight's dtype on its GPU would be multiplied by the reference; None if a kernel does it.

    The reference writes the whole weight in each call, which takes longer than reading it.
    """
    if forced_backend.get() is not None or weight.device.type != "cuda":
        return None
    return _op.why_not("triton", (weight, weight, weight, None, None, False))


def quantized_linear(
    x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None, *, is_wide: bool = False
) -> Tensor:
    """Computes x weight^T + bias for a quantised weight. It has no gradients.

    Args:
        x: (..., in_features), floating point.
        matrix: the weight, (out_features, in_features).
        bias: (out_features,), x's dtype, or None.
        is_wide: return the sums unrounded, in fp32 at least.

    Returns:
        (..., out_features), x's dtype, or fp32 for 16-bit rows if `is_wide`.
    """
    rows = x.reshape(-1, x.shape[-1])
    return _op(rows, *matrix, bias, is_wide).view(*x.shape[:-1], matrix.q.shape[0])


class QuantizedWeights:
    """The quantised copies of a model's matrices, found by the place of a weight in memory.

    Args:
        matrices: (weight, its quantised copy), each weight contiguous, (out_features, in_features).
    """

    def __init__(self, matrices: Iterable[tuple[Tensor, QuantizedMatrix]]) -> None:
        found = {weight.data_ptr(): (weight.shape, matrix) for weight, matrix in matrices}
        self._places = sorted(found)
        self._matrices = [found[place] for place in self._places]

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Lets the ops of this block read the quantised copies."""
        token = _acting.set(self)
        try:
            yield
        finally:
            _acting.reset(token)

    def find(self, weight: Tensor) -> QuantizedMatrix | None:
        """Returns the copy of a weight, or of the rows of a weight that it is a view of."""
        index = bisect_right(self._places, weight.data_ptr()) - 1
        if index < 0 or weight.dim() != 2 or not weight.is_contiguous() or not weight.shape[1]:
            return None
        (out_features, in_features), matrix = self._matrices[index]
        first, within = divmod(weight.data_ptr() - self._places[index], in_features * weight.element_size())
        if within or weight.shape[1] != in_features or first + weight.shape[0] > out_features:
            return None
        return matrix if weight.shape[0] == out_features else matrix.rows(first, weight.shape[0])


_acting: ContextVar[QuantizedWeights | None] = ContextVar("fastformer_quantized_weights", default=None)


def acting_copy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> QuantizedMatrix | None:
    """Returns the quantised copy by which a call multiplies; None: it multiplies the weight itself.

    That is so for arguments that don't fit, too: `F.linear` raises its own errors.
    """
    if torch.compiler.is_compiling():
        return None
    weights = _acting.get()
    if weights is None or x.shape[-1:] != weight.shape[1:] or not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
        return None
    if x.dtype != weight.dtype or not (bias is None or (bias.shape, bias.dtype) == (weight.shape[:1], x.dtype)):
        return None
    return weights.find(weight)
