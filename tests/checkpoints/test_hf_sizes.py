"""A config.json with impossible sizes, and weights without what the model needs, are refused by name."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
import transformers

from fastformer.checkpoints.hf import FAMILIES
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.integrations.conversion import settings_of
from tests.checkpoints.present import PRESENT

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "vocab_size": 40,
    "max_position_embeddings": 48, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 40, "max_position_embeddings": 48, "pad_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 40, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("t5", "mt5"), T5),
    **dict.fromkeys(("bart", "marian", "mbart", "pegasus", "m2m_100"), BART),
    "modernbert": {**SIZES, "cls_token_id": 0, "sep_token_id": 2, "local_attention": 16},
    "distilbert": {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "vocab_size": 40,
                   "max_position_embeddings": 48, "pad_token_id": 1},
    "granitemoehybrid": {**SIZES, "num_local_experts": 0, "layer_types": ["full_attention"] * 2, "mamba_n_heads": 1},
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        {**SIZES, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
         "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {**SIZES, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 8, "num_dense_layers": 1},
    "glm4_moe": {**SIZES, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "afmoe": {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "ernie4_5_moe": {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8},
    **dict.fromkeys(
        ("ministral", "gemma", "gemma2", "gemma3_text", "qwen3", "helium", "hunyuan_v1_dense"), {**SIZES, "head_dim": 8}
    ),
}  # fmt: skip
GENERATING = [name for name, family in FAMILIES.items() if family.kind == "decoder"] + ["t5", "mt5", "bart", "marian"]
WRONG = [0, -1, 10**9, 10**18, 10**30, "many", 1.5, [4], True]


@functools.cache
def tiny(kind: str, **more: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the settings and the weights of a small model of a family."""
    family = FAMILIES[kind]
    config = getattr(transformers, family.config_class)(**{**MORE.get(kind, SIZES), **more})
    model = getattr(transformers, family.model_class)(config)
    return settings_of(model), model.state_dict()


def convert(kind: str, settings: dict[str, Any], state: dict[str, torch.Tensor]) -> Any:
    return FAMILIES[kind].to_model(Checkpoint({**settings, "architectures": None}, state))


@pytest.mark.parametrize("share", [0.08, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", PRESENT)
def test_sizes_are_refused_by_a_value_error(kind, share) -> None:
    settings, state = tiny(kind)
    convert(kind, settings, state)
    dice = random.Random(kind)
    for name, value in settings.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or "token" in name:
            continue
        for wrong in WRONG:
            if dice.random() < share or (name == "num_attention_heads" and wrong == 0):
                try:
                    convert(kind, {**settings, name: wrong}, state)  # a setting that no model reads may have any value
                except ValueError:
                    pass
                except Exception as error:
                    raise AssertionError(f"{kind}, {name}={wrong!r}: {type(error).__name__}") from error


@pytest.mark.parametrize("kind", ["glm", "glm4", "gpt_neox", "ministral3", "hunyuan_v1_dense", "helium", "lfm2"])
def test_rotary_parameters_are_refused_by_a_value_error(kind) -> None:
    settings, state = tiny(kind)
    rope = {"partial_rotary_factor": 0.5, **settings["rope_parameters"]}
    for name in rope:
        for wrong in (*WRONG, 2.5, 10**10, float("nan"), {}):
            try:
                convert(kind, {**settings, "rope_parameters": {**rope, name: wrong}}, state)
            except ValueError:
                continue
            except Exception as error:
                raise AssertionError(f"{kind}, {name}={wrong!r}: {type(error).__name__}") from error
            assert name != "partial_rotary_factor" or wrong == 1


@pytest.mark.parametrize("kind", ["gpt_oss", "ministral3", "ernie4_5"])
def test_a_head_of_gigabytes_is_refused_before_it_takes_them(kind) -> None:
    """The first two have a table of a head's rotations, and the last one of its rows."""
    settings, state = tiny(kind)
    with pytest.raises(ValueError, match=r"(head with at most|heads of) \d+ ro"):
        convert(kind, {**settings, "head_dim": 10**9}, state)


@pytest.mark.parametrize("kind", GENERATING)
def test_an_untied_model_without_its_head_is_refused(kind) -> None:
    settings, state = tiny(kind)
    settings = {**settings, "tie_word_embeddings": False}
    names = {"lm_head.weight", "embed_out.weight"}
    headless = {name: tensor for name, tensor in state.items() if name not in names}
    with pytest.raises(ValueError, match=r"lm_head|embed_out"):
        convert(kind, settings, headless)
    bare = {name.removeprefix("model.").removeprefix("transformer."): tensor for name, tensor in headless.items()}
    with pytest.raises(ValueError):
        convert(kind, settings, bare)
    if kind not in ("mt5", "m2m_100"):  # tied, it needs none
        convert(kind, {**settings, "tie_word_embeddings": True}, headless)


@pytest.mark.parametrize("kind", ["t5", "bart", "marian", "bert", "llama"])
def test_a_model_without_one_of_its_parts_is_refused(kind) -> None:
    settings, state = tiny(kind)
    for part in ("embed", "decoder", "encoder", "layers", "norm", "layer.1"):
        less = {name: tensor for name, tensor in state.items() if part not in name.lower()}
        if len(less) < len(state) and not (part == "embed" and kind in ("t5", "marian", "bart")):
            with pytest.raises(ValueError):
                convert(kind, settings, less)


def test_a_classifier_without_its_head_is_refused() -> None:
    settings, state = tiny("bert")
    with pytest.raises(ValueError, match="BertForSequenceClassification"):
        FAMILIES["bert"].to_model(Checkpoint({**settings, "architectures": ["BertForSequenceClassification"]}, state))
