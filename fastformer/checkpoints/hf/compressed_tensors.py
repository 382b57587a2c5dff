"""Folders that llm-compressor quantised, in the formats of compressed-tensors.

config.json has a quantization_config whose config_groups are schemes: the modules that a scheme applies to, and how it
rounded their weights and inputs. The tensors of a quantised module X, (out, in), are

X.weight_packed      pack-quantized: (out, words) int32 of 4 or 8 bits, the first input in the lowest bits, each number
                     plus half of the range; X.weight_shape has (out, in)
X.weight             int-quantized: (out, in) int8. float-quantized: (out, in) float8_e4m3fn. naive-quantized: either
X.weight_scale       by strategy, "tensor": one; "channel": (out, 1); "group": (out, in / group_size); "block": one for
                     each block_structure of rows and columns
X.weight_zero_point  like the scales, int8; or packed along out, in pack-quantized of groups and channels
X.weight_g_idx       (in) the group of each input; a -1 among them: neighbours are a group, as without it

A weight is scale * (q - zero). Modules without these tensors, which `ignore` lists, are not quantised. The scales and
zeros of inputs, outputs, keys and values are not read: the C++ engine rounds inputs to int8 by the numbers in each row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.checkpoints.hf.quantized_layer import QuantizedLayer, unpacked
from fastformer.models.weights import FLOATING

METHOD = "compressed-tensors"
FLOAT = "float"
_FORMATS = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": (FLOAT,),
    "naive-quantized": ("int", FLOAT),
}
_BITS = {"int": (4, 8), FLOAT: (8,)}
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED, _SCALE = ".weight_packed", ".weight_scale"
_UNREAD = re.compile(r".+\.(?:(?:input|output|[qkv])_(?:scale|zero_point))")
# A repeated group with a repetition inside, for which matching may take exponential time.
_NESTED = re.compile(r"\([^()]*[*+}][^()]*\)[*+{]")
_MOST_PATTERN = 300


class Scheme(NamedTuple):
    """How the weights of some modules were rounded.

    Attributes:
        format: a format in `_FORMATS`.
        kind: "int" or "float".
        bits: the bits of a number.
        strategy: see the top of this module.
        size: for "group", the number of inputs in a group.
        block: for "block", its rows and columns.
        is_symmetric: whether the zeros may be missing.
    """

    format: str
    kind: str
    bits: int
    strategy: str
    size: int
    block: tuple[int, int]
    is_symmetric: bool


def read_schemes(quantization: Mapping[str, Any]) -> dict[str, Scheme]:
    """Returns the schemes of a quantization_config by their targets, in the order in which a module looks for its own.

    A target is the name of a module, a pattern of names with "re:" in front, or the name of a class.

    Raises:
        ValueError: a format, a strategy or a number of bits that fastformer can't read.
    """
    for name in ("sparsity_config", "transform_config"):
        value = quantization.get(name) or {}
        if not isinstance(value, Mapping) or value.get("format", "dense") != "dense" or value.get("config_groups"):
            raise ValueError(f"expected {METHOD} without a {name}, got {value!r:.80}")
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"expected {METHOD} to have config_groups by name, got {groups!r:.60}")
    schemes: dict[str, Scheme] = {}
    for name, group in groups.items():
        schemes |= _by_target(name, group, quantization.get("format"))
    return dict(sorted(schemes.items(), key=lambda item: (item[0].startswith("re:"), item[0])))


def _by_target(name: str, group: Any, usual: Any) -> dict[str, Scheme]:
    """Returns the scheme of an entry of config_groups for each of its targets; {}: its weights aren't quantised."""
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"expected {name} in config_groups to have a list of targets, got {group!r:.80}")
    for target in targets:
        _check_pattern(target)
    weights = group.get("weights")
    if weights is None:
        return {}
    if not isinstance(weights, Mapping):
        raise ValueError(f"expected the weights of {name} in config_groups to be a mapping, got {weights!r:.60}")
    form = group.get("format") or usual
    kinds = _FORMATS.get(str(form))
    if kinds is None:
        raise ValueError(f"expected {METHOD} with a format in {(*_FORMATS,)}, got {form!r:.60}")
    kind, bits = str(weights.get("type", "int")).lower(), weights.get("num_bits", 8)
    if kind not in kinds:
        raise ValueError(f"expected weights of type {' or '.join(kinds)} in the format {form}, got {kind!r:.60}")
    if bits not in _BITS[kind]:
        known = " or ".join(map(str, _BITS[kind]))
        raise ValueError(f"expected weights of type {kind} with num_bits of {known} in the format {form}, got {bits!r}")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if str(strategy).lower() not in _STRATEGIES:
        raise ValueError(f"expected weights with a strategy in {_STRATEGIES}, got {strategy!r:.60}")
    strategy = str(strategy).lower()
    if strategy == "group" and not _is_size(size):
        raise ValueError(f"expected a group_size above 0 for the strategy 'group', got {size!r:.60}")
    block = weights.get("block_structure") or (0, 0)
    if isinstance(block, str):  # "128x128", in older folders
        block = [int(side) for side in block.split("x") if side.isdecimal()]
    if strategy == "block" and not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise ValueError(f"expected a block_structure of rows and columns for the strategy 'block', got {block!r:.60}")
    is_symmetric = weights.get("symmetric", True) is not False
    size = int(size or 0) if strategy == "group" else 0
    block = (*block,) if strategy == "block" else (0, 0)
    return dict.fromkeys(targets, Scheme(str(form), kind, bits, strategy, size, block, is_symmetric))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _check_pattern(target: str) -> None:
    pattern = target.removeprefix("re:")
    if pattern == target:
        return
    try:
        is_simple = len(pattern) <= _MOST_PATTERN and not _NESTED.search(pattern)
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"expected a regular expression among the targets, got {target!r:.80} ({error})") from error
    if not is_simple:
        raise ValueError(f"expected short patterns without nested repetitions among the targets, got {target!r:.80}")


def layers_in(left: dict[str, Tensor]) -> list[str]:
    """Removes the tensors that aren't read from a state, and returns the names of the quantised modules."""
    for name in [name for name in left if _UNREAD.fullmatch(name)]:
        del left[name]
    return [*dict.fromkeys(name.removesuffix(end) for name in left for end in (_PACKED, _SCALE) if name.endswith(end))]


def take_layer(name: str, quantization: Mapping[str, Any], left: dict[str, Tensor]) -> QuantizedLayer:
    """Removes the tensors of a quantised module from a state, and returns its parts.

    Args:
        name: the name of the module.
        quantization: has its `schemes`.
        left: the state.

    Raises:
        ValueError: tensors are missing or don't fit one another.
    """
    return _layer(name, _scheme_of(name, quantization["schemes"]), left)


def _scheme_of(name: str, by_target: Mapping[str, Scheme]) -> Scheme:
    """Returns the scheme of a module: that of its name, else of a pattern, else of its class."""
    is_table = re.search(r"embed|wte$", name.rsplit(".", 1)[-1]) is not None
    for target, scheme in by_target.items():
        if target == name or (target.startswith("re:") and re.match(target[3:], name)):
            return scheme
    for target, scheme in by_target.items():
        if not target.startswith("re:") and "." not in target and is_table == (target == "Embedding"):
            return scheme
    raise ValueError(f"expected {name} to be one of the quantised modules {(*by_target,)!r:.200}, since it has scales")


def _layer(name: str, scheme: Scheme, left: dict[str, Tensor]) -> QuantizedLayer:
    parts = {
        part: left.pop(f"{name}.weight{part}", None)
        for part in ("", "_packed", "_shape", "_scale", "_zero_point", "_g_idx")
    }
    is_packed, is_float = scheme.format == "pack-quantized", scheme.kind == FLOAT
    stored, scales = parts["_packed" if is_packed else ""], parts["_scale"]
    dtype = torch.int32 if is_packed else torch.float8_e4m3fn if is_float else torch.int8
    if stored is None or stored.dim() != 2 or stored.dtype != dtype:
        end = "weight_packed" if is_packed else "weight"
        raise ValueError(
            f"expected {name}.{end} to be a matrix of {dtype}, as {scheme.format} has it, got {_described(stored)}"
        )
    if scales is None or scales.dtype not in FLOATING:
        raise ValueError(f"expected {name}.weight_scale of floating-point numbers, got {_described(scales)}")
    outputs, inputs = stored.shape
    if is_packed:
        outputs, inputs = _shape_of(name, stored, parts["_shape"], scheme.bits)

    def q(rows: Tensor) -> Tensor:
        if is_packed:
            return unpacked(rows, scheme.bits)[:, :inputs]
        return rows if is_float else _unsigned(f"{name}.weight", rows, scheme.bits)

    scales, group_of = _by_group(f"{name}.weight_scale", scales, scheme, outputs, inputs)
    zeros = _zeros(name, parts["_zero_point"], scheme, scales.shape[1], outputs, inputs)
    if (index := parts["_g_idx"]) is not None:
        group_of = _group_of(name, index, scheme, scales.shape[1], group_of)
    return QuantizedLayer(f"{name}.weight", stored, q, scales, zeros, group_of, scheme.bits, is_float)


def _described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {(*tensor.shape,)}"


def _shape_of(name: str, packed: Tensor, shape: Tensor | None, bits: int) -> tuple[int, int]:
    """Returns weight_shape, which has to fit the packed words."""
    sizes = [] if shape is None or shape.is_floating_point() or shape.numel() != 2 else [*map(int, shape.flatten())]
    if len(sizes) != 2 or sizes[0] != len(packed) or not sizes[1] > 0 or -(-sizes[1] * bits // 32) != packed.shape[1]:
        got = _described(shape) if len(sizes) != 2 else sizes
        raise ValueError(
            f"expected {name}.weight_shape with the sizes of a matrix in {(*packed.shape,)} words of {32 // bits} "
            f"numbers, got {got}"
        )
    return sizes[0], sizes[1]


def _unsigned(name: str, stored: Tensor, bits: int) -> Tensor:
    """Returns int8 numbers plus half of their range, as uint8."""
    if stored.dtype != torch.int8:
        raise ValueError(f"expected {name} of torch.int8, got {_described(stored)}")
    half = 1 << (bits - 1)
    if stored.numel() and (int(stored.min()) < -half or int(stored.max()) >= half):
        raise ValueError(f"expected {name} to be from {-half} to {half - 1}, got {int(stored.min())} to {stored.max()}")
    return stored.view(torch.uint8) + half


def _by_group(name: str, tensor: Tensor, scheme: Scheme, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Returns scales or zeros as (out, groups), and the group of each input."""
    rows, columns = 1, inputs
    if scheme.strategy == "block":
        rows, columns = scheme.block
    elif scheme.strategy == "group":
        columns = scheme.size
        if inputs % columns:
            raise ValueError(f"expected {name} of groups of {columns} inputs, of which {inputs} is no multiple")
    expected = -(-outputs // rows), -(-inputs // columns)
    if scheme.strategy == "tensor":
        expected = (1, 1)
    if tensor.numel() != expected[0] * expected[1] or (tensor.dim() > 1 and tensor.shape != expected):
        raise ValueError(f"expected {name} of shape {expected}, as the strategy {scheme.strategy!r} has it, got "
                         f"{(*tensor.shape,)}")  # fmt: skip
    tensor = tensor.reshape(expected)
    tensor = tensor.expand(outputs, 1) if scheme.strategy == "tensor" else tensor.repeat_interleave(rows, 0)[:outputs]
    return tensor, torch.arange(inputs) // columns


def _zeros(name: str, stored: Tensor | None, scheme: Scheme, groups: int, outputs: int, inputs: int) -> Tensor:
    """Returns the zeros (out, groups), plus half of the range if they are whole numbers."""
    name = f"{name}.weight_zero_point"
    if stored is None:
        if not scheme.is_symmetric:
            raise ValueError(f"expected {name}, since the weights are not symmetric, got none")
        zero = 0 if scheme.kind == FLOAT else 1 << (scheme.bits - 1)
        return torch.full((1, 1), zero, dtype=torch.uint8).expand(outputs, groups)
    if stored.dtype == torch.int32 and scheme.kind != FLOAT and scheme.strategy in ("group", "channel"):
        expected = -(-outputs * scheme.bits // 32), groups
        if stored.shape != expected:
            raise ValueError(f"expected {name} of shape {expected}, as its numbers are packed, got {(*stored.shape,)}")
        return unpacked(stored.T, scheme.bits)[:, :outputs].T
    if scheme.kind == FLOAT:
        return _by_group(name, stored.float(), scheme, outputs, inputs)[0]
    return _by_group(name, _unsigned(name, stored, scheme.bits), scheme, outputs, inputs)[0]


def _group_of(name: str, index: Tensor, scheme: Scheme, groups: int, neighbours: Tensor) -> Tensor:
    """Returns the group of each input by weight_g_idx."""
    if index.dtype not in (torch.int32, torch.int64) or index.shape != neighbours.shape:
        raise ValueError(f"expected {name}.weight_g_idx of {len(neighbours)} integers, got {_described(index)}")
    if bool((index == -1).any()):
        return neighbours
    counts = torch.bincount(index.clamp(0, groups - 1).long(), minlength=groups)
    if (
        scheme.strategy != "group"
        or int(index.min()) < 0
        or int(index.max()) >= groups
        or (counts != scheme.size).any()
    ):
        raise ValueError(f"expected {name}.weight_g_idx to name each of {groups} groups for {scheme.size} inputs")
    return index.long()
