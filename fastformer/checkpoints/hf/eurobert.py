"""EuroBERT (Boizard et al. 2025): a Llama whose tokens all see each other, as a `BERT`.

It is pre-norm, with RMSNorm, gated layers, rotary positions and grouped heads. Its classifier reads each token, and
takes the mean of their logits, unless its config says otherwise. Its texts end with the id that pads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastformer.checkpoints.hf.common import activation_of, flag_of, number_of
from fastformer.checkpoints.hf.decoder import BOTH, EMBEDDING, check_form, layer_names
from fastformer.checkpoints.hf.encoder import EncoderForm
from fastformer.checkpoints.hf.llama import MODULES
from fastformer.checkpoints.hf.modernbert import GATED, GATED_THERE
from fastformer.checkpoints.hf.rope import longest, read_whole_rope, write_lengths, write_rope
from fastformer.models import BERTConfig

# The kinds of pooling of a classifier there, and here.
_POOLINGS = {"bos": "cls", "mean": "mean", "late": "late"}
_FREE = (
    *("d_ff", "num_kv_heads", "head_dim", "layer_norm_eps", "bias", "attention_bias", "attention_dropout"),
    *("rotary_base", "rotary_scaling", "max_len", "head_pooling", "num_labels"),
)


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    d_model, heads = number_of(settings, "hidden_size"), number_of(settings, "num_attention_heads")
    bias, attention_bias = flag_of(settings, "mlp_bias", False), flag_of(settings, "attention_bias", False)
    pooling = settings.get("classifier_pooling", "late")
    if (there := settings.get("clf_pooling", pooling)) != pooling:  # the code on the Hub reads it, transformers doesn't
        raise ValueError(f"expected a clf_pooling that is the classifier_pooling, {pooling!r}, got {there!r}")
    rope = read_whole_rope(settings, base=10_000.0)
    kv_heads, head_dim = (
        usual if settings.get(name) is None else number_of(settings, name)
        for name, usual in (("num_key_value_heads", heads), ("head_dim", d_model // heads))
    )
    return {
        "d_model": d_model,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "num_layers": number_of(settings, "num_hidden_layers"),
        "d_ff": number_of(settings, "intermediate_size"),
        "head_dim": None if head_dim * heads == d_model else head_dim,
        "norm": "rms",
        "layer_norm_eps": settings.get("rms_norm_eps", 1e-5),
        "activation": activation_of(settings, "hidden_act", "silu", GATED),
        "norm_first": True,
        "bias": bias,
        "attention_bias": None if attention_bias == bias else attention_bias,
        "embedding_norm": False,
        "positions": "rotary",
        **rope,
        "max_len": longest(settings, rope, grows=False),
        "dropout": 0.0,
        "attention_dropout": settings.get("attention_dropout", 0.0),
        "head": "electra",
        "head_pooling": activation_of(settings, "classifier_pooling", "late", _POOLINGS),
        "head_dropout": 0.0,
    }


def _settings(config: BERTConfig) -> dict[str, Any]:
    expected = {
        "activation": (*GATED_THERE,),
        "norm": "rms",
        "norm_first": True,
        "embedding_norm": False,
        **dict.fromkeys(("norm_bias", "linear1_bias"), (None, config.bias)),
        "positions": "rotary",
        "dropout": 0.0,
        "head": "electra" if config.num_labels else ("electra", "bert"),
        "head_dropout": 0.0 if config.num_labels else config.head_dropout,
    }
    check_form(config, expected, _FREE, "EuroBERT")
    if config.d_model % config.num_heads:
        raise ValueError(
            f"expected a EuroBERT, with d_model a multiple of num_heads, got {config.d_model} and {config.num_heads}"
        )
    there = {here: there for there, here in _POOLINGS.items()}
    return {
        "model_type": "eurobert",
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.d_ff,
        "head_dim": config.size_of_head,
        "rms_norm_eps": config.layer_norm_eps,
        "hidden_act": GATED_THERE[config.activation],
        "mlp_bias": config.bias,
        "attention_bias": config.bias if config.attention_bias is None else config.attention_bias,
        "attention_dropout": config.attention_dropout,
        "classifier_pooling": there[config.head_pooling],
        **write_lengths(config, grows=False),
        **write_rope(config, 1.0),
    }


def _names(config: BERTConfig) -> dict[str, tuple[str, ...]]:
    attention_bias = config.bias if config.attention_bias is None else config.attention_bias
    biases = {name: attention_bias if "attn" in name else config.bias for name in MODULES}
    biases |= dict.fromkeys(("norm1", "norm2"), False)
    return {
        EMBEDDING: ("embed_tokens.weight",),
        **layer_names(config, "layers", MODULES, biases.__getitem__),
        "encoder.norm.weight": ("norm.weight",),
    }


def _head(config: BERTConfig) -> dict[str, str]:
    parts = {"dense": "dense", "out": "classifier"}
    return {f"head.{part}.{kind}": f"{name}.{kind}" for part, name in parts.items() for kind in BOTH}


FORM = EncoderForm(
    "EuroBERT", "model.", "EuroBert", 128001, _options, _settings, _names, _head, pooler=None, pad_ends=True
)
