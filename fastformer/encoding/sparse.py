"""SPLADE: a weight for each word of the vocabulary, from the logits of a masked language model at a text's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.checkpoints.hf.common import read_numbers
from fastformer.encoding.modules import Array
from fastformer.files import read_json
from fastformer.models.pretrained import CONFIG

_EMBEDDINGS = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight")
_GELU, _EPS = "gelu", "layer_norm_eps"
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class _Names(NamedTuple):
    """The names of a family's head: its modules, and the settings of its activation and its norm's eps."""

    dense: str | None  # None: the head is one layer
    norm: str | None
    output: str
    bias: str
    activation: str | None = None  # None: GELU
    eps: str | None = _EPS  # None: 1e-12
    is_tied: bool = True  # unless tie_word_embeddings says otherwise


_ROBERTA = _Names("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
_BERT = "cls.predictions"
_HEADS = {
    "bert": _Names(f"{_BERT}.transform.dense", f"{_BERT}.transform.LayerNorm", f"{_BERT}.decoder", f"{_BERT}.bias",
                   "hidden_act"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), _ROBERTA),
    "distilbert": _Names("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias",
                         "activation", None),
    "modernbert": _Names("head.dense", "head.norm", "decoder", "decoder.bias", "classifier_activation", "norm_eps"),
    "gte": _Names("lm_head.dense", "lm_head.norm", "lm_head.decoder", "lm_head.decoder.bias"),
    "electra": _Names("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head",
                      "generator_lm_head.bias"),
    "eurobert": _Names(None, None, "lm_head", "lm_head.bias", is_tied=False),
}  # fmt: skip


class SparseEmbedding(NamedTuple):
    """The words of a text's embedding that have a weight.

    Attributes:
        indices: the words' ids, ascending.
        values: their weights, fp32, above 0.
    """

    indices: npt.NDArray[np.int32]
    values: Array


def sparse_of(row: Array, most: int | None = None) -> SparseEmbedding:
    """Returns the numbers of a row (vocab_size,) that aren't 0; with `most`, the greatest ones."""
    indices = np.flatnonzero(row)
    if most is not None and len(indices) > most:
        indices = np.sort(indices[np.argsort(-row[indices], kind="stable")[:most]])
    return SparseEmbedding(indices.astype(np.int32), row[indices])


@dataclass(frozen=True)
class Splade:
    """The pooling of a text's tokens to one weight for each word: log(1 + relu(logit)), the maximum or the sum.

    Attributes:
        dense, dense_bias, norm, norm_bias, eps, activation: the layer before the output; a bias may be None, and dense
            and norm are None if there is no such layer.
        output, output_bias: (vocab_size, features) and (vocab_size,) or None.
        sums: whether the weights are summed over the tokens; else the greatest counts.
        twice: whether the logarithm is taken twice.
    """

    dense: Tensor | None
    dense_bias: Tensor | None
    norm: Tensor | None
    norm_bias: Tensor | None
    eps: float
    activation: Callable[[Tensor], Tensor]
    output: Tensor
    output_bias: Tensor | None
    sums: bool = False
    twice: bool = False

    kinds = ("splade",)
    includes_prompt = True

    def __call__(self, hidden: Array, lengths: Sequence[int]) -> Array:
        """Returns the weights (texts, vocab_size) for states (tokens, d_model), the texts concatenated."""
        rows = np.zeros((len(lengths), len(self.output)), np.float32)
        with torch.inference_mode():
            # Text by text: a product with other rows sums in a different order, and padding has no logits.
            for row, states in zip(rows, torch.from_numpy(hidden).split(list(lengths)), strict=True):
                x = states
                if self.dense is not None and self.norm is not None:
                    x = self.activation(F.linear(states, self.dense, self.dense_bias))
                    x = F.layer_norm(x, self.norm.shape, self.norm, self.norm_bias, self.eps)
                weights = F.linear(x, self.output, self.output_bias).relu_().log1p_()
                weights = weights.log1p_() if self.twice else weights
                row[:] = (weights.sum(0) if self.sums else weights.amax(0)).numpy()
        return rows


def read_splade(folder: Path, module: Path) -> Splade:
    """Reads the head of a masked language model, and how its logits are pooled.

    Args:
        folder: the model's folder.
        module: the folder of the SpladePooling.

    Raises:
        ValueError: the head is missing, or of an unknown family; or the pooling is unknown.
    """
    settings, pooling = read_json(folder / CONFIG), read_json(module / CONFIG)
    names = _HEADS.get(str(settings.get("model_type")))
    if names is None:
        raise ValueError(
            f"expected a SPLADE of {', '.join(_HEADS)}, got one of {settings.get('model_type')!r}: {folder}"
        )
    strategy, function = pooling.get("pooling_strategy", "max"), pooling.get("activation_function", "relu")
    if strategy not in ("max", "sum") or function not in ("relu", "log1p_relu"):
        raise ValueError(
            f"expected {module / CONFIG} to have a pooling_strategy of max or sum, and an activation_function of relu "
            f"or log1p_relu, got {strategy!r} and {function!r}"
        )
    activation = settings.get(names.activation, _GELU) if names.activation is not None else _GELU
    if activation not in _ACTIVATIONS:
        raise ValueError(f"expected {folder / CONFIG} to have an activation of {[*_ACTIVATIONS]}, got {activation!r}")
    state = {name: tensor.float() for name, tensor in read_numbers(folder).items()}
    for part in (names.dense, names.norm):
        if part is not None and (name := f"{part}.weight") not in state:
            raise ValueError(
                f"expected the weights in {folder} to have a {name}: was the model saved without its head?"
            )
    eps = settings.get(names.eps, 1e-5 if names.eps != _EPS else 1e-12) if names.eps is not None else 1e-12
    return Splade(
        dense=state.get(f"{names.dense}.weight"),
        dense_bias=state.get(f"{names.dense}.bias"),
        norm=state.get(f"{names.norm}.weight"),
        norm_bias=state.get(f"{names.norm}.bias"),
        eps=float(eps),
        activation=_ACTIVATIONS[activation],
        output=_output(state, settings, names, folder),
        output_bias=state.get(f"{names.output}.bias", state.get(names.bias)),
        sums=strategy == "sum",
        twice=function == "log1p_relu",
    )


def _output(state: Mapping[str, Tensor], settings: Mapping[str, Any], names: _Names, folder: Path) -> Tensor:
    own = state.get(f"{names.output}.weight")
    if settings.get("tie_word_embeddings", names.is_tied):
        own = next((state[name] for name in state if name.endswith(_EMBEDDINGS)), own)
    if own is None:
        raise ValueError(
            f"expected the weights in {folder} to have embeddings of words, or a {names.output}.weight: was the model "
            "saved without its head?"
        )
    return own
