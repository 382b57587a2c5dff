"""Whole models from transformers to ours and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastformer.models.marian import marian_from_transformer, transformer_from_marian
from fastformer.models.transformer import Transformer

if TYPE_CHECKING:
    from transformers import MarianMTModel

# What `models.Transformer` lacks for families that people will try.
_LACKS = {
    "bart": "BART has a norm on its embeddings, and learned positions that begin at 2",
    "mbart": "mBART has a norm on its embeddings, and learned positions that begin at 2",
    "t5": "T5 has relative positions as a bias on the scores",
    "mt5": "mT5 has relative positions as a bias on the scores",
    "m2m_100": "M2M100 counts positions from behind the id of PAD",
    "pegasus": "Pegasus is pre-norm with Marian's positions",
}


def from_huggingface(model: nn.Module) -> Transformer:
    """A `models.Transformer` that computes what a transformers `MarianMTModel` does, with copies of its weights.

    It keeps the model's dtype, device and mode. Sources may be padded on the right, as Marian's tokenizer pads them.
    Dropping whole layers while training (encoder_layerdrop) is left out.

    `fastformer.generate` gives the tokens of transformers' generate where it is greedy. What a generation_config adds
    (bad_words_ids, forced_eos_token_id, num_beams) has to be said again. Scores of beams are the same with
    `length_penalty=0.0` in both; otherwise transformers divides by length ** length_penalty, and this library by
    ((5 + length) / 6) ** length_penalty. Two differences remain. An end counts here where it is among the
    2 * num_beams best continuations, there among the num_beams best. Hypotheses that max_new_tokens cuts stand here
    behind those that ended, there they compete with them.

    `models.Transformer` and `torch.nn.Transformer` need no conversion: the entries of a state_dict that begin with
    "encoder." and "decoder." are the same where the model is pre-norm with `attention_bias=True`.

    Args:
        model: a MarianMTModel.

    Raises:
        ValueError: another class, or a Marian with settings that `models.Transformer` doesn't have.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind != "marian" or type(model).__name__ != "MarianMTModel":
        why = f": {_LACKS[kind]}, which models.Transformer doesn't have" if kind in _LACKS else ""
        raise ValueError(f"expected a transformers MarianMTModel, got {type(model).__name__}{why}")
    found: Any = model
    eps = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    if len(eps) > 1:
        raise ValueError(f"expected norms of one eps, got {sorted(eps)}")
    weight = found.lm_head.weight
    converted = transformer_from_marian(
        found.config.to_dict(),
        model.state_dict(),
        layer_norm_eps=eps.pop(),
        device=weight.device,
        dtype=weight.dtype,
    )
    # Its table is rounded to fp32 and then to the weights' dtype.
    first = converted.embedding if converted.config.tie_embeddings else converted.source_embedding
    assert first.position is not None
    first.position.table.copy_(found.model.encoder.embed_positions.weight.detach())
    return converted.train(model.training)


def to_huggingface(model: Transformer) -> MarianMTModel:
    """A transformers `MarianMTModel` that computes what a `models.Transformer` does, with copies of its weights.

    Args:
        model: post-norm, with LayerNorm of eps 1e-5 and positions "halves"; full attention.

    Raises:
        ImportError: transformers is not installed.
        ValueError: an option that Marian doesn't have.
    """
    if type(model) is not Transformer:
        raise ValueError(f"expected a models.Transformer, got {type(model).__name__}")
    settings, weights = marian_from_transformer(model)
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError as error:
        raise ImportError("to_huggingface needs the transformers library: pip install transformers") from error
    theirs: Any = MarianMTModel(MarianConfig(**settings))
    theirs.to(device=model.output_weight.device, dtype=model.output_weight.dtype)
    own = theirs.state_dict()
    expected = {name for name in own if "embed_positions" not in name}
    if expected != weights.keys():
        raise ValueError(f"this version of transformers has other tensors: {sorted(expected ^ weights.keys())[:5]}")
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    found: MarianMTModel = theirs.train(model.training)
    return found
