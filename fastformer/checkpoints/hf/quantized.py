"""Folders whose linear layers GPTQ or AWQ rounded to 4 bits, as fp32 weights and as int4 for the C++ engine.

Both methods store a layer (in, out) as int32 words of 8 nibbles, `qweight` and `qzeros`, beside fp16 `scales` (groups,
out). A weight is scale * (q - zero), with the scale and the zero of its group of inputs.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.files import read_json
from fastformer.models.quantization import GROUP, INT4, Groups, from_groups, is_on, num_groups, quantized_names

logger = logging.getLogger("fastformer")

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs in a word, from its lowest bits on
_SETTINGS = "quantization_config"  # in config.json
_FILES = ("quantize_config.json", "quant_config.json")  # the files of the settings, in older folders
_OTHER_NAMES = {"w_bit": "bits", "q_group_size": "group_size", "format": "checkpoint_format"}
_CONV1D = ("gpt2",)  # families whose weights are (in, out) if they aren't quantised
_UNBIASED = ("llama", "mistral")  # families whose layers some programs saved with biases of zero


class _QuantizedLayer(NamedTuple):
    """The parts of a layer: q (out, in), scales and zeros (groups, out), and the group of each input (in)."""

    q: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def numbers(self) -> Tensor:
        """Returns the weight (out, in) in fp32, in which the products are exact."""
        scale, zero = (part[self.group_of].T.float() for part in (self.scales, self.zeros))
        return (self.q.float() - zero) * scale

    def groups(self) -> Groups | None:
        """Returns the layer in groups of 32 neighbours; None if 32 neighbours belong to several groups."""
        outputs, inputs = self.q.shape
        padded = nn.functional.pad(
            self.group_of[None].float(), (0, num_groups(inputs) * GROUP - inputs), mode="replicate"
        )
        blocks = padded.long().view(-1, GROUP)
        if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            return None
        q = nn.functional.pad(self.q, (0, num_groups(inputs) * GROUP - inputs), value=8)
        scale, zero = (part[blocks[:, 0]].T.contiguous() for part in (self.scales, self.zeros))
        return Groups(q[:, ::2] | q[:, 1::2] << 4, scale.half(), zero.to(torch.uint8))


def quantization_settings(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns how a folder's weights are quantised; None if they aren't.

    Args:
        folder: may have the settings in a file of their own.
        settings: the folder's config.json.

    Raises:
        ValueError: a method other than GPTQ and AWQ, or an unsupported form of one of them.
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
    quantization = {_OTHER_NAMES.get(name, name): value for name, value in quantization.items()}
    method, bits = quantization.get("quant_method"), quantization.get("bits")
    if method not in ("gptq", "awq"):
        raise ValueError(f"expected weights that are not quantised, or by gptq or awq, got a {origin} of {method!r}")
    if bits != 4:
        raise ValueError(f"expected {method} of 4 bits, got bits {bits!r}")
    key, known = ("checkpoint_format", ("gptq", "gptq_v2")) if method == "gptq" else ("version", ("gemm",))
    form = str(quantization.get(key) or known[0]).lower()
    if form not in known or quantization.get("is_marlin_format"):
        raise ValueError(f"expected {method} with a {key} of {' or '.join(known)}, got {quantization.get(key)!r}")
    return {**quantization, "form": form}


def dequantized(
    settings: Mapping[str, Any], rounded: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor], list[Groups]]:
    """Returns the weights of a folder in fp32, and its matrices in groups of 32.

    Args:
        settings: the folder's config.json.
        rounded: see `quantization_settings`.
        state: the folder's tensors.

    Returns:
        The settings and the state of a model that isn't quantised, with fp32 weights in place of the quantised ones;
        and the groups of the matrices whose groups consist of neighbours.

    Raises:
        ValueError: tensors are missing or don't fit one another.
    """
    left, matrices, shuffled = dict(state), list[Groups](), 0
    for name in [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]:
        try:
            layer = _layer(name, rounded, left)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"expected the tensors of {name} to fit together ({error})") from error
        is_transposed = settings.get("model_type") in _CONV1D
        left[f"{name}.weight"] = layer.numbers().T.contiguous() if is_transposed else layer.numbers()
        if (groups := layer.groups()) is None:
            shuffled += 1
        else:
            matrices.append(groups)
        bias = left.get(f"{name}.bias")
        flag = "mlp_bias" if ".mlp." in name else "attention_bias"
        if bias is not None and settings.get("model_type") in _UNBIASED and not settings.get(flag) and not bias.any():
            del left[f"{name}.bias"]
    if not matrices and not shuffled:
        raise ValueError(f"expected qweight tensors, as quant_method {rounded['quant_method']!r} has them, got none")
    if shuffled:
        logger.warning(
            "%d of %d matrices have groups of inputs that are not neighbours (desc_act): the C++ engine takes these as "
            "int8",
            shuffled,
            shuffled + len(matrices),
        )
    plain = {name: value for name, value in settings.items() if name != _SETTINGS}
    return plain, left, matrices


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


def _layer(name: str, rounded: Mapping[str, Any], left: dict[str, Tensor]) -> _QuantizedLayer:
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
        q = _nibbles(qweight.T)  # (out, in)
        if rounded["form"] == "gptq":
            qzeros = qzeros + 0x11111111  # adds 1 to all nibbles of a word at once, which the format had subtracted
        zeros = _nibbles(qzeros)
    else:
        back = [8 * word + _AWQ_ORDER.index(output) for word in range(qweight.shape[1]) for output in range(8)]
        q, zeros = _nibbles(qweight)[:, back].T.contiguous(), _nibbles(qzeros)[:, back]
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
    return _QuantizedLayer(q, scales, zeros, index.long())


def _nibbles(words: Tensor) -> Tensor:
    """Unpacks (rows, columns) int32 to (rows, 8 * columns) uint8, the lowest bits of each word first."""
    parts = [words >> shift & 15 for shift in range(0, 32, 4)]
    return torch.stack(parts, -1).flatten(1).to(torch.uint8)
