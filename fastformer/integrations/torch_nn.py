"""torch.nn's own modules: classes with our forward, in front of torch.nn's."""

from __future__ import annotations

from typing import Any

from torch import nn

import fastformer.nn as fnn
from fastformer.integrations.replace import Replacement
from fastformer.nn.guards import BLOCKS, is_its_own


class MultiheadAttention(fnn.MultiheadAttention, nn.MultiheadAttention):  # type: ignore[misc]
    pass


class TransformerEncoderLayer(fnn.TransformerEncoderLayer, nn.TransformerEncoderLayer):  # type: ignore[misc]
    pass


class TransformerDecoderLayer(fnn.TransformerDecoderLayer, nn.TransformerDecoderLayer):  # type: ignore[misc]
    pass


class TransformerEncoder(fnn.TransformerEncoder, nn.TransformerEncoder):
    pass


class TransformerDecoder(fnn.TransformerDecoder, nn.TransformerDecoder):
    pass


class Transformer(fnn.Transformer, nn.Transformer):
    pass


def _attention_attributes(attention: nn.MultiheadAttention) -> dict[str, Any]:
    return {
        "num_kv_heads": attention.num_heads,
        "q_dim": attention.embed_dim,
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


REPLACEMENTS = (
    Replacement(nn.MultiheadAttention, MultiheadAttention, _attention_attributes, _why_not),
    Replacement(nn.TransformerEncoderLayer, TransformerEncoderLayer, why_not=_why_not),
    Replacement(nn.TransformerDecoderLayer, TransformerDecoderLayer, why_not=_why_not),
    Replacement(nn.TransformerEncoder, TransformerEncoder, _stack_attributes, _why_not),
    Replacement(nn.TransformerDecoder, TransformerDecoder, _stack_attributes, _why_not),
    Replacement(nn.Transformer, Transformer, why_not=_why_not),
)
