"""Encoders of encoder-decoders of transformers: which classes they are, and how one is converted by itself."""

from __future__ import annotations

import copy
import sys
from typing import Any, cast

import torch
import transformers
from torch import nn

from fastformer.checkpoints.hf import FAMILIES
from fastformer.integrations.as_made import Weightless
from fastformer.integrations.engine_models import model_type_of

# By the model_type: the class of the encoder. A T5's decoder is of the same class.
_STACKS = {
    "bart": "BartEncoder",
    "marian": "MarianEncoder",
    "mbart": "MBartEncoder",
    "pegasus": "PegasusEncoder",
    "m2m_100": "M2M100Encoder",
    "t5": "T5Stack",
}


def is_source(kind: type) -> bool:
    """Whether a class of transformers is the encoder of an encoder-decoder that can be converted."""
    model_type = model_type_of(kind)
    if model_type not in _STACKS:
        return False
    source = sys.modules.get(FAMILIES[model_type].source(model_type))
    return kind is getattr(source, _STACKS[model_type], None)


def around(stack: Any) -> nn.Module:
    """A whole model with this encoder, for a conversion. Its decoder is one layer of zeros, and reads the same ids.

    Args:
        stack: of a class for which `is_source` holds. It becomes a part of the model, with its weights.
    """
    config, embedding = copy.deepcopy(stack.config), stack.get_input_embeddings()
    for name in ("layers", "attention_heads", "ffn_dim"):
        if hasattr(config, f"encoder_{name}"):
            setattr(config, f"decoder_{name}", 1 if name == "layers" else getattr(config, f"encoder_{name}"))
    config.num_decoder_layers = 1
    config.is_encoder_decoder = config.tie_word_embeddings = config.share_encoder_decoder_embeddings = True
    kind = getattr(transformers, FAMILIES[config.model_type].model_class)
    with torch.random.fork_rng(devices=()), Weightless():
        whole = kind(config)
    whole.set_input_embeddings(embedding)
    decoder = cast(nn.Module, whole.get_decoder())
    decoder.set_input_embeddings(embedding)
    if hasattr(stack, "embed_positions"):
        decoder.embed_positions = stack.embed_positions
    for module in decoder.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                zeros = torch.zeros(parameter.shape, dtype=embedding.weight.dtype)
                module._parameters[name] = nn.Parameter(zeros, requires_grad=False)
    whole.lm_head.weight = embedding.weight
    base = getattr(whole, "model", whole)
    base.encoder = stack
    return cast(nn.Module, whole)
