"""config.json of every generation is read as transformers reads it; errors name unsupported settings."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastformer
from fastformer.checkpoints import load_model
from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS, FAMILIES
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.checkpoints.hf.decoder import special_ids
from fastformer.checkpoints.hf.fields import check_fields
from fastformer.checkpoints.hf.rope import without_old_names
from fastformer.models import GPT, GPTConfig
from fastformer.serving.service import open_service
from tests.checkpoints.present import PRESENT
from tests.covering import each

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96,
    "max_position_embeddings": 256, "num_key_value_heads": 4,
}  # fmt: skip
WRONG_AMOUNTS: list[Any] = [None, -1, "small", [], float("nan")]
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 3e5}
# As version 4 of transformers, and those before it, wrote them.
OLD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"rotary_base": 10_000.0, "max_len": 256, "num_kv_heads": 4}),
    (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": 2},
        {"rotary_base": 5e5, "rotary_scaling": {"kind": "linear", "factor": 2.0}, "max_len": 512},
    ),
    (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rotary_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 256}},
    ),
    (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128}},
        {"max_len": 256},
    ),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, {
        "max_len": 1024, "qkv_bias": True}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"max_len": 1024, "rotary_scaling": {
        "kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}),
    # As written by version 5, with a longer base put in by hand where earlier versions look for it.
    ("llama", {"rope_theta": 7e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
               "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5}},
     {"rotary_base": 7e5, "rotary_scaling": {"kind": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
     {"rotary_scaling": {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 256}}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2}, {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}, {
        "window_size": 31, "window_layers": (False, False, False, True)}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}, {}),
    ("qwen3", {"head_dim": 16}, {"qk_norm": "head"}),
    ("qwen3", {}, {"head_dim": 128}),
    ("mistral", {"sliding_window": None, "head_dim": None}, {}),
    ("mistral", {"sliding_window": 4096, "head_dim": 32}, {"head_dim": 32, "window_size": 4095}),
    ("helium", {"head_dim": 16}, {"head_dim": None, "rotary_base": 100_000.0}),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}, {
        "conv_layers": (True, False, True, False), "conv_size": 3}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2, "num_experts": 4, "intermediate_size": 96}, {
        "sparse_layers": (False, False, True, True), "router_activation": "sigmoid", "choice_bias": True,
        "norm_topk_eps": 1e-6, "expert_d_ff": 1792}),
    ("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2}, {
        "rotary_fraction": 0.5, "shared_expert_d_ff": 1408, "shared_expert_gate": False, "qk_norm": None}),
    ("afmoe", {"num_experts": 6, "mup_enabled": True, "sliding_window": 16}, {
        "rotary_layers": (True, True, True, False), "window_layers": (True, True, True, False), "embedding_scale": 8.0,
        "shared_expert_d_ff": 2816}),
    ("ernie4_5_moe", {"moe_num_experts": 6, "moe_num_shared_experts": 0}, {
        "shared_expert_d_ff": None, "router_activation": "softmax", "choice_bias": True, "num_experts_per_tok": 6}),
    ("olmo2", {"rope_theta": 5e5}, {"norm_placement": "post", "qk_norm": "all"}),
    ("phi3", {"sliding_window": 2047, "rope_scaling": None, "original_max_position_embeddings": 256}, {
        "window_size": 2046}),
    (
        "phi3",
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
         "original_max_position_embeddings": 128},
        {"max_len": 128, "rotary_scaling": {
            "kind": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0,
            "original_max_position_embeddings": 128}},
    ),
    (
        "phi3",
        {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 128,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}},
        {"rotary_fraction": 0.75},
    ),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
         "original_max_position_embeddings": 2},
        {"max_len": 2},
    ),
    ("gemma", {"hidden_act": "gelu", "head_dim": 256}, {"activation": "geglu_tanh", "embedding_scale": 8.0}),
    ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16}, {
        "window_layers": (True, False, True, False), "window_size": 15, "logit_softcap": 30.0,
        "attention_softcap": 50.0, "attention_scale": 24**-0.5}),
    (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 16, "sliding_window_pattern": 3},
        {"window_layers": (True, True, False, True), "local_rotary_base": 1e4, "rotary_base": 1e6, "max_len": 256},
    ),
    ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}, {
        "rotary_base": 1e6, "local_rotary_base": 1e4}),
    ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "rope_local_base_freq": 1e4,
                     "layer_types": ["full_attention"] * 4}, {"window_size": None, "local_rotary_base": None}),
    ("olmo3", {"sliding_window": 16, "rope_theta": 5e5, "layer_types": ["sliding_attention", "full_attention"] * 2}, {
        "window_size": 15, "window_layers": (True, False, True, False), "norm_placement": "post"}),
    ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 10_000, "use_parallel_residual": True}, {
        "rotary_fraction": 0.25, "parallel_residual": True}),
    ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500, "use_parallel_residual": False}, {"rotary_base": 500}),
    ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 256, "attn_pdrop": 0.3, "resid_pdrop": 0.2,
              "embd_pdrop": 0.2, "n_inner": 96}, {"attention_dropout": 0.3, "dropout": 0.2, "d_ff": 96}),
    ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 256}, {
        "attention_dropout": 0.1, "dropout": 0.1, "d_ff": 256, "max_len": 256, "layer_norm_eps": 1e-5}),
    ("granitemoehybrid", {"layer_types": ["attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 80,
                          "mamba_n_heads": 2, "position_embedding_type": "rope"}, {"d_ff": 80, "rotary_layers": None}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4, "mamba_d_state": 16}, {
        "mamba_layers": (True, False, True, False), "mamba_head_dim": 32, "num_experts": 8, "d_ff": 96,
        "shared_expert_d_ff": 1024, "shared_expert_gate": False, "mamba_conv_bias": True}),
    ("granitemoehybrid", {"layer_types": ["attention"] * 4, "num_local_experts": 0, "mamba_n_heads": 2}, {
        "d_ff": 1024, "rotary_layers": (False,) * 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, {
        "window_size": 31, "window_layers": None}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, {"window_size": None}),
    # rope_scaling that was written beside rope_parameters.
    ("qwen3", {"rope_parameters": {**DEFAULT_ROPE}, "rope_theta": 7e5, "rope_scaling": {
        "rope_type": "linear", "factor": 4.0}},
     {"rotary_base": 7e5, "rotary_scaling": {"kind": "linear", "factor": 4.0}}),
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 4, "rope_parameters": {
        **DEFAULT_ROPE, "partial_rotary_factor": 0.5}, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
     {"rotary_base": 1e4, "rotary_fraction": 0.25}),
    ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "rope_scaling": {
        "rope_type": "linear", "factor": 4.0}, "rope_parameters": {"full_attention": {**DEFAULT_ROPE},
                                                                   "sliding_attention": {**DEFAULT_ROPE}}},
     {"rotary_base": 3e5, "local_rotary_base": 3e5, "rotary_scaling": {"kind": "linear", "factor": 4.0}}),
    ("starcoder2", {"sliding_window": 32, "rope_theta": 999_999, "num_key_value_heads": 2}, {"norm": "layer"}),
]  # fmt: skip


def options_of(kind: str, settings: dict[str, Any]) -> GPTConfig:
    return GPTConfig(60, **DECODER_FORMS[kind].options(settings))


@each("kind, settings, expected", OLD)
def test_old_settings_are_read_as_transformers_reads_them(kind, settings, expected) -> None:
    found = options_of(kind, SIZES | settings)
    assert found == dataclasses.replace(found, **expected)  # which makes tuples of lists
    written = DECODER_FORMS[kind].settings(found)
    assert options_of(kind, written) == found == options_of(kind, json.loads(json.dumps(written)))
    written_before_5 = {name: value for name, value in written.items() if name != "rope_parameters"}
    for read in (written_before_5, without_old_names(written)):  # each version reads its own names alone
        assert options_of(kind, read) == found
    if "su" in str(settings.get("rope_scaling")):
        return  # a name that version 5 reads no longer
    theirs = getattr(transformers, FAMILIES[kind].config_class)(**SIZES | settings)
    assert options_of(kind, theirs.to_dict()) == found


@each(
    "kind, settings, named",
    [
        ("llama", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type .*'spiral'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, r"\bfactor\b"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor .*'two'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "spin": 3}}, "'spin'"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling .*'linear'"),
        ("qwen3_5_text", {"layer_types": [["full_attention"]] * 4}, "layer_types of 4 layers"),
        ("llama", {"rope_theta": "big"}, "rope_theta .*'big'"),
        ("llama", {"rope_theta": 0}, "rope_theta .*got 0"),
        ("llama", {"rope_parameters": {"rope_type": [], "rope_theta": 1e4}}, r"rope_type .*\[\]"),
        ("ministral3", {"rope_parameters": {
            "rope_type": "yarn", "factor": {}, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}},
         r"factor .*\{\}"),
        *(("glm4", {"rms_norm_eps": eps}, "rms_norm_eps ") for eps in WRONG_AMOUNTS),
        ("helium", {"max_position_embeddings": 0}, "max_position_embeddings .*got 0"),
        ("llama", {"partial_rotary_factor": 0.5}, "Llama.*partial_rotary_factor .*0.5"),
        ("llama", {"hidden_act": "relu2"}, "hidden_act .*'relu2'"),
        ("llama", {"hidden_act": [[]]}, "hidden_act "),
        ("llama", {"num_attention_heads": "many"}, "num_attention_heads .*'many'"),
        ("llama", {"max_position_embeddings": None}, r"max_position_embeddings .*None"),
        ("llama", {"attention_bias": "yes"}, "attention_bias .*'yes'"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types .*4 layers"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"] * 2}, "'linear_attention'"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window .*'wide'"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop .*0.1"),
        *(("phi3", {"original_max_position_embeddings": length, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}, f"at least 2, got {length}")
          for length in (0, 1)),
        ("gemma", {"use_bidirectional_attention": True}, r"\buse_bidirectional_attention\b"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0, "sliding_window": 8}, "attn_logit_softcapping.* 50.0"),
        ("gemma3_text", {"sliding_window": 8, "rope_parameters": {
            "sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {"rope_type": "default"}}},
         "window .*'linear'"),
        ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.2}, "residual_dropout.*0.1.*0.2"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "conv", "mamba"]}, "layer_types"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3 + ["attention"], "mamba_proj_bias": True}, "proj_bias"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3 + ["attention"], "time_step_limit": [0.1, 1]}, "time_step"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3 + ["attention"], "mamba_d_head": 7}, "mamba_d_head"),
        ("stablelm", {"hidden_dropout": 0.1}, "hidden_dropout .*0.1"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier .*0"),
        ("granite", {"embedding_multiplier": "two"}, "embedding_multiplier .*'two'"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step .*0"),
        ("qwen2_moe", {"mlp_only_layers": ["one"]}, "mlp_only_layers .*one"),
        ("gpt2", {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "resid_pdrop": 0.3}, "resid_pdrop"),
        ("gpt2", {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "scale_attn_weights": False},
         "scale_attn_weights .*False"),
    ],
)  # fmt: skip
def test_unsupported_settings_of_a_family_are_named(kind, settings, named) -> None:
    with pytest.raises(ValueError, match=named):
        options_of(kind, SIZES | settings)


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_settings_that_a_t5_omits_are_those_of_its_class(kind) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    theirs = getattr(transformers, FAMILIES[kind].config_class)(**sizes, decoder_start_token_id=0)
    state = getattr(transformers, FAMILIES[kind].model_class)(theirs).state_dict()
    whole = theirs.to_dict()
    least = {name: whole[name] for name in (*sizes, "model_type", "pad_token_id", "eos_token_id")}
    cases = (whole, least, {**whole, "n_positions": 77})
    models = [FAMILIES[kind].to_model(Checkpoint(settings, state, 2)).config for settings in cases]
    assert models[0] == models[1] and (models[0].num_buckets, models[0].max_distance) == (32, 128)
    assert [model.max_len for model in models] == [512, 512, 77]


@pytest.mark.parametrize(
    "settings",
    [
        {"pruned_heads": {"0": [1]}}, {"position_embedding_type": "relative_key"}, {"is_decoder": True},
        {"add_cross_attention": True}, {"hidden_act": "relu2"}, {"intermediate_size": "wide"},
    ],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_unsupported_settings_of_a_bert_are_named(settings) -> None:
    assert ENCODER_FORMS["bert"].options(SIZES)["num_layers"] == 4
    with pytest.raises(ValueError, match=next(iter(settings))):
        ENCODER_FORMS["bert"].options(SIZES | settings)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"positions": "sinusoidal"}, "positions='learned', got 'sinusoidal'.*positions='rotary', got 'sinusoidal'"),
        ({"positions": "rotary", "norm": "rms", "dropout": 0.1, "bias": False, "activation": "swiglu"},
         "Llama, with dropout=0.0, got 0.1"),
        ({"positions": "rotary", "norm": "rms", "bias": False, "activation": "relu"}, "activation=.*got 'relu'"),
        ({"activation_dropout": 0.1}, "activation_dropout=0.0, got 0.1"),
        ({"window_size": 3}, "GPT-2, with window_size=None, got 3"),
    ],
)  # fmt: skip
def test_options_that_no_family_has_are_named(options, named) -> None:
    from fastformer.integrations import to_huggingface

    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1, "max_len": 8}
    with pytest.raises(ValueError, match=named) as raised:
        to_huggingface(GPT(GPTConfig(20, **sizes, **options)))
    others = {"rms": "NeoX", "layer": "Gemma"}  # which are of another kind
    assert options.get("positions") == "sinusoidal" or others[options.get("norm", "layer")] not in str(raised.value)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_layers_without_experts_are_those_of_a_qwen(kind) -> None:
    assert options_of(kind, SIZES | {"num_experts": 0}).num_experts is None
    with pytest.raises(ValueError, match="num_experts"):
        options_of(kind, SIZES | {"num_experts": -1})


def test_a_window_that_is_not_used_is_none() -> None:
    settings = SIZES | {"model_type": "llama", "sliding_window": 32}
    check_fields(settings | {"use_sliding_window": False}, "decoder")
    for more in ({}, {"use_sliding_window": True}, {"use_sliding_window": False, "attention_chunk_size": 32}):
        with pytest.raises(ValueError, match="sliding_window|attention_chunk_size"):
            check_fields(settings | more, "decoder")


def test_unused_ids_of_a_decoder_are_omitted() -> None:
    assert special_ids({"eos_token_id": [3, 70, 3]}, 60, None).eos == (3,)
    assert special_ids({"eos_token_id": 5, "pad_token_id": -1}, 60, 5).unk is None
    assert special_ids({"eos_token_id": [3, 5], "pad_token_id": 7}, 60, 5).unk is None
    assert special_ids({"eos_token_id": 5, "pad_token_id": 99}, 60, 4).pad == 5
    assert special_ids({"eos_token_id": None}, 60, 0).eos == ()
    for wrong in ("5", [5, None], True):
        with pytest.raises(ValueError, match=r"\beos_token_id\b"):
            special_ids({"eos_token_id": wrong}, 60, None)


@pytest.mark.parametrize("kind", ["gemma", "gemma3_text"])
def test_the_norms_of_a_gemma_are_not_rounded_before_the_models_dtype_is_known(kind) -> None:
    torch.manual_seed(0)
    form, config = DECODER_FORMS[kind], GPTConfig(60, d_model=16, num_heads=2, num_layers=1, max_len=8)
    weight = torch.randn(16).bfloat16() * 0.1
    ours = form.convert("decoder.layers.0.norm1.weight", weight, config)
    assert torch.equal(ours.float(), weight.float() + 1)  # bf16 has too few digits
    assert torch.equal(form.convert("decoder.layers.0.linear1.weight", weight, config), weight)
    exact = form.convert("decoder.norm.weight", weight.double(), config)
    assert torch.equal(form.revert("decoder.norm.weight", exact, config), weight.double())


@each("kind", PRESENT)
def test_each_family_is_listed_in_the_table(kind) -> None:
    source = importlib.util.find_spec(FAMILIES[kind].source(kind))
    assert source is not None and source.origin is not None
    text = Path(source.origin).read_text(encoding="utf-8")
    assert f"class {FAMILIES[kind].model_class}(" in text and FAMILIES[kind].config_class in text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deberta-v2": ({}, "DeBERTa"),
    "deepseek_v3": ({}, "compresses keys"),
    "nonesuch": ({"layer_types": ["full_attention", "mamba"]}, "mamba"),
    "nonesuch_vl": ({"text_config": {"model_type": "llama"}}, "more than text"),
    "cohere": ({"layer_types": ["full_attention"]}, "cohere"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("load", [
    lambda folder: load_model(folder, ("GPT",)), fastformer.Translator.from_pretrained, fastformer.Chat.from_pretrained,
    fastformer.Encoder.from_pretrained, fastformer.CrossEncoder.from_pretrained, open_service,
], ids=["GPT", "Translator", "Chat", "Encoder", "CrossEncoder", "serve"])  # fmt: skip
def test_a_family_that_is_not_known_is_refused_with_its_reason(kind, load, tmp_path) -> None:
    """A model of layers that fastformer doesn't compute is not taken for one that it does."""
    settings, reason = REFUSED[kind]
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "vocab_size": 60, "model_type": kind, **settings}))
    with pytest.raises(ValueError, match=f"'{kind}'.*{reason}" if reason != kind else kind):
        load(tmp_path)


# What transformers calls GraniteMoeHybrid, Glm, Glm4, Glm4Moe and Afmoe.
AS_MADE = ("Granite 4", "GLM-4", "GLM-4-0414", "GLM-4.5", "Trinity")


def test_messages_tell_the_families_apart() -> None:
    """Each family has a name of its own, by which it tells what a folder lacks."""
    names = {kind: family.name for kind, family in FAMILIES.items()}
    assert len({*names.values()}) == len(names)
    for kind, name in names.items():
        is_lower = name == "gpt-oss"  # as its makers write it
        assert re.fullmatch(r"[\w.-]+( [\w.]+)*", name) and (name != name.lower()) != is_lower
        letters = re.sub(r"\W", "", name.lower())
        assert FAMILIES[kind].config_class.lower().replace("_", "").startswith(letters) or name in AS_MADE
    for kind in (*DECODER_FORMS, *ENCODER_FORMS):
        with pytest.raises(ValueError, match=f"(?<![\\w-]){names[kind]}(?![\\w-])"):
            FAMILIES[kind].to_model(Checkpoint({"model_type": kind}, {}))
