"""A config is saved as a family's settings, from which the same config is read, or the family refuses it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS
from fastformer.checkpoints.hf.fields import FIELDS
from fastformer.models import BERTConfig, GPTConfig
from tests.checkpoints.test_hf_settings import OLD, SIZES

_SOME, _OTHERS = (True, False, True, False), (False, True, False, True)
_LINEAR = {"kind": "linear", "factor": 2.0}
# Values of each option, of which those that it has already change nothing.
VALUES: dict[str, tuple[Any, ...]] = {
    "norm": ("layer", "rms"), "activation": ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"),
    "qk_norm": (None, "head", "all", "rotated"), "norm_placement": ("pre", "post", "both"), "num_kv_heads": (2, 4),
    "positions": ("learned", "sinusoidal", "rotary", "relative", "learned-relative"), "d_ff": (40,), "head_dim": (8,),
    "window_size": (None, 7), "window_layers": (None, _SOME, _OTHERS), "rotary_layers": (None, _SOME, _OTHERS),
    "sparse_layers": (None, _SOME), "num_experts": (None, 4), "num_experts_per_tok": (1, 3), "expert_d_ff": (None, 24),
    "shared_expert_d_ff": (None, 40), "rotary_scaling": (None, _LINEAR), "local_rotary_base": (None, 500.0),
    "attention_softcap": (None, 20.0), "logit_softcap": (None, 20.0), "embedding_scale": (None, 3.0),
    "attention_scale": (None, 0.5), "rotary_fraction": (0.5, 1.0), "rotary_base": (500.0,), "max_len": (64,),
    "layer_norm_eps": (0.25,), "router_aux_loss_coef": (0.0, 0.5), "embedding_size": (None, 16),
    "token_types": (0, 1, 3), "num_buckets": (8,), "max_distance": (64,), "head_pooling": ("cls", "mean"),
    "layer_groups": (None, 2), "linear_layers": (None, _SOME), "linear_key_heads": (2, 4),
    "linear_value_heads": (None, 8), "linear_key_dim": (24,), "linear_value_dim": (40,), "linear_conv_size": (3,),
    "router_activation": ("softmax", "sigmoid"), "norm_topk_eps": (0.0, 1e-6, 1e-20), "expert_scale": (1.0, 1.5),
    "mamba_layers": (None, _SOME), "mamba_heads": (4, 8), "mamba_head_dim": (32,), "mamba_state_dim": (24,),
    "mamba_groups": (1, 2), "mamba_conv_size": (3,),
    "conv_layers": (None, _SOME), "conv_size": (5,), "query_growth": (0.0, 0.25), "query_growth_length": (32,),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "embedding_dropout"), (0.0, 0.25)),
    **dict.fromkeys(("bias", "parallel_residual", "is_causal", "norm_topk_prob", "shared_norm", "output_bias",
                     "norm_first", "first_norm", "embedding_norm", "pooler", "attention_gate",
                     "choice_bias", "shared_expert_gate", "mamba_conv_bias"), (False, True)),
    **dict.fromkeys(("qkv_bias", "out_bias", "norm_bias", "attention_bias", "linear1_bias"), (None, False, True)),
}  # fmt: skip
# Options that mean something together.
TOGETHER = (
    ("window_size", "window_layers", "rotary_layers"), ("rotary_scaling", "local_rotary_base", "window_size"),
    ("parallel_residual", "shared_norm"), ("linear_layers", "linear_key_heads", "linear_value_heads"),
    ("dropout", "embedding_dropout"), ("conv_layers", "conv_size"), ("query_growth", "query_growth_length"),
    ("num_experts", "expert_d_ff", "shared_expert_d_ff", "sparse_layers"),
    ("num_experts", "router_activation", "choice_bias", "norm_topk_eps", "expert_scale"),
    ("num_experts", "shared_expert_d_ff", "shared_expert_gate"), ("mamba_layers", "mamba_heads", "mamba_groups"),
    ("mamba_layers", "mamba_heads", "mamba_head_dim", "mamba_state_dim", "mamba_conv_size", "mamba_conv_bias"),
)  # fmt: skip
# Names that a family's config of transformers lacks, and that its code or an older version reads.
UNLISTED = {
    "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rotary_emb_base",
    "global_rope_theta", "local_rope_theta", "global_attn_every_n_layers", "head_dim",
}  # fmt: skip
OF_FAMILIES = {"gemma": {"hidden_activation"}, "gpt_neox": {"num_key_value_heads"}}
# What the tensors tell, or settings that all families have.
ELSEWHERE = ("vocab_size", "special_ids", "tie_embeddings", "num_labels", "head", "head_dropout", "pooler")


def changes(config: Any) -> list[dict[str, Any]]:
    groups = [(name,) for name in VALUES] + [
        part
        for names in TOGETHER
        for count in range(2, len(names) + 1)
        for part in itertools.combinations(names, count)
    ]
    return [
        dict(zip(names, values, strict=True))
        for names in groups
        if all(hasattr(config, name) for name in names)
        for values in itertools.product(*(VALUES[name] for name in names))
    ]


def meaning(config: Any) -> dict[str, Any]:
    """Returns the options of a config, each None in the place of which another option counts as that option."""
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    counts = {"num_kv_heads": "num_heads", "expert_d_ff": "d_ff", "local_rotary_base": "rotary_base",
              "embedding_dropout": "dropout"}  # fmt: skip
    for name, other in counts.items():
        if name in own and own[name] is None and not (name.startswith("local") and own.get("rotary_scaling")):
            own[name] = own[other]
    for name in ("qkv_bias", "out_bias", "norm_bias", "attention_bias", "linear1_bias"):
        if own.get(name) is None:
            own[name] = own["bias"]
    if not own.get("query_growth"):
        own.pop("query_growth_length", None)
    return {name: value for name, value in own.items() if name not in ELSEWHERE}


def base_of(kind: str) -> Any:
    settings: dict[str, Any] = next(
        (row[1] for row in reversed(OLD) if row[0] == kind and "rope_scaling" not in row[1]), {}
    )
    if kind in DECODER_FORMS:
        return GPTConfig(60, **DECODER_FORMS[kind].options(SIZES | settings))
    own = {"dim": 64, "n_heads": 4, "n_layers": 4, "hidden_dim": 96} if kind == "distilbert" else {}
    return BERTConfig(60, **ENCODER_FORMS[kind].options(SIZES | own))


@pytest.mark.parametrize("kind", [*DECODER_FORMS, *ENCODER_FORMS])
def test_a_config_is_read_as_it_was_saved_or_refused(kind: str) -> None:
    config = base_of(kind)
    forms: dict[str, Any] = {**DECODER_FORMS, **ENCODER_FORMS}
    kept = 0
    for change in changes(config):
        try:
            changed = dataclasses.replace(config, **change)
            written = forms[kind].settings(changed)
        except ValueError:
            continue
        assert written.keys() <= FIELDS[kind] | UNLISTED | OF_FAMILIES.get(kind, set()), change
        if kind in ENCODER_FORMS:
            unused = SIZES["max_position_embeddings"] - config.max_len  # a table has rows that stand for no position
            written.setdefault("max_position_embeddings", changed.max_len + unused)
        again = type(config)(60, **forms[kind].options(json.loads(json.dumps(written))))
        assert meaning(again) == meaning(changed), change
        kept += meaning(changed) != meaning(config)
    assert kept > 3


def others(value: Any) -> tuple[Any, ...]:
    """Returns other values for a setting."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value * 2, max(1, value // 2))
    if isinstance(value, float):
        return (value * 0.5, value + 0.25)
    if isinstance(value, list) and value:
        return (value[::-1], [value[0]] * len(value), [value[-1]] * len(value))
    return ("relu", "gelu", "gelu_new", "silu", "mean", "rope") if isinstance(value, str) else (8, 0.5, True)


@pytest.mark.parametrize("kind", [*DECODER_FORMS, *ENCODER_FORMS])
def test_a_config_that_was_read_can_be_saved(kind: str) -> None:
    config = base_of(kind)
    forms: dict[str, Any] = {**DECODER_FORMS, **ENCODER_FORMS}
    settings = {"max_position_embeddings": SIZES["max_position_embeddings"]} if kind in ENCODER_FORMS else {}
    settings |= forms[kind].settings(config)
    kept = set()
    for name, value in settings.items():
        if name in ("num_attention_heads", "num_key_value_heads"):  # each depends on the other
            continue
        for other in others(value):
            try:
                changed = type(config)(60, **forms[kind].options({**settings, name: other}))
            except ValueError:
                continue
            again = type(config)(60, **forms[kind].options({**settings, **forms[kind].settings(changed)}))
            unread = {"max_len"} if kind in ENCODER_FORMS else set()
            assert {**meaning(again), **dict.fromkeys(unread)} == {**meaning(changed), **dict.fromkeys(unread)}, name
            kept |= {name} if meaning(changed) != meaning(config) else set()
    assert len(kept) > 5
