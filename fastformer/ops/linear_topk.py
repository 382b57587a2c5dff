"""The last linear map and the choice of its best outputs in one op: the logits are never in memory as a whole.

For a row with logits z = x weight^T, the k largest z_j in descending order, and their j; with log_probs
z_j - log(sum(exp(z))). Products are summed in fp32 (fp64 for fp64) and never rounded to a narrower dtype. In bf16,
whose steps near 20 are an eighth, many tokens would be equal, and the best of them would be a matter of chance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastformer.ops._autograd import refuse_derivatives
from fastformer.ops._common import accumulation_dtype, check_linear, cpp_unsupported_dtype, resolve_softcap, soft_capped
from fastformer.ops._dispatch import autocast
from fastformer.ops._library import define_op
from fastformer.ops.quantized_linear import QuantizedMatrix, acting_copy, quantized_linear

# The rows whose logits the reference computes at a time, and the classes whose weights it widens at a time: both fit
# in a cache.
CHUNK_ROWS, CHUNK_CLASSES = 512, 1024


class TopK(NamedTuple):
    """The k best outputs of each row, in descending order.

    Attributes:
        values: (..., k) fp32 (fp64 for fp64), log-probabilities or logits.
        indices: (..., k) int64, their indices in the vocabulary.
    """

    values: Tensor
    indices: Tensor


def _check_k(k: object, vocab_size: int) -> None:
    """Raises ValueError unless k is an integer from 1 to vocab_size."""
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= vocab_size:
        raise ValueError(f"expected k to be an integer from 1 to vocab_size {vocab_size}, got {k!r}")


def _wide_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x weight^T in fp32 (fp64 for fp64), never rounded to anything narrower."""
    dtype = accumulation_dtype(x.dtype)
    if x.dtype == dtype:
        return x @ weight.T
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=dtype)
    x = x.to(dtype)
    logits = x.new_empty(x.shape[0], weight.shape[0])
    for classes, part in zip(weight.split(CHUNK_CLASSES), logits.split(CHUNK_CLASSES, 1), strict=True):
        torch.mm(x, classes.to(dtype).T, out=part)
    return logits


def _best(logits: Tensor, k: int, may_read: bool) -> tuple[Tensor, Tensor]:
    """Returns the k largest values of each row in descending order, and their indices, (..., k) each.

    Of equal values, the one with the lower index comes first; NaN counts as largest. Unless it may read values on the
    host, a CUDA graph can capture it; on a CPU reading is several times as fast.
    """
    if k == 1:
        values, indices = logits.max(-1, keepdim=True)
        return values, indices
    if may_read:
        return _best_by_reading(logits, k)
    if logits.dtype != torch.float32:
        values, indices = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]
    # topk chooses any of equal values, and among 16-bit logits many are equal. So it chooses among integers that are
    # all different: the high half has the bits of the number (those of negative numbers are inverted, so that they are
    # ordered like the numbers), the low half has the negated index. (+ 0.0 turns minus zero into zero.)
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().mul_(2**32)
    indices = keys.sub_(torch.arange(logits.shape[-1], device=logits.device)).topk(k).indices
    return logits.gather(-1, indices), indices


def _best_by_reading(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = logits.topk(min(k + 1, logits.shape[-1]))
    tied = (values[..., 1:] == values[..., :-1]).any(-1) & ~values[..., 0].isnan()
    values, indices = values[..., :k], indices[..., :k]
    if bool(tied.any()):  # topk chooses any of the equal values
        rows, last = logits[tied], values[tied][:, -1:]
        above, equal = rows > last, rows == last
        room = k - above.sum(-1, keepdim=True)
        selected = above | (equal & (equal.cumsum(-1) <= room))
        lowest = selected.nonzero()[:, 1].view(-1, k)  # ascending, and a stable sort keeps the order of equal values
        order = rows.gather(-1, lowest).sort(dim=-1, descending=True, stable=True).indices
        indices = indices.masked_scatter(tied[..., None], lowest.gather(-1, order))
    return values, indices


def reading_is_free(x: Tensor) -> bool:
    """Returns whether the host can read x without waiting. Tests that simulate a GPU on a CPU replace this function."""
    return x.device.type == "cpu"


def best_of_logits(logits: Tensor, k: int, *, log_probs: bool = True, may_read: bool | None = None) -> TopK:
    """Computes the result of `linear_topk` from existing logits (..., vocab_size) of any floating-point dtype.

    Args:
        logits, k, log_probs: see `linear_topk`.
        may_read: whether values may be read on the host; None: only on a CPU.

    Raises:
        ValueError: k isn't an integer from 1 to vocab_size.
    """
    _check_k(k, logits.shape[-1])
    logits = logits.to(accumulation_dtype(logits.dtype))
    may_read = reading_is_free(logits) if may_read is None else may_read
    values, indices = _best(logits, k, may_read)
    # +inf and, for topk, NaN count as largest. Ordered by its bits a NaN may come last, but a row's maximum is then
    # NaN.
    largest = values[..., :1] if may_read else logits.amax(-1, keepdim=True)
    broken = ~(largest < torch.inf)
    if log_probs:
        # Not logits - lse: a large lse has few digits after the point.
        values = logits.log_softmax(-1).gather(-1, indices)
    first = torch.arange(k, device=logits.device).expand_as(indices)
    return TopK(values.masked_fill(broken, torch.nan), torch.where(broken, first, indices))


def linear_topk_reference(
    x: Tensor, weight: Tensor, k: int, log_probs: bool, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns (values, indices), both (rows, k)."""
    chunks = [
        best_of_logits(soft_capped(_wide_logits(chunk, weight), softcap), k, log_probs=log_probs)
        for chunk in x.split(CHUNK_ROWS)
    ]
    values, indices = zip(*chunks, strict=True)
    return torch.cat(values), torch.cat(indices)


def _fake(x: Tensor, weight: Tensor, k: int, *_: object) -> tuple[Tensor, Tensor]:
    values = x.new_empty((x.shape[0], k), dtype=accumulation_dtype(x.dtype))
    return values, values.new_empty(values.shape, dtype=torch.int64)


_op = define_op(
    "linear_topk(Tensor x, Tensor weight, int k, bool log_probs, float softcap=0.0) -> (Tensor values, Tensor indices)",
    linear_topk_reference,
    fake=_fake,
    cpp_unsupported=cpp_unsupported_dtype,
)


def quantized_topk_reference(
    x: Tensor, q: Tensor, scale: Tensor, zero: Tensor | None, k: int, log_probs: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    """Returns (values, indices) for a quantised weight, both (rows, k)."""
    logits = quantized_linear(x, QuantizedMatrix(q, scale, zero), is_wide=True)
    return tuple(best_of_logits(soft_capped(logits, softcap), k, log_probs=log_probs))  # type: ignore[return-value]


_quantized_op = define_op(
    "quantized_topk(Tensor x, Tensor q, Tensor scale, Tensor? zero, int k, bool log_probs, float softcap) "
    "-> (Tensor values, Tensor indices)",
    quantized_topk_reference,
    stem="linear_topk",
    fake=lambda x, q, scale, zero, k, *_: _fake(x, q, k),
    reference_only={"cpp": "on a CPU the C++ engine decodes quantised models, with products of its own"},
)


def linear_topk(x: Tensor, weight: Tensor, k: int, *, log_probs: bool = True, softcap: float = 0.0) -> TopK:
    """Returns the k best of x @ weight.T for each row, with their log-probabilities. It has no gradients.

    If a row's logits contain NaN or +inf, all values of the row are NaN (and its indices 0 ... k-1), with and without
    log_probs. -inf is an ordinary logit; if all logits are -inf, the log-probabilities are NaN.

    On a CPU with the C++ extension, the bits of a row depend neither on the other rows nor on the number of threads
    (in bf16 on a CPU with AMX, this holds as far as it does for oneDNN's products).

    Under autocast an fp32 weight is cast in each call, because PyTorch doesn't share its cache of casts. To decode in
    16 bits, a model in 16 bits is faster.

    Args:
        x: (..., dim), floating point.
        weight: (vocab_size, dim) as in nn.Linear, x's dtype.
        k: the number of outputs, from 1 to vocab_size.
        log_probs: return log-probabilities instead of the logits, which are cheaper.
        softcap: c of c * tanh(logit / c), which is applied to the logits; 0 = no cap. Capped logits are finite, and
            large ones may be equal.

    Returns:
        values: (..., k), fp32 (fp64 for fp64), in descending order. Under autocast the products run in the autocast
            dtype and the values stay fp32.
        indices: (..., k) int64. Of equal values, the lower index comes first, so that the best are the same for every
            k.

    Raises:
        ValueError: shapes or dtypes don't agree, k isn't an integer from 1 to vocab_size, or softcap is below 0.
    """
    is_usual = not torch.compiler.is_compiling() and type(x) is Tensor and x.dim() == 2 and isinstance(weight, Tensor)
    is_usual = is_usual and acting_copy(x, weight) is None
    if is_usual and (best := _op.repeat(x, weight, k, log_probs, softcap)) is not None:
        return TopK(*best)
    refuse_derivatives("linear_topk", x, weight)
    x, weight = autocast("linear_topk", x, weight)
    check_linear(x, weight, None, "vocab_size")
    _check_k(k, weight.shape[0])
    if not isinstance(log_probs, bool):
        raise ValueError(f"expected log_probs to be True or False, got {log_probs!r}")
    cap = resolve_softcap(softcap)
    copy = acting_copy(x, weight)
    if torch.is_grad_enabled():
        # A call that differentiates the result gets an error instead of zeros.
        x, weight = x.detach(), weight.detach()
    # A decode step takes well under a millisecond: even views that change nothing would be noticeable.
    if is_usual:
        _op.settle((x, weight, k, log_probs, cap))
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if copy is not None:
        values, indices = _quantized_op(rows, *copy, k, log_probs, cap)
    else:
        values, indices = _op(rows, weight, k, log_probs, cap)
    if x.dim() == 2:
        return TopK(values, indices)
    shape = (*x.shape[:-1], k)
    return TopK(values.view(shape), indices.view(shape))
