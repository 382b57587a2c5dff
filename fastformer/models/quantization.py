"""Rounds weights for `model.quantize()`, and packs them for the folder of a quantised model.

int8: a row of a matrix becomes scale * q, with q from -127 to 127 and scale = max|row| / 127 in fp32. A matrix that was
rounded to such a grid in a dtype does not change when it is rounded again in that dtype (dividing 127 * scale by 127 in
fp32 gives scale back, whatever its mantissa), so a folder can hold q and scale and give the same bits back. Another
dtype has a grid of its own: if a folder that was rounded in fp32 is loaded as bf16 and saved again, weights differ by
up to a unit in bf16's last place.

int4: 32 neighbours in a row become scale * (q - zero), with q from 0 to 15 and an fp16 scale; zero is 8 unless the
weights were rounded by a program that chose others. Such a program may have used levels at uneven distances instead:
scale * levels[q]. The weights alone don't determine q and scale, so the model stores
them (`Groups`) with the weights, and uses them as long as they reproduce the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastformer.models.weights import Entry, is_finite
from fastformer.nn.attention import MultiheadAttention
from fastformer.nn.mixture import StackedLinear
from fastformer.ops.quantized_linear import GROUP as GROUP
from fastformer.ops.quantized_linear import QuantizedMatrix, QuantizedWeights, dequantized

INT8, INT4 = "int8", "int4"
QUANTIZED = (INT8, INT4)
SCALE, ZERO, LEVELS = ".scale", ".zero", ".levels"  # the name of a matrix X's scales is X.scale
_MOST = 127
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # below this scale, fp32 lacks the bits that the grid needs
# The candidates for the value of a group's largest number, of which the best is used: beyond -8 that number is clipped,
# and the other ones get finer steps.
_ENDS = (-8.0, -8.5, -9.0, -9.5)
_ROUNDED_AT_ONCE = 1 << 16  # numbers at a time, so that they stay in a core's cache


class Groups(NamedTuple):
    """A matrix (rows, columns) as int4, in groups of 32 columns; the last may be shorter.

    Attributes:
        nibbles: (rows, 16 * groups) uint8, two q from 0 to 15 in each: the low half comes first.
        scale: (rows, groups) fp16; or fp32 beside levels.
        zero: (rows, groups) uint8, up to 16; None: all are 8.
        levels: (16,) int8, the value of each q, without zeros and an incomplete group; None: q itself, less its zero.
    """

    nibbles: Tensor
    scale: Tensor
    zero: Tensor | None = None
    levels: Tensor | None = None


def quantized_names(model: nn.Module) -> list[str]:
    """Lists the entries of a state_dict that are quantised: weights of linear layers, attention and embeddings."""
    return [name for name, _ in _matrices(model)]


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    entries = model.state_dict()  # without the names of layers that share the weights of others
    return ((name, weight) for name, weight in _named_matrices(model) if name in entries)


def _named_matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        dotted = f"{prefix}." if prefix else ""
        if isinstance(module, nn.Linear | nn.Embedding | StackedLinear):
            yield f"{dotted}weight", module.weight
        elif isinstance(module, MultiheadAttention):
            for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                if (weight := getattr(module, name)) is not None:
                    yield dotted + name, weight


# ---- int8 ----


def to_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a matrix to the nearest point of its grid.

    Args:
        weight: (rows, columns), floating-point.

    Returns:
        (q (rows, columns) int8, scale (rows,) fp32). A row whose scale isn't a normal number becomes 0.

    Raises:
        ValueError: NaN or infinite weights.
    """
    weight = weight.detach().float()
    if not is_finite(weight):
        raise ValueError("expected finite weights to quantise, got NaN or infinite ones")
    scale = weight.abs().amax(1) / _MOST if weight.shape[1] else weight.new_zeros(len(weight))
    scale = torch.where(scale < _LEAST_SCALE, 0.0, scale)
    steps = torch.where(scale[:, None] > 0, weight / scale[:, None], 0.0)
    return steps.round().clamp(-_MOST, _MOST).to(torch.int8), scale


def from_grid(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes scale * q in fp32; returns (rows, columns) in a dtype."""
    return dequantized(q, scale, None, q.shape[1], dtype)


# ---- int4 ----


def num_groups(columns: int) -> int:
    """Returns the number of groups of 32 columns, of which the last may be shorter."""
    return -(-columns // GROUP)


def to_groups(weight: Tensor) -> Groups:
    """Rounds a matrix to int4: of a few scales, each group gets the one that changes its numbers the least.

    Args:
        weight: (rows, columns), floating-point.

    Returns:
        The matrix's groups, on the CPU. If a group has no scale in fp16, because of a NaN, an infinity or numbers
        beyond 500,000, the scale is NaN or infinite.
    """
    weight = weight.detach()
    rows, groups = len(weight), num_groups(weight.shape[1])
    nibbles = torch.empty(rows, groups * GROUP // 2, dtype=torch.uint8)
    scale = torch.empty(rows, groups, dtype=torch.float16)
    step = max(1, _ROUNDED_AT_ONCE // max(1, groups * GROUP))
    for first in range(0, rows if groups else 0, step):
        chunk = slice(first, first + step)
        part = weight[chunk].to("cpu", torch.float32)
        padded = nn.functional.pad(part, (0, groups * GROUP - part.shape[1])).view(len(part), groups, GROUP)
        q, scale[chunk] = _nearest(padded)
        nibbles[chunk] = (q[..., ::2] | q[..., 1::2] << 4).flatten(1)
    return Groups(nibbles, scale)


def _nearest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds groups of numbers (..., 32) to q (..., 32) uint8 and scale (...) fp16."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best: tuple[Tensor, ...] | None = None
    for end in _ENDS:
        scale = (largest / end).half().float()
        inverse = torch.where(scale != 0, 1 / scale, 0.0)
        q = (x * inverse).round_().clamp_(-8, 7)
        error = torch.addcmul(x, q, scale, value=-1).square_().sum(-1, keepdim=True)
        if best is None:
            best = q, scale, error
        else:
            pairs, is_better = zip((q, scale, error), best, strict=True), error < best[2]
            best = tuple(torch.where(is_better, new, old) for new, old in pairs)
    assert best is not None
    q, scale, _ = best
    # A group with NaN gets a NaN scale, and any q.
    return q.nan_to_num_().add_(8).to(torch.uint8), scale.squeeze(-1).half()


def from_groups(groups: Groups, columns: int, dtype: torch.dtype) -> Tensor:
    """Computes the matrix (rows, columns) in a dtype: scale * (q - zero), exact in fp32 and then rounded once."""
    return dequantized(*groups[:3], columns, dtype, groups.levels)


def is_on(groups: Groups, weight: Tensor) -> bool:
    """Returns whether the groups reproduce a matrix in its dtype, also if it was in a smaller dtype in between."""
    expected = weight.detach().cpu()
    dtypes = (expected.dtype, torch.bfloat16, torch.float16)
    return any(
        torch.equal(from_groups(groups, expected.shape[1], dtype).to(expected.dtype), expected) for dtype in dtypes
    )


def groups_of(model: nn.Module, tensors: Iterable[Tensor]) -> dict[int, Groups]:
    """Returns matrices of a model as int4, by their ids.

    A model that is quantised to int4 has stored groups; if weights have changed since, they are rounded again, and
    matrices without stored groups are omitted. For any other model all matrices are rounded.

    Args:
        model: the model of the matrices.
        tensors: matrices of the model; other tensors are ignored.
    """
    stored: Mapping[str, Groups] | None = getattr(model, "int4_groups", None)
    ids, groups = {id(tensor) for tensor in tensors}, dict[int, Groups]()
    for name, weight in _matrices(model):
        if id(weight) in ids - groups.keys() and (stored is None or name in stored):
            groups[id(weight)] = _current(None if stored is None else stored[name], weight)
    return groups


def _current(groups: Groups | None, weight: Tensor) -> Groups:
    return groups if groups is not None and is_on(groups, weight) else to_groups(weight)


# ---- models and folders ----


def quantized_weights(model: nn.Module) -> QuantizedWeights:
    """Returns the matrices of a quantised model as whole numbers, on its device, for steps of decoding.

    A table of embeddings that isn't the output's weight is left out: rows are read from it, and nothing multiplies it.

    Raises:
        ValueError: a matrix has levels, which only the C++ engine reads.
    """
    output = getattr(model, "output_weight", None)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(output)}
    stored: Mapping[str, Groups] | None = getattr(model, "int4_groups", None)
    matrices: list[tuple[Tensor, QuantizedMatrix]] = []
    for name, weight in _matrices(model):
        if id(weight) in tables or not weight.is_contiguous():
            continue
        if stored is None:
            matrices.append((weight, QuantizedMatrix(*to_grid(weight))))
        elif name in stored:
            groups = _current(stored[name], weight)
            if groups.levels is not None:
                raise ValueError(f"expected int4 of even steps, got the levels {groups.levels.tolist()} of {name}")
            matrices.append((weight, QuantizedMatrix(*groups[:3]).to(weight.device)))
    return QuantizedWeights(matrices)


@torch.no_grad()
def round_weights(model: nn.Module, precision: str) -> dict[str, Groups] | None:
    """Rounds the weights of a model to the grid of "int8" or "int4".

    Returns:
        For int4 the groups for the model to store.

    Raises:
        ValueError: NaN or infinite weights, or weights for which int4 has no scale.
    """
    state, groups = model.state_dict(), {}
    before: Mapping[str, Groups] = getattr(model, "int4_groups", None) or {}
    for name in quantized_names(model):
        try:
            if precision == INT8:
                state[name].copy_(from_grid(*to_grid(state[name]), state[name].dtype))
                continue
            groups[name] = _finite(_current(before.get(name), state[name]))
            state[name].copy_(from_groups(groups[name], state[name].shape[1], state[name].dtype))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return groups if precision == INT4 else None


def _finite(groups: Groups) -> Groups:
    if not groups.scale.isfinite().all():
        raise ValueError("expected finite weights below 500,000 to quantise, got others")
    return groups


def packed_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Packs a state for the folder of a quantised model: each quantised entry becomes whole numbers and scales.

    Raises:
        ValueError: see `round_weights`.
    """
    packed = dict(state)
    stored: Mapping[str, Groups] | None = getattr(model, "int4_groups", None)
    for name in quantized_names(model):
        if stored is None:
            packed[name], packed[name + SCALE] = to_grid(state[name])
        elif name in stored:
            groups = _finite(_current(stored[name], state[name]))
            packed[name], packed[name + SCALE] = groups.nibbles, groups.scale
            if groups.zero is not None:
                packed[name + ZERO] = groups.zero
            if groups.levels is not None:
                packed[name + LEVELS] = groups.levels.clone()  # a file has no tensors that share memory
    return packed


def packed_entries(
    model: nn.Module, entries: dict[str, Entry], precision: str, saved: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Returns the names, shapes and dtypes of the entries of a model's `packed_state`.

    Args:
        model: on any device, "meta" too.
        entries: the entries of the model's state.
        precision: "int8" or "int4".
        saved: the entries of the folder, which tell the matrices that are in int4 and those that have zeros.
    """
    packed = dict(entries)
    for name in quantized_names(model):
        rows, columns = entries[name].shape
        if precision == INT8:
            packed[name], packed[name + SCALE] = Entry((rows, columns), torch.int8), Entry((rows,), torch.float32)
        elif name + SCALE in saved or (name in saved and saved[name].dtype == torch.uint8):
            shape = rows, num_groups(columns)
            packed[name] = Entry((rows, shape[1] * GROUP // 2), torch.uint8)
            packed[name + SCALE] = Entry(shape, torch.float16)
            if name + LEVELS in saved:
                packed[name + SCALE] = Entry(shape, torch.float32)
                packed[name + LEVELS] = Entry((1 << 4,), torch.int8)
            elif name + ZERO in saved:
                packed[name + ZERO] = Entry(shape, torch.uint8)
    return packed


def unpacked_state(
    model: nn.Module, packed: dict[str, Tensor], precision: str
) -> tuple[dict[str, Tensor], dict[str, Groups] | None]:
    """Unpacks a state from `packed_state` in the model's dtype; also returns the groups for a model in int4 to store.

    Args:
        model: the model of the state.
        packed: the packed state, with the entries of `packed_entries`.
        precision: "int8" or "int4".
    """
    state, reference = dict(packed), model.state_dict()
    groups: dict[str, Groups] = {}
    for name in quantized_names(model):
        if precision == INT8:
            state[name] = from_grid(state[name], state.pop(name + SCALE), reference[name].dtype)
        elif name + SCALE in state:
            zero, levels = (state.pop(name + part, None) for part in (ZERO, LEVELS))
            groups[name] = Groups(state[name], state.pop(name + SCALE), zero, levels)
            state[name] = from_groups(groups[name], reference[name].shape[1], reference[name].dtype)
    return state, groups if precision == INT4 else None
