"""The modules that sentence-transformers applies after a model: pooling, and layers on the pooled rows, all in fp32.

Each row is computed by itself, so that its results don't depend on the other texts, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.ops._common import soft_capped

Array = npt.NDArray[np.float32]
Stored = Literal["float32", "int8", "uint8", "binary", "ubinary"]

_LEAST = 1e-12  # the lower bound of a row's divisor, as in torch.nn.functional.normalize

# The modules of torch.nn that folders name, by the last part of their names.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (nn.Identity, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.GELU, nn.SiLU, nn.Softplus, nn.LeakyReLU, nn.ELU)
}


@dataclass(frozen=True)
class Pooling:
    """The pooling that turns the states of a text's tokens into one row.

    Attributes:
        kinds: one or more of `models.pooling.POOLINGS`; the results of several are concatenated.
        includes_prompt: whether the pooling includes the tokens of a prompt.
    """

    kinds: tuple[str, ...] = ("mean",)
    includes_prompt: bool = True


def pooled(hidden: Array, lengths: Sequence[int], kinds: Sequence[str], skipped: int = 0) -> Array:
    """Returns a pooled row for each text.

    Args:
        hidden: (total, d_model), the states of the tokens, with the texts concatenated.
        lengths: the number of tokens in each text.
        kinds: one or more of `models.pooling.POOLINGS`; their results are concatenated.
        skipped: the number of tokens at the beginning of each text that the pooling omits.

    Returns:
        (texts, d_model * kinds). The row of a text without any remaining token is zeros.
    """
    rows = np.zeros((len(lengths), len(kinds) * hidden.shape[1]), np.float32)
    begin = 0
    for row, length in zip(rows, lengths, strict=True):
        states = hidden[begin : begin + length]
        begin += length
        parts = np.split(row, len(kinds))  # views
        for part, kind in zip(parts, kinds, strict=True):
            # The weights of "weightedmean" depend on the positions in the whole text; "lasttoken" is always the last.
            part[:] = _one(states, kind, min(skipped, length))
    return rows


def _one(states: Array, kind: str, skipped: int) -> Array | float:
    rows = states[skipped:]
    if kind == "lasttoken":
        return states[-1] if len(states) else 0.0
    if kind == "cls":
        return rows[0] if len(rows) else states[0] if len(states) else 0.0
    if not len(rows):
        return 0.0
    if kind == "max":
        return np.asarray(rows.max(0))
    if kind == "weightedmean":
        weights = np.arange(skipped + 1, len(states) + 1, dtype=np.float32)[:, None]
        return np.asarray((rows * weights).sum(0) / weights.sum())
    divisor = len(rows) if kind == "mean" else np.sqrt(np.float32(len(rows)))
    return np.asarray(rows.sum(0) / np.float32(divisor))


def stored(rows: Array, precision: Stored | None, ranges: Array | None = None) -> Any:
    """Returns embeddings (dimension 1) as numbers of another type, as sentence-transformers quantizes them.

    Args:
        rows: the embeddings.
        precision: the type.
        ranges: the least and the greatest number of each dimension, (2, dim), for "int8" and "uint8"; None: those of
            the rows.

    Raises:
        ValueError: ranges of another shape; or none, and a single embedding for "int8" or "uint8", which count steps
            between the least and the greatest number of each dimension.
    """
    if precision in (None, "float32"):
        return rows
    if precision in ("binary", "ubinary"):
        bits = np.packbits(rows > 0, axis=-1)
        return (bits.astype(np.int16) - 128).astype(np.int8) if precision == "binary" else bits
    if ranges is None and len(rows) == 1:
        raise ValueError(
            f"expected ranges or several texts for precision {precision!r}, which compares their numbers, got one"
        )
    if not len(rows):
        return rows.astype(precision)
    if ranges is not None and ranges.shape != (2, rows.shape[1]):
        raise ValueError(f"expected ranges of shape {(2, rows.shape[1])}, got {ranges.shape}")
    least, greatest = ranges_of(rows) if ranges is None else ranges
    steps = (greatest - least) / 255
    counts = np.clip(np.floor((rows - least) / np.where(steps == 0, 1, steps)), 0, 255)
    return (counts - 128).astype(np.int8) if precision == "int8" else counts.astype(np.uint8)


def ranges_of(rows: Any) -> Array:
    """Returns the least and the greatest number of each dimension of embeddings (texts, dim), (2, dim)."""
    rows = np.asarray(rows, np.float32)
    if rows.ndim != 2 or not len(rows):
        raise ValueError(f"expected embeddings of shape (texts, dim) to calibrate with, got {rows.shape}")
    return np.stack([rows.min(0), rows.max(0)])


def normalized(rows: Array) -> Array:
    """Divides each row (dimension 1) by its Euclidean length."""
    lengths = np.sqrt((rows * rows).sum(1, keepdims=True))
    return np.asarray(rows / np.maximum(lengths, np.float32(_LEAST)))


@dataclass(frozen=True)
class LabelHead:
    """The labels' logits of a decoder's last token.

    Attributes:
        weight: (labels, d_model); or of two tokens of the vocabulary, if the head compares them.
        compares: whether the one logit is that of the first token minus that of the second.
        softcap: the cap of the logits; 0: none.
    """

    weight: Tensor
    compares: bool = False
    softcap: float = 0.0

    @property
    def num_labels(self) -> int:
        """The number of logits."""
        return 1 if self.compares else len(self.weight)

    def __call__(self, rows: Array) -> Array:
        """Returns the logits (rows, num_labels) of the last tokens' states (rows, d_model)."""
        with torch.inference_mode():
            logits = [soft_capped(F.linear(row, self.weight), self.softcap) for row in torch.from_numpy(rows).split(1)]
            return torch.cat([row[:, :1] - row[:, 1:] if self.compares else row for row in logits]).numpy()


class RowLayer(Protocol):
    """A layer on rows: (rows, in_features) -> (rows, out_features)."""

    @property
    def out_features(self) -> int | None:
        """The number of features in the output; None: the same as in the input."""

    def __call__(self, rows: Array) -> Array: ...


class Normalize:
    """A step that divides each row by its Euclidean length; see `normalized`."""

    out_features = None

    def __call__(self, rows: Array) -> Array:
        return normalized(rows)


@dataclass(frozen=True)
class LayerNorm:
    """A step that computes torch.nn.LayerNorm with its default epsilon.

    Attributes:
        weight, bias: (features,).
    """

    weight: Tensor
    bias: Tensor

    out_features = None

    def __call__(self, rows: Array) -> Array:
        with torch.inference_mode():
            return F.layer_norm(torch.from_numpy(rows), self.weight.shape, self.weight, self.bias).numpy()


@dataclass(frozen=True)
class Dense:
    """A linear layer and its activation.

    Attributes:
        weight: (out_features, in_features).
        bias: (out_features,) or None.
        activation: the activation of the output.
        residual: None: nothing is added to the output; a matrix (out_features, in_features): its product with the
            input is added; True: the input is added.
    """

    weight: Tensor
    bias: Tensor | None
    activation: nn.Module
    residual: Tensor | bool | None = None

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, rows: Array) -> Array:
        # Row by row: a product with a different number of rows sums in a different order.
        outputs = [self.of_text(row) for row in np.split(rows, len(rows))] if len(rows) else []
        return np.concatenate(outputs) if outputs else np.zeros((0, self.out_features), np.float32)

    def of_text(self, rows: Array) -> Array:
        """Returns the output for the rows of one text, in one product."""
        with torch.inference_mode():
            x = torch.from_numpy(rows)
            output: Tensor = self.activation(F.linear(x, self.weight, self.bias))
            if self.residual is not None and self.residual is not False:
                output = output + (x if self.residual is True else F.linear(x, self.residual))
            return output.numpy()
