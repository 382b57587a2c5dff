"""The file model.bin of CTranslate2's folders, as NumPy arrays: to read it needs no PyTorch.

It is little-endian. A text is its length and a zero byte after it:

u32 version (6), text name of the specification, u32 revision
u32 number of variables, and for each: text name, u8 rank, u32 sizes, u8 dtype, u32 number of bytes, the bytes
u32 number of aliases, and for each: text alias, text name

An int8 or int16 matrix X stands for X / X_scale, with a scale for each row (int8) or one for all (int16).
`models.quantization` rounds the quotients to the same int8, so that a model computed in int8 has the file's numbers.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fastformer.checkpoints.tensors import check_empty, taken
from fastformer.files import is_plain_file, read_json_list

Array: TypeAlias = np.ndarray[Any, Any]

MODEL, CONFIG = "model.bin", "config.json"
SPEECH = "WhisperSpec"
ACTIVATIONS = ("relu", "gelu_tanh", "silu", "gelu")
BF16 = np.dtype(np.uint16)  # the bits of bfloat16, which NumPy lacks
_DTYPES = tuple(np.dtype(kind) for kind in ("float32", "int8", "int16", "int32", "float16", "uint16"))
_MOST_DIMENSIONS = 4
_SCALE = "_scale"


def is_folder(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a folder is one that CTranslate2 reads."""
    return Path(folder, MODEL).is_file()


def is_floating(array: Array) -> bool:
    """Returns whether an array has floating-point numbers."""
    return array.dtype.kind == "f" or array.dtype == BF16


def widened(array: Array) -> Array:
    """Returns the numbers of an array in fp32, which has those of fp16 and bf16."""
    if array.dtype == BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


class _Reader:
    """Reads the parts of a file in memory, and never beyond its end."""

    def __init__(self, path: Path, data: Any) -> None:
        self._path, self.data, self.place = path, data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.place

    def skip(self, size: int) -> int:
        """Returns the place of the next bytes, and goes on behind them."""
        if size > self.left:
            raise ValueError(f"expected {size:,} more bytes in {self._path}, got {self.left:,}: the file was cut")
        self.place += size
        return self.place - size

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(form)))
        return int(value)

    def text(self) -> str:
        size = self.number("H")
        place = self.skip(size)
        data = bytes(self.data[place : place + size])
        try:
            return data.removesuffix(b"\0").decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"expected UTF-8 names in {self._path}, got {data!r:.60}") from error


def specification(folder: Path) -> str:
    """Returns the name of a folder's specification; empty for a file that `read_variables` refuses."""
    try:
        with (folder / MODEL).open("rb") as file:
            head = file.read(256)
        (length,) = struct.unpack_from("<H", head, 4)
        return head[6 : 6 + length].removesuffix(b"\0").decode()
    except (OSError, struct.error, UnicodeDecodeError):
        return ""


def read_variables(path: Path, data: bytearray | None = None) -> tuple[str, dict[str, Array]]:
    """Reads a model.bin: the name of its specification, and its variables and aliases by name.

    An alias is the same object as its variable. The arrays are in the file, which is mapped, and may be unaligned.

    Args:
        path: the file.
        data: its bytes, if they are in memory; then the path is for messages alone.

    Raises:
        ValueError: another version, or a file that is cut, damaged or no model.bin.
    """
    mapped: Any = data
    if mapped is None:
        if not is_plain_file(path.resolve()):
            raise ValueError(f"expected {path} to be a file")
        with path.open("rb") as file:
            is_empty = not file.read(1)
            mapped = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    reader = _Reader(path, mapped)
    version = reader.number("I")
    if version != 6:
        raise ValueError(
            f"expected {path} of version 6, got {version}: convert the model again with a newer CTranslate2"
        )
    name, _ = reader.text(), reader.number("I")
    variables: dict[str, Array] = {}
    for _ in range(reader.number("I")):
        key = reader.text()
        rank = reader.number("B")
        if rank > _MOST_DIMENSIONS:
            raise ValueError(f"expected {key!r:.60} in {path} of at most {_MOST_DIMENSIONS} dimensions, got {rank}")
        shape = [reader.number("I") for _ in range(rank)]
        kind, length = reader.number("B"), reader.number("I")
        if kind >= len(_DTYPES):
            raise ValueError(f"expected a dtype from 0 to {len(_DTYPES) - 1} of {key!r:.60} in {path}, got {kind}")
        dtype = _DTYPES[kind]
        if (needed := math.prod(shape) * dtype.itemsize) != length:
            raise ValueError(f"expected {needed:,} bytes of {key!r:.60} in {path}, {shape} of {dtype}, got {length:,}")
        if key in variables:
            raise ValueError(f"expected names that differ in {path}, got {key!r:.60} twice")
        variables[key] = np.ndarray(shape, dtype, mapped, reader.skip(length)) if length else np.empty(shape, dtype)
    for _ in range(reader.number("I")):
        alias, key = reader.text(), reader.text()
        if key not in variables or alias in variables:
            raise ValueError(f"expected aliases of variables in {path}, got {alias!r:.60} for {key!r:.60}")
        for part in ("", _SCALE):  # the file names the matrix alone
            if key + part in variables:
                variables[alias + part] = variables[key + part]
    if reader.left:
        raise ValueError(f"expected {path} to end after its aliases, got {reader.left:,} bytes more")
    return name, variables


def read_tokens(path: Path) -> list[str]:
    """Reads a vocabulary, a list of texts in JSON."""
    tokens = read_json_list(path)
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"expected {path} to be a vocabulary, a list of texts")
    return tokens


def is_rounded(stored: Mapping[str, Array]) -> bool:
    """Returns whether the matrices of a file are int8."""
    return any(array.dtype == np.int8 and array.ndim == 2 for array in stored.values())


def quotients(stored: Array, scale: Array | None) -> Array:
    """Returns the numbers of a variable, or of some of its rows, with the scale of each row or one for all."""
    if scale is None:
        return stored
    numbers = widened(stored)
    numbers /= widened(scale).reshape(-1, *[1] * (stored.ndim - 1))
    return numbers


class Variables:
    """The variables of a specification. Reading one removes it, so that what is left was not read."""

    def __init__(self, variables: Mapping[str, Array]) -> None:
        self._variables = dict(variables)

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def matrix(self, name: str) -> Any:
        """Removes a variable and its scale, and returns its numbers, in fp32 if it was rounded."""
        return quotients(*self.take(name))

    def take(self, name: str) -> tuple[Array, Array | None]:
        """Removes a variable and its scale, and returns them; the scale is None if the variable has its numbers."""
        (stored,) = taken(self._variables, (name,), "Transformer")
        scale = self._variables.pop(name + _SCALE, None)
        if is_floating(stored):
            return stored, None
        if scale is None or scale.shape not in ((), (1,), stored.shape[:1]) or not is_floating(scale):
            raise ValueError(
                f"expected {name}_scale with a scale for each row of {name}, got {getattr(scale, 'shape', None)}"
            )
        divisors = widened(scale)
        with np.errstate(all="ignore"):
            are_finite = np.isfinite(divisors) & np.isfinite(np.iinfo(stored.dtype).max / divisors)
        if not are_finite.all():
            raise ValueError(f"expected finite {name}_scale other than 0, got {divisors[~are_finite].flat[0]}")
        return stored, scale.reshape(-1)

    def in_memory(self) -> Variables:
        """Returns the same variables, whose matrices are arrays."""
        same = Variables({})
        same._variables = self._variables
        return same

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Returns the shape of a matrix, which stays."""
        shape = self._variables[name].shape if name in self._variables else None
        if shape is None or len(shape) != rank:
            raise ValueError(f"expected {name} of {rank} dimensions, got {shape}")
        return shape

    def scalar(self, name: str, default: float | None = None) -> float:
        stored = self._variables.pop(name, None)
        if stored is None and default is not None:
            return default
        if stored is None or stored.size != 1:
            raise ValueError(
                f"expected a number {name} of a Transformer, got {stored if stored is None else stored.shape}"
            )
        value = float((widened(stored) if is_floating(stored) else stored).reshape(()))
        if not math.isfinite(value):
            raise ValueError(f"expected a finite {name}, got {value}")
        return value

    def whole(self, name: str, default: float | None = None) -> int:
        """Returns a whole number above 0."""
        value = self.scalar(name, default)
        if value < 1 or value != int(value):
            raise ValueError(f"expected {name} to be a whole number above 0, got {value:g}")
        return int(value)

    def activation(self, *sides: str) -> str:
        """Returns the activation of the stacks."""
        numbers = {self.scalar(f"{side}/activation") for side in sides}
        if len(numbers) != 1 or not numbers < {*range(len(ACTIVATIONS))}:
            raise ValueError(f"expected the number of one activation of {ACTIVATIONS}, got {sorted(numbers)}")
        return ACTIVATIONS[int(numbers.pop())]

    def both(self, name: str, default: float | None = None) -> float:
        """Returns a number that both stacks have."""
        encoder, decoder = (self.scalar(f"{side}/{name}", default) for side in ("encoder", "decoder"))
        if encoder != decoder:
            raise ValueError(f"expected one {name} of encoder and decoder, got {encoder:g} and {decoder:g}")
        return encoder

    def embedding_factor(self, d_model: int, *sides: str) -> float:
        """Returns the factor of the stacks' embeddings: a number of the file, or a flag for the root of the width."""
        factors = set()
        for name in (f"{side}/scale_embeddings" for side in sides):
            is_flag = name in self and not is_floating(self._variables[name])
            value = self.scalar(name)
            factors.add((d_model**0.5 if value else 1.0) if is_flag else value)
        if len(factors) > 1:
            raise ValueError(f"expected one scale_embeddings of encoder and decoder, got {sorted(factors)}")
        return factors.pop()

    def count(self, prefix: str) -> int:
        """Returns the number of layers whose names begin with the prefix."""
        names = (name[len(prefix) :].split("/")[0] for name in self._variables if name.startswith(prefix))
        numbers = {name for name in names if name != "norm"}  # layer_norm is the stack's
        if numbers != {str(i) for i in range(len(numbers))} or not numbers:
            raise ValueError(f"expected layers {prefix}0, {prefix}1, ..., got {sorted(numbers)!r:.60}")
        return len(numbers)

    def drop(self, *names: str) -> None:
        for name in names:
            self._variables.pop(name, None)

    def check_empty(self) -> None:
        check_empty(self._variables, "Transformer")


def norm_weights(variables: Variables, name: str, place: str) -> dict[str, Array]:
    parts = {f"{place}.weight": variables.matrix(f"{name}/gamma")}
    if f"{name}/beta" in variables:
        parts[f"{place}.bias"] = variables.matrix(f"{name}/beta")
    return parts


def linear_weights(variables: Variables, names: list[str], weight: str, bias: str) -> dict[str, Any]:
    """Returns linear maps that are stored one by one, joined (dimension 0); a missing bias beside others is zero.

    Several matrices of which some stay in the file are a tuple.
    """
    matrices = [variables.matrix(f"{name}/weight") for name in names]
    biases = [variables.matrix(f"{name}/bias") if f"{name}/bias" in variables else None for name in names]
    parts = {weight: _joined(matrices)}
    if known := [each for each in biases if each is not None]:
        kind = known[0].dtype
        parts[bias] = _joined(
            [np.zeros(len(m), kind) if each is None else each for m, each in zip(matrices, biases, strict=True)]
        )
    return parts


def _joined(parts: list[Any]) -> Any:
    """Concatenates arrays, in fp32 if their types differ."""
    if len(parts) == 1:
        return parts[0]
    if not all(isinstance(part, np.ndarray) for part in parts):
        return tuple(parts)
    if len({part.dtype for part in parts}) > 1:
        parts = [widened(part) for part in parts]
    return np.concatenate(parts)


def layer_weights(variables: Variables, name: str, place: str, head_dim: int) -> dict[str, Any]:
    """Returns the weights of a layer by fastformer's names."""
    weights: dict[str, Any] = {}
    attentions = [("self_attention", "self_attn", ["linear_0"], "linear_1")]
    if f"{name}/attention/linear_0/weight" in variables:
        attentions.append(("attention", "multihead_attn", ["linear_0", "linear_1"], "linear_2"))
    for i, (theirs, ours, inputs, output) in enumerate(attentions, 1):
        scale = variables.scalar(f"{name}/{theirs}/queries_scale", head_dim**-0.5) * head_dim**0.5
        is_scaled = not math.isclose(scale, 1.0, rel_tol=1e-6)
        joined = linear_weights(
            variables.in_memory() if is_scaled else variables,
            [f"{name}/{theirs}/{x}" for x in inputs],
            f"{place}.{ours}.in_proj_weight",
            f"{place}.{ours}.in_proj_bias",
        )
        if is_scaled:
            # In fp32: the product of an fp16 weight and a root has more digits.
            joined = {key: widened(part).copy() for key, part in joined.items()}
            for part in joined.values():
                part[: len(part) // 3] *= np.float32(scale)
        weights |= joined
        out = f"{place}.{ours}.out_proj"
        weights |= linear_weights(variables, [f"{name}/{theirs}/{output}"], f"{out}.weight", f"{out}.bias")
        weights |= norm_weights(variables, f"{name}/{theirs}/layer_norm", f"{place}.norm{i}")
    gates = ["linear_0"] + ["linear_0_noact"] * (f"{name}/ffn/linear_0_noact/weight" in variables)
    weights |= linear_weights(
        variables, [f"{name}/ffn/{x}" for x in gates], f"{place}.linear1.weight", f"{place}.linear1.bias"
    )
    weights |= linear_weights(variables, [f"{name}/ffn/linear_1"], f"{place}.linear2.weight", f"{place}.linear2.bias")
    return weights | norm_weights(variables, f"{name}/ffn/layer_norm", f"{place}.norm{len(attentions) + 1}")
