"""Tests folders of models that read more than text: their text model is loaded, and the rest is left out and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fastformer.checkpoints import load_model
from tests.checkpoints.decoders import save
from tests.checkpoints.families import byte_level

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "head_dim": 8,
    "num_key_value_heads": 2, "global_head_dim": 16, "hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "whole"
    path.mkdir()
    byte_level(["<|endoftext|>"]).save_model(str(path))
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(path)
    ids = {"pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": 0}
    vocab = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer) + 5}
    config = transformers.Gemma4Config(text_config={**SIZES, **vocab, **ids}, vision_config=VISION, audio_config=None)
    save(path, transformers.Gemma4ForConditionalGeneration(config), tokenizer)
    return path


def test_the_text_model_of_a_whole_is_loaded(folder, caplog) -> None:
    model, _ = load_model(folder, "GPT")
    assert "these parts are left out: embed_vision, vision_tower" in caplog.text
    theirs = transformers.Gemma4ForConditionalGeneration.from_pretrained(folder).eval()
    ids = torch.randint(0, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {"enable_moe_block": True}}, "enable_moe_block to be false"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention .* got 'all'"),
        ({"text_config": {"num_kv_shared_layers": 3}}, "shared_kv_layers .* got 3 of 4"),
        ({"text_config": {"per_layer_config": {"0": {"head_dim": 16}}}}, "per_layer_config .* for layer 0"),
    ],
)
def test_what_is_not_computed_is_refused(folder, change, message) -> None:
    settings = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        settings[name] = {**settings[name], **value} if isinstance(value, dict) and name in settings else value
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        load_model(folder, "GPT")
