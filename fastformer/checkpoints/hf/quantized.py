"""Folders with quantised linear layers, as fp32 weights and, where the numbers allow it, as int4 for the C++ engine.

`compressed_tensors` reads the folders of llm-compressor. GPTQ and AWQ, of 4 bits, store a layer (in, out) as int32
words of 8 nibbles, `qweight` and `qzeros`, beside fp16 `scales` (groups, out). A weight is scale * (q - zero), with the
scale and the zero of its group of inputs.

GPTQ   qweight (in / 8, out): a word has 8 inputs, the first in its lowest bits. qzeros (groups, out / 8): 8 outputs. In
       the checkpoint_format "gptq" each zero is stored less 1; "gptq_v2" stores it unchanged. g_idx (in) is the group
       of each input. With desc_act the inputs of a group are not neighbours.
AWQ    ("gemm") qweight (in, out / 8), qzeros (groups, out / 8): a word has the outputs 0, 2, 4, 6, 1, 3, 5, 7 of 8.

A group of 64, 128 or all inputs is split into groups of 32 with the same scale. Groups whose inputs are not neighbours
can't be `models.quantization.Groups`: such a layer has its fp32 weights alone, which the engine rounds to int8.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.checkpoints.hf import compressed_tensors
from fastformer.checkpoints.hf.quantized_layer import QuantizedLayer, unpacked
from fastformer.files import read_json
from fastformer.models.quantization import (
    GROUP,
    INT4,
    INT8,
    QUANTIZED,
    Groups,
    from_grid,
    from_groups,
    is_on,
    num_groups,
    quantized_names,
    to_grid,
)
from fastformer.models.stored import Stored, stand_in, stored_in

logger = logging.getLogger("fastformer")

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs in a word, from its lowest bits on
_SETTINGS = "quantization_config"  # in config.json
_FILES = ("quantize_config.json", "quant_config.json")  # the files of the settings, in older folders
_OTHER_NAMES = {"w_bit": "bits", "q_group_size": "group_size", "format": "checkpoint_format"}
_CONV1D = ("gpt2",)  # families whose weights are (in, out) if they aren't quantised
_UNBIASED = ("llama", "mistral")  # families whose layers some programs saved with biases of zero
_SAMPLE_ROWS = 64  # of each matrix, by which the log says how much rounding changes
_STORED_ROWS = 16  # of each matrix in a file, which is read for it


class Dequantized(NamedTuple):
    """The weights of a quantised folder as those of a model that isn't quantised.

    Attributes:
        settings: the folder's config.json, without its quantization_config.
        state: the tensors, with fp32 weights in place of the quantised ones.
        groups: the matrices that can be int4 with the folder's numbers.
        precision: the precision in which the model is computed; None: that of its dtype.
        dtype: the dtype that has the folder's numbers; None: that of its other tensors, for most of them.
        floats: the quantised matrices of 8-bit floats.
    """

    settings: dict[str, Any]
    state: dict[str, Tensor]
    groups: list[Groups]
    precision: str | None
    dtype: torch.dtype | None
    floats: tuple[str, ...] = ()


def quantization_settings(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns how a folder's weights are quantised; None if they aren't.

    Args:
        folder: may have the settings in a file of their own.
        settings: the folder's config.json.

    Raises:
        ValueError: another method than GPTQ, AWQ and compressed-tensors, or an unsupported form of one of them.
    """
    quantization, origin = settings.get(_SETTINGS), _SETTINGS
    for name in _FILES:
        if quantization is None and (folder / name).is_file():
            quantization, origin = (
                {"quant_method": "gptq" if name == _FILES[0] else "awq", **read_json(folder / name)},
                name,
            )
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise ValueError(f"expected {origin} to be a mapping, got {quantization!r:.60}")
    method = quantization.get("quant_method")
    if method == compressed_tensors.METHOD:
        return {**quantization, "schemes": compressed_tensors.read_schemes(quantization)}
    quantization = {_OTHER_NAMES.get(name, name): value for name, value in quantization.items()}
    bits = quantization.get("bits")
    if method not in ("gptq", "awq"):
        raise ValueError(
            "expected weights that are not quantised, or by gptq, awq or compressed-tensors, got a "
            f"{origin} of {method!r}"
        )
    if bits != 4:
        raise ValueError(f"expected {method} of 4 bits, got bits {bits!r}")
    key, known = ("checkpoint_format", ("gptq", "gptq_v2")) if method == "gptq" else ("version", ("gemm",))
    form = str(quantization.get(key) or known[0]).lower()
    if form not in known or quantization.get("is_marlin_format"):
        raise ValueError(f"expected {method} with a {key} of {' or '.join(known)}, got {quantization.get(key)!r}")
    return {**quantization, "form": form}


def dequantized(
    settings: Mapping[str, Any],
    rounded: Mapping[str, Any],
    state: Mapping[str, Tensor],
    modules: Container[str] | None = None,
) -> Dequantized:
    """Returns the weights of a folder in fp32, and its matrices in groups of 32.

    Args:
        settings: the folder's config.json.
        rounded: see `quantization_settings`.
        state: the folder's tensors.
        modules: the names of the modules to dequantise, so that others stay as they are; None: all.

    Raises:
        ValueError: tensors are missing or don't fit one another.
    """
    left, groups, floats = dict(state), list[Groups](), list[str]()
    sizes = Counter[int]()  # how many whole numbers have so many bits
    kind, num_matrices, shuffled = settings.get("model_type"), 0, 0
    is_compressed = "schemes" in rounded
    names = (
        compressed_tensors.layers_in(left)
        if is_compressed
        else [name.removesuffix(".qweight") for name in left if name.endswith(".qweight")]
    )
    if not names:
        parts = "weight_scale" if is_compressed else "qweight"
        raise ValueError(f"expected {parts} tensors, as quant_method {rounded['quant_method']!r} has them, got none")
    for name in (name for name in names if modules is None or name in modules):
        try:
            layer = (compressed_tensors.take_layer if is_compressed else _layer)(name, rounded, left)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"expected the tensors of {name} to fit together ({error})") from error
        weight = layer.numbers()
        if not weight.isfinite().all():
            raise ValueError(f"expected finite weights, got others in {name}")
        is_transposed = kind in _CONV1D and not is_compressed
        left[f"{name}.weight"] = weight.T.contiguous() if is_transposed else weight
        _drop_zero_bias(name, settings, left)
        if layer.q.is_floating_point():
            floats.append(f"{name}.weight")
            continue
        num_matrices += 1
        sizes[layer.bits] += layer.q.numel()
        if (matrix := layer.groups()) is not None:
            groups.append(matrix)
        shuffled += bool((layer.group_of.diff() < 0).any())
    if shuffled:
        logger.warning(
            "%d of %d matrices have groups of inputs that are not neighbours (desc_act): the C++ engine takes these as "
            "int8",
            shuffled,
            num_matrices,
        )
    plain = {name: value for name, value in settings.items() if name != _SETTINGS}
    precision = None if not sizes else INT4 if sizes[4] >= sizes[8] else INT8
    dtype = torch.float32 if len(groups) < num_matrices else None
    return Dequantized(plain, left, groups, precision, dtype, tuple(floats))


def _drop_zero_bias(name: str, settings: Mapping[str, Any], left: dict[str, Tensor]) -> None:
    """Removes a layer's bias if it is zero and the model has none."""
    bias, flag = left.get(f"{name}.bias"), "mlp_bias" if ".mlp." in name else "attention_bias"
    if bias is not None and settings.get("model_type") in _UNBIASED and not settings.get(flag) and not bias.any():
        del left[f"{name}.bias"]


def note_precision(model: nn.Module, source: Dequantized, origin: object) -> None:
    """Sets the precision in which a model is computed, and logs which numbers that changes and by how much.

    Args:
        model: the model made from the dequantised weights.
        source: these weights.
        origin: the folder, for messages.
    """
    holder: Any = model
    if source.precision == INT4:
        keep_groups(model, source.groups)
    else:
        holder.precision = source.precision
    log_rounding(model, origin)
    dtype = next(model.parameters()).dtype
    if source.floats and dtype in (torch.bfloat16, torch.float16):
        matrices = [source.state[name] for name in source.floats]
        name = str(dtype).removeprefix("torch.")
        logger.info(
            "%s: %d matrices of 8-bit floats become %s, which changes them by %.2g of their size",
            origin, len(matrices), name, _change((matrix, matrix.to(dtype)) for matrix in map(_sample, matrices)),
        )  # fmt: skip


def log_rounding(model: nn.Module, origin: object) -> None:
    """Logs by how much computing a model in its precision changes those matrices that aren't on the grid of int8."""
    holder: Any = model
    if holder.precision not in QUANTIZED:
        return
    model = stand_in(model)
    state, stored = dict(model.named_parameters(remove_duplicate=False)), stored_in(model)
    groups = holder.int4_groups or {}
    names = [name for name in quantized_names(model) if name not in groups]
    samples = [_sample(state[name].detach(), stored.get(id(state[name]))) for name in names]
    pairs = [(rows, from_grid(*to_grid(rows), rows.dtype)) for rows in samples]
    changed = [pair for pair in pairs if not torch.equal(*pair)]
    if changed:
        logger.info(
            "%s: %d of %d matrices are computed in int8, which rounds them again and changes them by %.2g of their "
            "size; precision fp32 has the numbers of the file",
            origin, len(changed), len(names) + len(groups), _change(changed),
        )  # fmt: skip


def _sample(matrix: Tensor, stored: Stored | None = None) -> Tensor:
    """Returns some rows of a matrix, which may be in a file."""
    return stored.sample(_STORED_ROWS) if stored is not None else matrix[:: max(1, len(matrix) // _SAMPLE_ROWS)]


def _change(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns the distance of all matrices from their rounded ones, relative to their size."""
    squares = [(float((a.double() - b.double()).square().sum()), float(a.double().square().sum())) for a, b in pairs]
    distance, size = map(sum, zip(*squares, strict=True))
    return math.sqrt(distance / size) if size else 0.0


def keep_groups(model: nn.Module, matrices: list[Groups]) -> None:
    """Records in a model made from `dequantized` weights which of its matrices are int4.

    A conversion may combine the rows of matrices differently. So each row of the model is looked up by its values: if
    all rows of a matrix are found, the matrix stays int4.
    """
    state, int4_groups = model.state_dict(), dict[str, Groups]()
    wanted = {name: state[name] for name in quantized_names(model)}
    for columns, dtype in {(tensor.shape[1], tensor.dtype) for tensor in wanted.values()}:
        fitting = [groups for groups in matrices if groups.scale.shape[1] == num_groups(columns)]
        if not fitting:
            continue
        digests = [digest for groups in fitting for digest in _digests(from_groups(groups, columns, dtype))]
        places = {digest: place for place, digest in enumerate(digests)}
        nibbles, scale = torch.cat([g.nibbles for g in fitting]), torch.cat([g.scale for g in fitting])
        zero = torch.cat(
            [torch.full_like(g.scale, 8, dtype=torch.uint8) if g.zero is None else g.zero for g in fitting]
        )
        for name, tensor in wanted.items():
            if (tensor.shape[1], tensor.dtype) != (columns, dtype):
                continue
            order = [places.get(digest, -1) for digest in _digests(tensor.cpu())]
            if min(order, default=-1) < 0:
                continue
            index = torch.tensor(order)
            zeros = zero[index]
            groups = Groups(nibbles[index], scale[index], None if (zeros == 8).all() else zeros)
            if is_on(groups, tensor):
                int4_groups[name] = groups
    holder: Any = model
    holder.precision, holder.int4_groups = INT4, int4_groups


def _digests(matrix: Tensor) -> list[bytes]:
    """Returns a hash of each row."""
    # Adding 0 makes -0 and 0 the same.
    rows = (matrix.detach() + 0.0).contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]


def _layer(name: str, rounded: Mapping[str, Any], left: dict[str, Tensor]) -> QuantizedLayer:
    """Removes a layer's tensors from the state and returns them."""
    missing = [part for part in ("qweight", "qzeros", "scales") if f"{name}.{part}" not in left]
    if missing:
        raise ValueError(f"expected {name}.{missing[0]} next to {name}.qweight, got none")
    qweight, qzeros, scales = (left.pop(f"{name}.{part}") for part in ("qweight", "qzeros", "scales"))
    index = left.pop(f"{name}.g_idx", None)
    for part, tensor in (("qweight", qweight), ("qzeros", qzeros)):
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            raise ValueError(
                f"expected {name}.{part} to be a matrix of int32, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    is_gptq = rounded["quant_method"] == "gptq"
    if is_gptq:
        q = unpacked(qweight.T, 4)  # (out, in)
        if rounded["form"] == "gptq":
            qzeros = qzeros + 0x11111111  # adds 1 to all nibbles of a word at once, which the format had subtracted
        zeros = unpacked(qzeros, 4)
    else:
        back = [8 * word + _AWQ_ORDER.index(output) for word in range(qweight.shape[1]) for output in range(8)]
        q, zeros = unpacked(qweight, 4)[:, back].T.contiguous(), unpacked(qzeros, 4)[:, back]
    outputs, inputs = q.shape
    size = rounded.get("group_size")
    size = inputs if size in (None, -1) else size
    if not isinstance(size, int) or size < GROUP and size != inputs or size % GROUP and size != inputs:
        raise ValueError(f"expected groups of a multiple of {GROUP} inputs, got group_size {size!r}")
    expected = (-(-inputs // size), outputs)
    if scales.shape != expected or zeros.shape != expected or not scales.is_floating_point():
        raise ValueError(
            f"expected scales and zeros {expected} of {name}, got {(*scales.shape,)} and {(*zeros.shape,)}"
        )
    if index is None or not is_gptq:
        index = torch.arange(inputs) // size
    if index.shape != (inputs,) or int(index.min()) < 0 or int(index.max()) >= expected[0]:
        raise ValueError(f"expected {name}.g_idx to name one of {expected[0]} groups for each of {inputs} inputs")
    return QuantizedLayer(q, scales, zeros, index.long())
