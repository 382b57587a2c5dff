"""DistilBERT, MPNet, ELECTRA and ALBERT: `EncoderForm`s that differ from BERT's in names, positions and heads.

MPNet's positions are learned and relative, and count from 2, as RoBERTa's do. All of its models have 32 buckets and
treat distances beyond 128 alike. ELECTRA's embeddings may be narrower than its layers. ALBERT's are, and groups of its
layers share their weights; here its feed-forward networks drop out as well, like its attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastformer.checkpoints.hf.bert import (
    BERT_FORM,
    bert_names,
    bert_options,
    bert_settings,
    check_only,
    check_types,
    dense_head,
    embedding_names,
)
from fastformer.checkpoints.hf.common import activation_of, number_of
from fastformer.checkpoints.hf.decoder import BOTH, MisfitError, layer_names
from fastformer.checkpoints.hf.encoder import EncoderForm
from fastformer.models import BERTConfig

_BUCKETS, _DISTANCE = 32, 128
_UNUSED = 2  # rows of MPNet's table before the first position
_DISTIL_MODULES = {
    "self_attn.in_proj": tuple(f"attention.{name}_lin" for name in "qkv"),
    "self_attn.out_proj": ("attention.out_lin",),
    "norm1": ("sa_layer_norm",),
    "linear1": ("ffn.lin1",),
    "linear2": ("ffn.lin2",),
    "norm2": ("output_layer_norm",),
}
_MPNET_MODULES = {
    "self_attn.in_proj": tuple(f"attention.attn.{name}" for name in "qkv"),
    "self_attn.out_proj": ("attention.attn.o",),
    "norm1": ("attention.LayerNorm",),
    "linear1": ("intermediate.dense",),
    "linear2": ("output.dense",),
    "norm2": ("output.LayerNorm",),
}
_ALBERT_MODULES = {
    "self_attn.in_proj": tuple(f"attention.{name}" for name in ("query", "key", "value")),
    "self_attn.out_proj": ("attention.dense",),
    "norm1": ("attention.LayerNorm",),
    "linear1": ("ffn",),
    "linear2": ("ffn_output",),
    "norm2": ("full_layer_layer_norm",),
}
# The values of settings that ALBERT's config.json doesn't contain, where they differ from BERT's.
_ALBERT_USUAL = {
    "hidden_act": "gelu_new", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.1, "embedding_size": 128, "num_hidden_groups": 1, "inner_group_num": 1,
}  # fmt: skip
# DistilBERT's settings and the names that BERT has for them.
_DISTIL_SETTINGS = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "seq_classif_dropout": "classifier_dropout",
}


def _distil_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    check_only(settings)
    return {
        "d_model": number_of(settings, "dim"),
        "num_heads": number_of(settings, "n_heads"),
        "num_layers": number_of(settings, "n_layers"),
        "d_ff": number_of(settings, "hidden_dim"),
        "activation": activation_of(settings, "activation", "gelu"),
        "dropout": settings.get("dropout", 0.1),
        "attention_dropout": settings.get("attention_dropout", 0.1),
        "head_dropout": settings.get("seq_classif_dropout", 0.2),
        "head": "distilbert",
        "max_len": number_of(settings, "max_position_embeddings"),
    }


def _distil_settings(config: BERTConfig) -> dict[str, Any]:
    kind = "distilbert" if config.num_labels else ("distilbert", "bert")
    settings = bert_settings(
        config, "DistilBERT", head=kind, token_types=0, pooler=False, layer_norm_eps=1e-12
    )  # DistilBERT's settings don't contain the eps
    return {"model_type": "distilbert", **{name: settings[hf_name] for name, hf_name in _DISTIL_SETTINGS.items()}}


def _distil_names(config: BERTConfig) -> dict[str, tuple[str, ...]]:
    return {**embedding_names(has_types=False), **layer_names(config, "transformer.layer", _DISTIL_MODULES)}


def _distil_head(config: BERTConfig) -> dict[str, str]:
    parts = {"dense": "pre_classifier", "out": "classifier"}
    return {f"head.{part}.{kind}": f"{name}.{kind}" for part, name in parts.items() for kind in BOTH}


def _mpnet_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    buckets = settings.get("relative_attention_num_buckets", _BUCKETS)
    if buckets != _BUCKETS:
        raise ValueError(f"expected relative_attention_num_buckets {_BUCKETS}, as all MPNets use, got {buckets!r}")
    options = bert_options({**settings, "type_vocab_size": 0}, _UNUSED)
    # The head has the same dropout as the layers.
    positions = {"positions": "learned-relative", "num_buckets": _BUCKETS, "max_distance": _DISTANCE}
    return {**options, **positions, "head": "roberta", "head_dropout": options["dropout"]}


def _mpnet_settings(config: BERTConfig) -> dict[str, Any]:
    expected: dict[str, Any] = {
        "positions": "learned-relative",
        "num_buckets": _BUCKETS,
        "max_distance": _DISTANCE,
        "token_types": 0,
        "head": "roberta" if config.num_labels else ("roberta", "bert"),
    }
    if config.num_labels:
        expected |= {"pooler": False, "head_dropout": config.dropout}
    settings = bert_settings(config, "MPNet", **expected)
    unread = ("classifier_dropout", "type_vocab_size")
    known = {name: value for name, value in settings.items() if name not in unread}
    return {"model_type": "mpnet", **known, "relative_attention_num_buckets": _BUCKETS}


def _mpnet_names(config: BERTConfig) -> dict[str, tuple[str, ...]]:
    return {
        **embedding_names(has_types=False),
        "position_bias.table": ("encoder.relative_attention_bias.weight",),
        **layer_names(config, "encoder.layer", _MPNET_MODULES),
    }


def _electra_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    size = settings.get("embedding_size", 128)
    return {**bert_options(settings), "head": "electra", "embedding_size": size}


def _electra_settings(config: BERTConfig) -> dict[str, Any]:
    settings = bert_settings(
        config,
        "ELECTRA",
        head="electra" if config.num_labels else ("electra", "bert"),
        embedding_size=config.embedding_size,
        pooler=False,
    )
    check_types(config, "ELECTRA")
    return {"model_type": "electra", **settings, "embedding_size": config.width}


def _electra_names(config: BERTConfig) -> dict[str, tuple[str, ...]]:
    names = bert_names(config)
    if config.embedding_size is not None:
        names |= {f"embedding_projection.{kind}": (f"embeddings_project.{kind}",) for kind in BOTH}
    return names


def _albert_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    settings = {**_ALBERT_USUAL, **settings}
    options = bert_options({**settings, "classifier_dropout": settings["classifier_dropout_prob"]})
    size, inner = number_of(settings, "embedding_size"), number_of(settings, "inner_group_num")
    if inner != 1:
        raise ValueError(f"expected an inner_group_num of 1, as all ALBERTs have, got {inner}")
    if size == options["d_model"]:
        raise ValueError(f"expected an embedding_size other than the hidden_size, got {size} for both")
    return {**options, "embedding_size": size, "layer_groups": number_of(settings, "num_hidden_groups")}


def _albert_settings(config: BERTConfig) -> dict[str, Any]:
    if config.layer_groups is None or config.embedding_size is None:
        raise MisfitError("layer_groups", "expected an ALBERT, with layer_groups and an embedding_size, got None")
    expected: dict[str, Any] = {"embedding_size": config.embedding_size, "layer_groups": config.layer_groups}
    settings = bert_settings(config, "ALBERT", head="bert", **expected)
    check_types(config, "ALBERT")
    dropout = settings.pop("classifier_dropout")
    return {
        "model_type": "albert",
        **settings,
        "classifier_dropout_prob": dropout,
        "embedding_size": config.embedding_size,
        "num_hidden_groups": config.layer_groups,
    }


def _albert_names(config: BERTConfig) -> dict[str, tuple[str, ...]]:
    names = embedding_names(has_types=True)
    names |= {f"embedding_projection.{kind}": (f"encoder.embedding_hidden_mapping_in.{kind}",) for kind in BOTH}
    firsts = [*dict.fromkeys(config.distinct)]
    for own_name, parts in layer_names(config, "encoder.albert_layer_groups", _ALBERT_MODULES).items():
        layer, kind = own_name.removeprefix("encoder.layers.").split(".", 1)
        if int(layer) in firsts:
            group = firsts.index(int(layer))
            ends = [part.split(".", 3)[3] for part in parts]
            names[own_name] = tuple(f"encoder.albert_layer_groups.{group}.albert_layers.0.{end}" for end in ends)
    return names


FORMS = {
    "distilbert": EncoderForm(
        "DistilBERT",
        "distilbert.",
        "DistilBert",
        0,
        _distil_options,
        _distil_settings,
        _distil_names,
        _distil_head,
        pooler=None,
    ),
    "mpnet": EncoderForm(
        "MPNet",
        "mpnet.",
        "MPNet",
        1,
        _mpnet_options,
        _mpnet_settings,
        _mpnet_names,
        dense_head,
        unused_positions=lambda pad: _UNUSED,
    ),
    "electra": BERT_FORM._replace(
        name="ELECTRA",
        prefix="electra.",
        classes="Electra",
        options=_electra_options,
        settings=_electra_settings,
        names=_electra_names,
        head=dense_head,
        pooler=None,
    ),
    "albert": BERT_FORM._replace(
        name="ALBERT",
        prefix="albert.",
        classes="Albert",
        options=_albert_options,
        settings=_albert_settings,
        names=_albert_names,
        pooler="pooler",
    ),
}
