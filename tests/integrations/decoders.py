"""Decoder-only models of transformers that can be converted, in every variant; each of their weights matters."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastformer.checkpoints.hf import FAMILIES, from_model
from fastformer.models import GPT

VOCAB = 60
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40,
    "max_position_embeddings": 96, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0,
}  # fmt: skip


class Wide(TorchFunctionMode):
    """In the block everything that asks for fp32 gets fp64: transformers' statistics, angles and softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        args = tuple(map(widened, args))
        kwargs = {name: widened(value) for name, value in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


class Case(NamedTuple):
    """A model of one family in one variant.

    Attributes:
        kind: the model_type of transformers.
        options: of the config.
    """

    kind: str
    options: dict[str, Any]

    def make(self, *, is_exact: bool = False, scale: float = 0.3, seed: int = 3, **options: Any) -> Any:
        """The model of transformers in fp32; exact: with the same weights in fp64, to be called in `Wide()`."""
        family = FAMILIES[self.kind]
        with Wide() if is_exact else contextlib.nullcontext():
            config = getattr(transformers, family.config_class)(**SIZES | self.options | options)
            config._attn_implementation = "eager"
            model = getattr(transformers, family.model_class)(config)
            model = model.to(torch.float64 if is_exact else torch.float32).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1 and name.endswith("weight")
                size = scale if parameter.dim() == 2 else 0.2
                parameter.copy_(torch.randn(parameter.shape) * size + (1.0 if is_norm else 0.0))
        return model


def ids_of(rows: int = 3, length: int = 21) -> tuple[Tensor, Tensor]:
    """Ids without PAD, and what follows each; -100 behind rows that are shorter."""
    ids = torch.randint(3, VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[1, length // 2 :] = -100
    return ids[:, :-1], labels


def loss_of(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of a model of transformers, and the sum of the losses of what follows."""
    logits = model(ids).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients_of(ours: GPT) -> dict[str, Tensor]:
    """The gradients of a model of ours under the names of transformers: conversion is affine."""
    weights = []
    for is_gradient in (True, False):
        twin = GPT(ours.config, dtype=ours.output_weight.dtype)
        with torch.no_grad():
            for parameter, own in zip(twin.parameters(), ours.parameters(), strict=True):
                gradient = torch.zeros_like(own) if own.grad is None else own.grad
                parameter.copy_(gradient if is_gradient else torch.zeros_like(own))
        weights.append(from_model(twin)[1])
    return {name: weights[0][name] - weights[1][name] for name in weights[0]}


_LLAMA: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 50_000.0},
}
_GPT2: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 36, "layer_norm_epsilon": 1e-4},
}
_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES = {
    f"{kind} {variant}": Case(kind, options | (_DROPOUT if kind == "gpt2" else {}))
    for kind, variants in {"gpt2": _GPT2, "llama": _LLAMA}.items()
    for variant, options in variants.items()
}
