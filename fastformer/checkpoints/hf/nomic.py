"""Nomic BERT (Nussbaum et al. 2024) and GTE (Zhang et al. 2024): post-norm `BERT`s with rotary positions and gates.

A Nomic BERT's linear layers have no bias, and its norms have one. A GTE's layers have one, except for the gated layer,
and dropout also applies to the gated values. Files have the names of the original code, with joint matrices;
transformers writes those too, though its modules have names like a Llama's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastformer.checkpoints.hf.bert import BERT_FORM, bert_options, bert_settings, check_types
from fastformer.checkpoints.hf.common import number_of
from fastformer.checkpoints.hf.decoder import BOTH, EMBEDDING, MisfitError, layer_names
from fastformer.checkpoints.hf.modernbert import GATED, GATED_THERE
from fastformer.checkpoints.hf.rope import longest, read_whole_rope, write_lengths, write_rope
from fastformer.models import BERTConfig

_MODULES = {
    "self_attn.in_proj": tuple(f"self_attn.{name}_proj" for name in "qkv"),
    "self_attn.out_proj": ("self_attn.o_proj",),
    "norm1": ("post_attention_layernorm",),
    "linear1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear2": ("mlp.down_proj",),
    "norm2": ("post_mlp_layernorm",),
}
_NORMS = ("norm1", "norm2")
# Names in files, of which joint matrices are cut into those of the modules: the patterns, and what replaces them.
_NOMIC_FILES = {
    r"\bemb_ln\.": ("embeddings.LayerNorm.",),
    r"\bencoder\.layers\.": ("layers.",),
    r"\battn\.Wqkv\.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    r"\battn\.out_proj\.": ("self_attn.o_proj.",),
    r"\bmlp\.fc11\.": ("mlp.up_proj.",),
    r"\bmlp\.fc12\.": ("mlp.gate_proj.",),
    r"\bmlp\.fc2\.": ("mlp.down_proj.",),
    r"\bnorm1\.": ("post_attention_layernorm.",),
    r"\bnorm2\.": ("post_mlp_layernorm.",),
}
_GTE_FILES = {
    r"^new\.": ("gte.",),
    r"\bencoder\.layer\.": ("layers.",),
    r"\battention\.qkv_proj\.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    r"\battention\.o_proj\.": ("self_attn.o_proj.",),
    r"\bmlp\.up_gate_proj\.": ("mlp.up_proj.", "mlp.gate_proj."),
    r"\battn_ln\.": ("post_attention_layernorm.",),
    r"\bmlp_ln\.": ("post_mlp_layernorm.",),
}


def _open(state: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Returns tensors of a file by the names of modules."""
    opened = dict(state)
    for pattern, parts in names.items():
        renamed: dict[str, Tensor] = {}
        for name, tensor in opened.items():
            found = re.search(pattern, name) is not None
            pieces = tensor.chunk(len(parts)) if found and tensor.dim() else (tensor,)
            for part, piece in zip(parts if found else (name,), pieces, strict=False):
                renamed[re.sub(pattern, part, name) if found else name] = piece
        opened = renamed
    return opened


def _options(settings: Mapping[str, Any], usual: Mapping[str, Any], base: float, **biases: bool) -> dict[str, Any]:
    settings = {**usual, **settings}
    options = bert_options(settings, activations=GATED)
    rope = read_whole_rope(settings, base=base)
    options |= {
        **rope,
        "positions": "rotary",
        "max_len": longest(settings, rope, grows=False),
        **biases,
    }
    usual_size = options["d_model"] // options["num_heads"]
    size = usual_size if settings.get("head_dim") is None else number_of(settings, "head_dim")
    return options if size == usual_size else {**options, "head_dim": size}


def _settings(kind: str, config: BERTConfig, *free: str, **form: Any) -> dict[str, Any]:
    """Returns the settings of a family: its model_type, and see `bert_settings`."""
    settings = bert_settings(
        config, FORMS[kind].name, "rotary_base", "rotary_scaling", *free, activations=GATED_THERE, positions="rotary",
        head="bert", **form,
    )  # fmt: skip
    return {"model_type": kind, **settings, **write_lengths(config, grows=False), **write_rope(config, 1.0)}


def _nomic_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("hidden_size") is None and "n_embd" in settings:
        raise ValueError(
            "expected the settings of transformers' own Nomic BERT (hidden_size), got those of the code on the Hub "
            "(n_embd): load it with transformers 5 and save it"
        )
    usual = {"hidden_act": "silu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _options(settings, usual, 1000.0, bias=False, norm_bias=True)


def _nomic_settings(config: BERTConfig) -> dict[str, Any]:
    none = (None, False)
    form = {"bias": False, "norm_bias": True, "attention_bias": none, "linear1_bias": none}
    settings = _settings("nomic_bert", config, "head_dim", **form)
    check_types(config, "Nomic BERT")
    return {**settings, "head_dim": config.size_of_head}


def _gte_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"hidden_act": "gelu", "attention_probs_dropout_prob": 0.0, "type_vocab_size": 1}
    options = _options(settings, usual, 160_000.0, linear1_bias=False)
    return {**options, "activation_dropout": options["dropout"]}


def _gte_settings(config: BERTConfig) -> dict[str, Any]:
    settings = _settings("gte", config, "activation_dropout", linear1_bias=False)
    if config.activation_dropout != config.dropout:
        raise MisfitError(
            "activation_dropout",
            f"expected a GTE, with activation_dropout equal to dropout, got {config.activation_dropout} and "
            f"{config.dropout}",
        )
    return settings


def _names(config: BERTConfig, biased: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {EMBEDDING: ("embeddings.word_embeddings.weight",)}
    if config.token_types:
        names["token_type_embedding.weight"] = ("embeddings.token_type_embeddings.weight",)
    names |= {f"embedding_norm.{kind}": (f"embeddings.LayerNorm.{kind}",) for kind in BOTH}
    return names | layer_names(config, "layers", _MODULES, lambda name: name in biased)


FORMS = {
    "nomic_bert": BERT_FORM._replace(
        name="Nomic BERT",
        prefix="nomic_bert.",
        classes="NomicBert",
        options=_nomic_options,
        settings=_nomic_settings,
        names=lambda config: _names(config, _NORMS),
        open=lambda state, settings: _open(state, _NOMIC_FILES),
    ),
    "gte": BERT_FORM._replace(
        name="GTE",
        prefix="gte.",
        classes="Gte",
        pad=1,
        options=_gte_options,
        settings=_gte_settings,
        names=lambda config: _names(config, (*_NORMS, "self_attn.in_proj", "self_attn.out_proj", "linear2")),
        open=lambda state, settings: _open(state, _GTE_FILES),
    ),
}
