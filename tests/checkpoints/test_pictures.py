"""The text of a model that also sees pictures is loaded out of its folder."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from fastformer.checkpoints.hf import FAMILIES, why_unsupported
from fastformer.checkpoints.hf.common import text_settings
from fastformer.checkpoints.run import architecture_of
from tests.integrations.config_fields import BASES, load

VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 24,
          "num_position_embeddings": 16}  # fmt: skip
# Its sections turn by the places of rows and columns, which are those of the token in a text.
ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75, "mrope_section": [1, 1, 1],
        "mrope_interleaved": True}  # fmt: skip
CLASSES = {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_text_of_a_model_with_pictures_computes_the_same(kind, is_tied, tmp_path, caplog) -> None:
    options: dict[str, Any] = {"text_config": {**BASES[kind], "rope_parameters": ROPE}, "vision_config": VISION}
    config = getattr(transformers, f"{CLASSES[kind]}Config")(**options, tie_word_embeddings=is_tied)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")(config).eval()
    theirs.save_pretrained(tmp_path)
    assert architecture_of(tmp_path) == "GPT"
    ours = load(tmp_path, kind)
    assert ours.config.tie_embeddings == is_tied and "tensors for pictures are left out" in caplog.text
    ids = torch.randint(6, 58, (2, 61))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_text_of_a_ministral_3_is_loaded(is_tied, is_old, tmp_path, caplog) -> None:
    """Files have the names of versions of transformers before 5, which newer ones write, too, or those in memory."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
              "image_size": 28, "patch_size": 14, "head_dim": 8}  # fmt: skip
    text = {"model_type": "ministral3", **BASES["ministral3"], "sliding_window": None}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    torch.manual_seed(0)
    theirs = transformers.Mistral3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path, save_original_format=is_old)
    assert architecture_of(tmp_path) == "GPT"
    ours = load(tmp_path, "ministral3")
    assert ours.config.tie_embeddings == is_tied and "tensors for pictures are left out" in caplog.text
    ids = torch.randint(11, 58, (2, 61))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_mistral_with_pictures_is_refused(tmp_path) -> None:
    settings = {"model_type": "mistral3", "text_config": {"model_type": "mistral", **BASES["mistral"]}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert architecture_of(tmp_path) is None and "Ministral 3" in (why_unsupported(settings) or "")


def test_a_model_with_pictures_and_without_settings_of_its_text_is_refused(tmp_path) -> None:
    wrong: Any
    for wrong in (None, [], "text"):
        settings = {"model_type": "qwen3_5", "text_config": wrong}
        with pytest.raises(ValueError, match="text_config"):
            text_settings(settings)
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match="text_config"):
            load(tmp_path, "qwen3_5_text")
    assert FAMILIES["qwen3_5_text"].generates
