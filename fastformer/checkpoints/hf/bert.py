"""BERT (Devlin et al. 2019) and the encoder-only families that resemble it, as `EncoderForm`s.

RoBERTa, XLM-R and CamemBERT count positions from the id after PAD's. The first rows of their tables belong to no token
and are dropped: with PAD = 1, position 0 here is row 2 of the table there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastformer.checkpoints.hf.common import ACTIVATIONS, THEIR_ACTIVATIONS, activation_of, flag_of, number_of
from fastformer.checkpoints.hf.decoder import BOTH, EMBEDDING, check_form, layer_names
from fastformer.checkpoints.hf.encoder import POSITIONS, EncoderForm
from fastformer.models import BERTConfig

# Settings for which a `BERT` supports one value.
_ONLY: dict[str, Any] = {"is_decoder": False, "add_cross_attention": False}
_MODULES = {
    "self_attn.in_proj": tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
    "self_attn.out_proj": ("attention.output.dense",),
    "norm1": ("attention.output.LayerNorm",),
    "linear1": ("intermediate.dense",),
    "linear2": ("output.dense",),
    "norm2": ("output.LayerNorm",),
}
_FREE = (
    *("d_ff", "layer_norm_eps", "dropout", "attention_dropout", "head_dropout", "max_len", "token_types"),
    *("pooler", "num_labels"),
)


def check_only(settings: Mapping[str, Any]) -> None:
    """Checks the settings for which a `BERT` supports one value.

    Raises:
        ValueError: a setting has another value.
    """
    for name, value in _ONLY.items():
        if flag_of(settings, name, value) != value:
            raise ValueError(f"expected {name} to be {value}, got {settings[name]!r}")
    kind = settings.get("position_embedding_type")
    if kind not in (None, "absolute"):
        raise ValueError(f"expected a position_embedding_type of 'absolute', got {kind!r}")
    if settings.get("pruned_heads"):
        raise ValueError(f"expected a model with all heads, got pruned_heads {settings['pruned_heads']!r:.60}")


def bert_options(
    settings: Mapping[str, Any], unused: int = 0, activations: Mapping[str, str] = ACTIVATIONS
) -> dict[str, Any]:
    """Returns the options of a BERT from its settings.

    Args:
        settings: the settings.
        unused: how many positions at the start of its table belong to no token.
        activations: the family's names of activations, each with fastformer's.
    """
    check_only(settings)
    dropout = settings.get("hidden_dropout_prob", 0.1)
    head_dropout = settings.get("classifier_dropout")
    return {
        "d_model": number_of(settings, "hidden_size"),
        "num_heads": number_of(settings, "num_attention_heads"),
        "num_layers": number_of(settings, "num_hidden_layers"),
        "d_ff": number_of(settings, "intermediate_size"),
        "layer_norm_eps": settings.get("layer_norm_eps", 1e-12),
        "activation": activation_of(settings, "hidden_act", "gelu", activations),
        "dropout": dropout,
        "attention_dropout": settings.get("attention_probs_dropout_prob", 0.1),
        "head_dropout": dropout if head_dropout is None else head_dropout,
        "head": "bert",
        "token_types": number_of(settings, "type_vocab_size", 0) if "type_vocab_size" in settings else 2,
        "max_len": number_of(settings, "max_position_embeddings") - unused,
    }


def _roberta_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**bert_options(settings, _behind_pad(settings.get("pad_token_id", 1))), "head": "roberta"}


def _behind_pad(pad: object) -> int:
    return pad + 1 if isinstance(pad, int) else 0


def bert_settings(
    config: BERTConfig, name: str, *free: str, activations: Mapping[str, str] = THEIR_ACTIVATIONS, **expected: Any
) -> dict[str, Any]:
    """Returns the settings that a BERT's options are saved as.

    Args:
        config: the config of the model.
        name: the name of the family.
        free: options that the family's settings contain beside those of a BERT.
        activations: fastformer's names of activations, each with the family's.
        expected: options whose values differ from a BERT's, or that may have several values: see `check_form`.

    Raises:
        ValueError: the model has options that the family doesn't have.
    """
    expected = {
        "activation": (*activations,),
        "head_dim": (None, config.d_model // config.num_heads),
        **dict.fromkeys(("attention_bias", "norm_bias", "linear1_bias"), (None, True)),
        **expected,
    }
    of_all = [option for option in _FREE if option not in expected]
    check_form(config, {key: expected[key] for key in expected if key not in free}, [*of_all, *free], name)
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.d_ff,
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_act": activations[config.activation],
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout": config.head_dropout,
        "type_vocab_size": config.token_types,
    }


def check_types(config: BERTConfig, name: str) -> None:
    """Raises ValueError for a model without token types; the family has at least one."""
    if not config.token_types:
        raise ValueError(f"expected a {name}, with token_types of at least 1, got 0")


def _bert_settings(config: BERTConfig) -> dict[str, Any]:
    settings = bert_settings(config, "BERT", head="bert")
    check_types(config, "BERT")
    return {"model_type": "bert", **settings}


def _roberta_settings(config: BERTConfig) -> dict[str, Any]:
    settings = bert_settings(config, "RoBERTa", head="roberta" if config.num_labels else ("roberta", "bert"))
    check_types(config, "RoBERTa")
    if config.num_labels and config.pooler:
        raise ValueError("expected a RoBERTa, without a pooler next to its head, got pooler=True")
    return {"model_type": "roberta", **settings}


def embedding_names(*, has_types: bool) -> dict[str, tuple[str, ...]]:
    """Maps the names of the embeddings' tensors to their names in a BERT."""
    names: dict[str, tuple[str, ...]] = {
        EMBEDDING: ("embeddings.word_embeddings.weight",),
        POSITIONS: ("embeddings.position_embeddings.weight",),
        **{f"embedding_norm.{kind}": (f"embeddings.LayerNorm.{kind}",) for kind in BOTH},
    }
    if has_types:
        names["token_type_embedding.weight"] = ("embeddings.token_type_embeddings.weight",)
    return names


def bert_names(config: BERTConfig) -> dict[str, tuple[str, ...]]:
    """Maps the names of all tensors but the head's to their names in a BERT."""
    return {**embedding_names(has_types=True), **layer_names(config, "encoder.layer", _MODULES)}


def _bert_head(config: BERTConfig) -> dict[str, str]:
    return {f"head.out.{kind}": f"classifier.{kind}" for kind in BOTH}


def dense_head(config: BERTConfig) -> dict[str, str]:
    """Maps the names of the head's tensors to their names in a RoBERTa."""
    parts = {"dense": "dense", "out": "out_proj"}
    return {f"head.{part}.{kind}": f"classifier.{name}.{kind}" for part, name in parts.items() for kind in BOTH}


BERT_FORM = EncoderForm("BERT", "bert.", "Bert", 0, bert_options, _bert_settings, bert_names, _bert_head)
_ROBERTA = EncoderForm(
    "RoBERTa",
    "roberta.",
    "Roberta",
    1,
    _roberta_options,
    _roberta_settings,
    bert_names,
    dense_head,
    unused_positions=_behind_pad,
)
FORMS = {
    "bert": BERT_FORM,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA._replace(name="XLM-RoBERTa", classes="XLMRoberta"),
    "camembert": _ROBERTA._replace(name="CamemBERT", classes="Camembert"),
}
