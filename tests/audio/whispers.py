"""Small Whispers of transformers with random weights, whose logits are far apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EOT, SOT, EN, TRANSCRIBE, NO_SPEECH, NO_TIMESTAMPS, VOCAB = 60, 61, 62, 66, 69, 70, 120
LANGUAGES = {"<|en|>": EN, "<|de|>": EN + 1, "<|fr|>": EN + 2}
TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
TOKENS = [
    *(f"t{i}" if i else "" for i in range(EOT)),
    *("<|endoftext|>", "<|startoftranscript|>", *LANGUAGES),
    *(f"<|{name}|>" for name in TASKS),
    *(f"<|{i * 0.02:.2f}|>" for i in range(VOCAB - NO_TIMESTAMPS - 1)),
]


@torch.no_grad()
def draw_weights(model: Any) -> None:
    """Draws weights that make logits far apart, and attention depend on its source and its positions."""
    for name, tensor in model.named_parameters():
        if name != "model.encoder.embed_positions.weight":
            factor = 3.0 if "encoder_attn" in name or "decoder.embed_positions" in name else 1.5
            tensor.copy_(torch.randn(tensor.shape) * factor * tensor.shape[-1] ** -0.5)
            tensor.add_(1 if "norm.weight" in name else 0)


def whisper(**settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    lengths = {"max_source_positions": 24, "max_target_positions": 40, "num_mel_bins": 8, "vocab_size": VOCAB}
    ids = {"eos_token_id": EOT, "bos_token_id": EOT, "pad_token_id": EOT, "decoder_start_token_id": SOT}
    config = transformers.WhisperConfig(**sizes | heads | lengths | ids | settings)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    draw_weights(model)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[EOT].mul_(2.6)
    options = {
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "lang_to_id": LANGUAGES,
        "is_multilingual": True,
        "suppress_tokens": [3, SOT, NO_SPEECH],
        "begin_suppress_tokens": [5, EOT],
        "alignment_heads": [[0, 1], [1, 0]],
    }
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    return model


def features(windows: int, frames: int = 48) -> Tensor:
    count = windows * 8 * frames
    return torch.sin(torch.arange(count, dtype=torch.float64).square() * 0.37).view(windows, 8, frames).float()


def states_of(model: Any, features: Tensor) -> Tensor:
    """Returns the states of features of any length, which transformers pads to whole windows."""
    encoder, gelu = model.model.encoder, torch.nn.functional.gelu
    with torch.no_grad():
        x = gelu(encoder.conv2(gelu(encoder.conv1(features)))).transpose(1, 2)
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        for layer in encoder.layers:
            x = layer(x, None)
        return encoder.layer_norm(x)
