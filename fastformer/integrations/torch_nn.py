"""torch.nn's own modules: our class in front of theirs, over the parameters and submodules that they have."""

from __future__ import annotations

from typing import Any

from torch import nn

import fastformer.nn as fnn
from fastformer.integrations.swap import Swap
from fastformer.nn.guards import BLOCKS, is_its_own


class MultiheadAttention(fnn.MultiheadAttention, nn.MultiheadAttention):  # type: ignore[misc]
    """A `torch.nn.MultiheadAttention` that computes as ours does."""


class TransformerEncoderLayer(fnn.TransformerEncoderLayer, nn.TransformerEncoderLayer):  # type: ignore[misc]
    """A `torch.nn.TransformerEncoderLayer` that computes as ours does."""


class TransformerDecoderLayer(fnn.TransformerDecoderLayer, nn.TransformerDecoderLayer):  # type: ignore[misc]
    """A `torch.nn.TransformerDecoderLayer` that computes as ours does."""


class TransformerEncoder(fnn.TransformerEncoder, nn.TransformerEncoder):
    """A `torch.nn.TransformerEncoder` that computes as ours does."""


class TransformerDecoder(fnn.TransformerDecoder, nn.TransformerDecoder):
    """A `torch.nn.TransformerDecoder` that computes as ours does."""


class Transformer(fnn.Transformer, nn.Transformer):
    """A `torch.nn.Transformer` that computes as ours does."""


def _attention_attributes(attention: nn.MultiheadAttention) -> dict[str, Any]:
    return {
        "num_kv_heads": attention.num_heads,
        "kv_dim": attention.embed_dim,
        "window_size": (None, None),
    }


def _stack_attributes(stack: nn.Module) -> dict[str, Any]:
    return {"gradient_checkpointing": False}


def _why_not(module: nn.Module) -> str | None:
    kind = type(module)
    for name in ("forward", *BLOCKS.get(kind, ())):
        if not is_its_own(kind, nn, method=name):
            return f"{kind.__name__}.{name} was replaced"
    return None


SWAPS = (
    Swap(nn.MultiheadAttention, MultiheadAttention, _attention_attributes, _why_not),
    Swap(nn.TransformerEncoderLayer, TransformerEncoderLayer, why_not=_why_not),
    Swap(nn.TransformerDecoderLayer, TransformerDecoderLayer, why_not=_why_not),
    Swap(nn.TransformerEncoder, TransformerEncoder, _stack_attributes, _why_not),
    Swap(nn.TransformerDecoder, TransformerDecoder, _stack_attributes, _why_not),
    Swap(nn.Transformer, Transformer, why_not=_why_not),
)
