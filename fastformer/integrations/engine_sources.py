"""Finds the encoders of transformers' encoder-decoders, and prepares one for a conversion by itself."""

from __future__ import annotations

import copy
import sys
import weakref
from typing import Any, cast

import torch
import transformers
from torch import nn

from fastformer.checkpoints.hf import FAMILIES
from fastformer.encoding.engine import PackedEncoder
from fastformer.engine.frozen import is_packed, setting_of, settings_to_change
from fastformer.integrations.as_made import Weightless
from fastformer.integrations.engine_models import ENGINE_MODELS, EngineModel, is_convertible, model_type_of
from fastformer.integrations.replace import original_class

# The class of the encoder, by the model_type. A T5's decoder is of the same class.
_STACKS = {
    "bart": "BartEncoder",
    "marian": "MarianEncoder",
    "mbart": "MBartEncoder",
    "pegasus": "PegasusEncoder",
    "m2m_100": "M2M100Encoder",
    "t5": "T5Stack",
}


def is_source(kind: type) -> bool:
    """Returns whether a class of transformers is the encoder of an encoder-decoder that can be converted."""
    model_type = model_type_of(kind)
    if model_type not in _STACKS:
        return False
    source = sys.modules.get(FAMILIES[model_type].source(model_type))
    return kind is getattr(source, _STACKS[model_type], None)


class Around:
    """A weak reference to the model around an encoder, from the time of `accelerate`. A copy refers to no model.

    Args:
        model: the encoder-decoder.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __reduce__(self) -> tuple[type[Around], tuple[()]]:
        return Around, ()

    def of(self, stack: object) -> Any:
        """Returns the model if the stack still is its encoder; else None."""
        model: Any = None if self._model is None else self._model()
        return model if model is not None and model.get_encoder() is stack else None


# The name of an encoder's `Around` among its settings.
AROUND = "around"


def tell_encoders(model: nn.Module) -> None:
    """Gives the encoders of encoder-decoders inside of a module a reference to the model around them."""
    for module in model.modules():
        if not is_convertible(cast(Any, original_class(module))):
            continue
        whole: Any = module
        encoder = whole.get_encoder() if whole.config.is_encoder_decoder else None
        if encoder is not None and is_source(original_class(encoder)):
            settings_to_change(encoder)[AROUND] = Around(whole)


def weights_of_decoding(stack: nn.Module, precision: str) -> PackedEncoder | None:
    """Returns the engine's encoder of the model around a stack, if that is packed for decoding and hasn't changed."""
    around = setting_of(stack, AROUND)
    whole = around.of(stack) if isinstance(around, Around) else None
    if whole is None or not is_packed(whole, EngineModel.place(precision)):
        return None
    plan = ENGINE_MODELS.of(whole)
    found = plan.weights_before(whole, precision) if isinstance(plan, EngineModel) else None
    return None if found is None else found.encoder


def whole_of(stack: Any) -> nn.Module:
    """Makes a whole model around an encoder, for a conversion; its decoder is one layer of zeros with the same ids.

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
        whole: Any = kind(config)
    whole.set_input_embeddings(embedding)
    decoder = whole.get_decoder()
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
