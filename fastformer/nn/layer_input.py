"""Embeddings that the layers of a decoder-only model have of their own (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.embedding import Embedding
from fastformer.nn.errors import InputError
from fastformer.nn.feed_forward import Activation
from fastformer.nn.norm import AddLayerNorm

_SCALE = math.sqrt(0.5)  # of the sum of two numbers of variance 1
# The activations without a gate, by themselves and as they activate a gate.
_GELU_TANH, _SILU, _GELU = ("gelu_tanh", "geglu_tanh"), ("silu", "swiglu", F.silu), ("gelu", "geglu", F.gelu)


class LayerEmbedding(nn.Module):
    """A token's vectors for all layers: (norm(projection(x) / sqrt(d_model)) + embedding(token) * sqrt(dim)) / sqrt(2).

    Parameters: `embedding.weight` (vocab_size, num_layers * dim), `projection.weight` (num_layers * dim, d_model) and
    `norm.weight` (dim,).

    Args:
        vocab_size, d_model, num_layers: the sizes of the model.
        dim: the size of a vector.
        eps: added to the mean square of a projected vector.
        factory: the device and dtype of the parameters.
    """

    def __init__(
        self, vocab_size: int, d_model: int, num_layers: int, dim: int, eps: float, factory: dict[str, Any]
    ) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.embedding = Embedding(vocab_size, num_layers * dim, scale=dim**0.5, round_scale=True, **factory)
        self.projection = nn.Linear(d_model, num_layers * dim, bias=False, **factory)
        self.norm = AddLayerNorm(dim, eps, bias=False, rms_norm=True, **factory)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Computes the vectors.

        Args:
            tokens: ids of any shape.
            x: their embeddings, (*shape, d_model).

        Returns:
            (*shape, num_layers, dim).
        """
        size = (self.num_layers, -1)
        projected = (self.projection(x) * x.shape[-1] ** -0.5).unflatten(-1, size)
        out: Tensor = (self.norm(projected) + self.embedding(tokens).unflatten(-1, size)) * _SCALE
        return out


class LayerInput(nn.Module):
    """What a layer adds of its own vector of a token: norm(projection(act(gate(x)) * vector)).

    Parameters: the weights of `gate`, `projection` and `norm`.

    Args:
        d_model: the size of x.
        dim: the size of the vector.
        activation: that of the layer; of a gated one, the function that it applies to its gate.
        eps: added to the mean square.
        factory: the device and dtype of the parameters.
    """

    def __init__(self, d_model: int, dim: int, activation: Activation, eps: float, factory: dict[str, Any]) -> None:
        super().__init__()
        if activation not in (*_GELU_TANH, *_SILU, *_GELU):
            raise InputError(f"expected GELU or SiLU, perhaps of a gate, for a layer_input, got {activation!r}")
        self.gate_activation = "gelu_tanh" if activation in _GELU_TANH else "silu" if activation in _SILU else "gelu"
        self.gate = nn.Linear(d_model, dim, bias=False, **factory)
        self.projection = nn.Linear(dim, d_model, bias=False, **factory)
        self.norm = AddLayerNorm(d_model, eps, bias=False, rms_norm=True, **factory)

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        """Computes what is added to x (..., d_model), given the token's vectors (..., dim)."""
        gate = self.gate(x)
        if self.gate_activation == "silu":
            gate = F.silu(gate)
        else:
            gate = F.gelu(gate, approximate="tanh" if self.gate_activation == "gelu_tanh" else "none")
        out: Tensor = self.norm(self.projection(gate * vector))
        return out
