"""Folders with quantised linear layers, whose matrices stay in the file: in fp32 or, where they allow it, as int4.

`compressed_tensors` reads the folders of llm-compressor, `mxfp4` those of gpt-oss. GPTQ and AWQ, of 4 bits, store a
layer (in, out) as int32 words of 8 nibbles, `qweight` and `qzeros`, beside fp16 `scales` (groups, out). A weight is
scale * (q - zero), with the scale and the zero of its group of inputs.

GPTQ   qweight (in / 8, out): a word has 8 inputs, the first in its lowest bits. qzeros (groups, out / 8): 8 outputs. In
       the checkpoint_format "gptq" each zero is stored less 1; "gptq_v2" stores it unchanged. g_idx (in) is the group
       of each input. With desc_act the inputs of a group are not neighbours.
AWQ    ("gemm") qweight (in, out / 8), qzeros (groups, out / 8): a word has the outputs 0, 2, 4, 6, 1, 3, 5, 7 of 8.

A group of 64, 128 or all inputs is split into groups of 32 with the same scale. Groups whose inputs are not neighbours
can't be `models.quantization.Groups`: such a layer has its fp32 weights alone, which the engine rounds to int8.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.checkpoints.file_matrix import FileMatrix
from fastformer.checkpoints.hf import compressed_tensors, mxfp4
from fastformer.checkpoints.hf.quantized_layer import QuantizedLayer, unpacked
from fastformer.files import read_json
from fastformer.models.quantization import GROUP, INT4, INT8, Groups, from_grid, quantized_names, to_grid
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
        state: the tensors, with fp32 weights in place of the quantised ones, which are in the file.
        precision: the precision in which the model is computed; None: that of its dtype.
        dtype: the dtype that has the folder's numbers; None: that of its other tensors, for most of them.
        floats: the quantised matrices of 8-bit floats.
    """

    settings: dict[str, Any]
    state: dict[str, Tensor]
    precision: str | None
    dtype: torch.dtype | None
    floats: tuple[str, ...] = ()


def quantization_settings(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns how a folder's weights are quantised; None if they aren't.

    Args:
        folder: may have the settings in a file of their own.
        settings: the folder's config.json.

    Raises:
        ValueError: another method than GPTQ, AWQ, compressed-tensors and MXFP4, or an unsupported form of one of them.
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
    if method == mxfp4.METHOD:
        return dict(quantization)
    quantization = {_OTHER_NAMES.get(name, name): value for name, value in quantization.items()}
    bits = quantization.get("bits")
    if method not in ("gptq", "awq"):
        raise ValueError(
            "expected weights that are not quantised, or by gptq, awq, compressed-tensors or mxfp4, got a "
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
    folder: Path,
) -> Dequantized:
    """Returns the weights of a folder, of which the quantised ones are read when they are asked for.

    Args:
        settings: the folder's config.json.
        rounded: see `quantization_settings`.
        state: the folder's tensors.
        folder: the folder, for messages.

    Raises:
        ValueError: tensors are missing or don't fit one another.
    """
    left, floats = dict(state), list[str]()
    plain = {name: value for name, value in settings.items() if name != _SETTINGS}
    if rounded["quant_method"] == mxfp4.METHOD:
        mxfp4.take_matrices(left, folder)
        return Dequantized(plain, left, INT4, None)
    sizes = Counter[int]()  # how many whole numbers have so many bits
    kind, num_matrices, num_int4, shuffled = settings.get("model_type"), 0, 0, 0
    is_compressed = "schemes" in rounded
    names = (
        compressed_tensors.layers_in(left)
        if is_compressed
        else [name.removesuffix(".qweight") for name in left if name.endswith(".qweight")]
    )
    if not names:
        parts = "weight_scale" if is_compressed else "qweight"
        raise ValueError(f"expected {parts} tensors, as quant_method {rounded['quant_method']!r} has them, got none")
    for name in names:
        try:
            layer = (compressed_tensors.take_layer if is_compressed else _layer)(name, rounded, left)
            weight = layer.matrix(folder)
            num_int4 += weight.groups(0, 1) is not None
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"expected the tensors of {name} to fit together ({error})") from error
        is_transposed = kind in _CONV1D and not is_compressed
        left[f"{name}.weight"] = weight.t() if is_transposed else weight
        _drop_zero_bias(name, settings, left)
        if layer.is_float:
            floats.append(f"{name}.weight")
            continue
        num_matrices += 1
        sizes[layer.bits] += weight.numel()
        shuffled += bool((layer.group_of.diff() < 0).any())
    if shuffled:
        logger.warning(
            "%d of %d matrices have groups of inputs that are not neighbours (desc_act): the C++ engine takes these as "
            "int8",
            shuffled,
            num_matrices,
        )
    precision = None if not sizes else INT4 if sizes[4] >= sizes[8] else INT8
    dtype = torch.float32 if num_int4 < num_matrices else None
    return Dequantized(plain, left, precision, dtype, tuple(floats))


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
    set_precision(model, source.precision, origin)
    dtype = next(stand_in(model).parameters()).dtype
    if source.floats and dtype in (torch.bfloat16, torch.float16):
        matrices = [_sample(source.state[name]) for name in source.floats]
        name = str(dtype).removeprefix("torch.")
        logger.info(
            "%s: %d matrices of 8-bit floats become %s, which changes them by %.2g of their size",
            origin, len(matrices), name, _change((matrix, matrix.to(dtype)) for matrix in matrices),
        )  # fmt: skip


def set_precision(model: nn.Module, precision: str | None, origin: object) -> None:
    """Sets the precision in which a model from a file is computed.

    It logs by how much that changes those matrices that aren't on the grid of int8.

    Args:
        model: from `load_foreign`, with the matrices that the file has as int4.
        precision: "int8" or "int4"; None: that of the model's dtype.
        origin: the file, for messages.
    """
    holder: Any = model
    groups: Mapping[str, Groups] = holder.int4_groups or {} if precision == INT4 else {}
    model = stand_in(model)
    for each in (holder, model):
        each.precision, each.int4_groups = precision, groups if precision == INT4 else None
    if precision is None:
        return
    state, stored = dict(model.named_parameters(remove_duplicate=False)), stored_in(model)
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
    if isinstance(matrix, FileMatrix):
        stored = Stored((matrix,))
    return stored.sample(_STORED_ROWS) if stored is not None else matrix[:: max(1, len(matrix) // _SAMPLE_ROWS)]


def _change(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns the distance of all matrices from their rounded ones, relative to their size."""
    squares = [(float((a.double() - b.double()).square().sum()), float(a.double().square().sum())) for a, b in pairs]
    distance, size = map(sum, zip(*squares, strict=True))
    return math.sqrt(distance / size) if size else 0.0


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
        inputs, outputs = 8 * qweight.shape[0], qweight.shape[1]
        stored = qweight.T
        if rounded["form"] == "gptq":
            qzeros = qzeros + 0x11111111  # adds 1 to all nibbles of a word at once, which the format had subtracted
        zeros = unpacked(qzeros, 4).T
    else:
        inputs, outputs = qweight.shape[0], 8 * qweight.shape[1]
        stored = torch.arange(outputs)
        zeros = _of_awq(qzeros, torch.arange(8 * qzeros.shape[1]))

    def q(part: Tensor) -> Tensor:
        return unpacked(part, 4) if is_gptq else _of_awq(qweight, part)

    size = rounded.get("group_size")
    size = inputs if size in (None, -1) else size
    if not isinstance(size, int) or size < GROUP and size != inputs or size % GROUP and size != inputs:
        raise ValueError(f"expected groups of a multiple of {GROUP} inputs, got group_size {size!r}")
    expected = (-(-inputs // size), outputs)
    if scales.shape != expected or zeros.T.shape != expected or not scales.is_floating_point():
        raise ValueError(
            f"expected scales and zeros {expected} of {name}, got {(*scales.shape,)} and {(*zeros.T.shape,)}"
        )
    if index is None or not is_gptq:
        index = torch.arange(inputs) // size
    if index.shape != (inputs,) or int(index.min()) < 0 or int(index.max()) >= expected[0]:
        raise ValueError(f"expected {name}.g_idx to name one of {expected[0]} groups for each of {inputs} inputs")
    return QuantizedLayer(f"{name}.weight", stored, q, scales.T, zeros, index.long())


def _of_awq(words: Tensor, outputs: Tensor) -> Tensor:
    """Returns the numbers of some outputs, (outputs, rows) uint8, of words (rows, all outputs / 8)."""
    places = torch.tensor([4 * _AWQ_ORDER.index(output) for output in range(8)], dtype=torch.int32)
    return (words[:, outputs // 8] >> places[outputs % 8] & 15).to(torch.uint8).T.contiguous()
