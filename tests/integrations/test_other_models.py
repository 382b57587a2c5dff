"""Models of pictures, speech and text without rules of their own in fastformer compute the same after accelerate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fastformer
from tests.checks import assert_accurate

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
VISION = SIZES | {"image_size": 16, "patch_size": 8}
TEXT = SIZES | {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SPEECH = SIZES | {
    "conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
TWO_STACKS = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
WHISPER = TWO_STACKS | {
    "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 30, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip


def picture() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 16, 16)}


def tokens(name: str = "input_ids", length: int = 9) -> dict[str, Tensor]:
    return {name: torch.randint(6, 60, (3, length))}


def padded() -> dict[str, Tensor]:
    lengths = torch.tensor([9, 4, 1])
    return tokens() | {"attention_mask": (torch.arange(9) < lengths[:, None]).long()}


Inputs = Callable[[], dict[str, Tensor]]
# The class of a model, the class of its config, the config's options, and the inputs.
MODELS: dict[str, tuple[str, str, dict[str, Any], Inputs]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, picture),
    # Its pooling head is a torch.nn.MultiheadAttention inside of a model of transformers.
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VISION, picture),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        lambda: {"input_features": torch.randn(3, 8, 40)} | tokens("decoder_input_ids", 5),
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        TEXT | {"num_key_value_heads": 1, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        padded,
    ),
    "beit": ("BeitModel", "BeitConfig", VISION | {"use_relative_position_bias": True}, picture),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
        picture,
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": VISION},
        lambda: picture() | padded(),
    ),
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2Config", SPEECH, lambda: {"input_values": torch.randn(3, 200)}),
    "deberta": ("DebertaV2Model", "DebertaV2Config", TEXT, padded),
    "blenderbot": (
        "BlenderbotForConditionalGeneration",
        "BlenderbotConfig",
        TWO_STACKS,
        lambda: padded() | tokens("decoder_input_ids", 5),
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {name: value for name, value in TEXT.items() if name != "intermediate_size"},
        padded,
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {name: TEXT[name] for name in ("hidden_size", "vocab_size")}, tokens),
}
# What `report` says of families that fastformer refuses with a reason.
REASONS = {"deberta": "DeBERTa"}
SLOW = ("blenderbot", "falcon", "mamba")


def outputs(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.inference_mode():
        found = model(**inputs).items()
    return {name: value for name, value in found if isinstance(value, Tensor) and value.is_floating_point()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MODELS]
)
def test_accelerate_keeps_outputs_and_generated_tokens(name: str) -> None:
    kind, config, options, make_inputs = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()
    inputs = make_inputs()
    accelerated = fastformer.accelerate(copy.deepcopy(model))
    report = fastformer.report(accelerated)
    assert report.swapped
    assert REASONS.get(name, "") in str(report.generate if model.can_generate() else report.encode)
    assert bool(report.generate) == model.can_generate()
    plain, ours = outputs(model, inputs), outputs(accelerated, inputs)
    assert plain.keys() == ours.keys() and plain
    if model.can_generate():
        prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        for beams in (1, 3):
            search = {"num_beams": beams, "max_new_tokens": 6, "do_sample": False}
            assert torch.equal(accelerated.generate(**prompt, **search), model.generate(**prompt, **search))
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = outputs(model.double(), wide)
    for name, value in plain.items():
        assert_accurate(ours[name].contiguous(), value, exact[name], name)
