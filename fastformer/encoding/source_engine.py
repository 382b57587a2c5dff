"""Packs the encoder of a `models.Transformer`, so that it runs in one C++ call, for accelerated encoder-decoders."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from fastformer.encoding.engine import PackedEncoder, why_not_encoded
from fastformer.generation.engines import cpp
from fastformer.models import Transformer
from fastformer.ops import _extension


def pack_source(model: Transformer, precision: str) -> PackedEncoder | str:
    """Packs the encoder of a model as its config made it; or returns why the C++ code can't compute it."""
    reason = why_not_encoded(Transformer, model, precision)
    if reason is not None:
        return reason
    extension = cast(Any, _extension.module())
    return encoder_of(extension.PackedModel(pack_options(model, precision), pack_tensors(model, precision)))


def encoder_of(weights: object) -> PackedEncoder:
    """Returns the encoder of the extension's `PackedModel`, without the weights of its decoder, if it has one."""
    encoder = cast(Any, _extension.module()).Encoder(weights)
    return PackedEncoder(encoder, encoder.max_len, token_types=0)


def pack_options(model: Transformer, precision: str) -> dict[str, object]:
    """Returns the options of a model that its tensors don't show, for ModelOptions in csrc/engine/packed_model.h."""
    embedding = model.embedding if model.config.tie_embeddings else model.source_embedding
    return cpp.pack_options(model, precision) | {
        "num_decoder_layers": 0,
        "decoder_windows": [],
        "scale": embedding.acting_scale,
        "padding_idx": -1 if embedding.padding_idx is None else embedding.padding_idx,
    }


def pack_tensors(model: Transformer, precision: str) -> dict[str, Any]:
    """Returns the encoder's tensors by their names in csrc/engine/packed_model.h."""
    tensors: dict[str, Tensor] = {
        name: tensor
        for name, tensor in cpp.named_tensors(model).items()
        if name.startswith(("encoder.", "encoder_", "source_"))
    }
    return cpp.arrays_of(model, tensors, precision)
