"""Makes models in which every parameter matters: no bias is zero, and no norm is one."""

from __future__ import annotations

from typing import Any

import torch

from fastformer.models import GPT, Transformer
from tests.models.plain_gpt import weights_of


@torch.inference_mode(False)
@torch.no_grad()
def drawn(kind: type[Transformer] | type[GPT], seed: int = 0, **options: Any) -> Any:
    """Makes a small model in evaluation mode, with random weights that give it clear preferences."""
    sizes: dict[str, Any] = {"vocab_size": 70, "d_model": 32, "num_heads": 4, "d_ff": 52, "max_len": 64}
    if kind is Transformer:
        sizes |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
    else:
        sizes |= {"num_layers": 2}
    model = kind(kind.config_class(**{**sizes, **options})).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in weights_of(model).items():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            is_factor = "norm" in name and name.endswith("weight") or name.endswith("layer_scalar")
            parameter.copy_(0.3 * noise + (1.0 if is_factor else 0.0))
        elif "position_bias" in name:
            parameter.copy_(noise)
        elif "embedding" in name:
            parameter.copy_(noise * (1.0 if name.endswith("table") else parameter.shape[1] ** -0.5))
        else:
            parameter.copy_(1.5 * noise * parameter.shape[1] ** -0.5)
    return model


# Layers of two kinds, the last two of which read the keys of others, with inputs of their own.
GEMMA4: dict[str, Any] = {
    "positions": "rotary", "norm": "rms", "activation": "geglu_tanh", "bias": False, "num_kv_heads": 2, "num_layers": 4,
    "norm_placement": "both", "qk_norm": "head", "window_size": 4, "window_layers": (True, False, True, False),
    "local_rotary_base": 70.0, "global_head_dim": 16, "global_num_kv_heads": 1, "value_norm": True,
    "keys_as_values": True, "shared_kv_layers": 2, "shared_kv_d_ff": 104, "layer_input_dim": 6, "layer_scalars": True,
    "rotary_scaling": {"kind": "proportional", "partial_rotary_factor": 0.25}, "attention_scale": 0.2,
}  # fmt: skip
# Each option of the configs away from its default at least once, and sizes that fill no vector and no panel. What only
# decoder-only families have is in tests/engine/test_options.py.
CONFIGS: dict[str, tuple[type[Transformer] | type[GPT], dict[str, Any]]] = {
    "transformer": (Transformer, {}),
    "post-norm": (Transformer, {"norm_first": False, "positions": "interleaved", "attention_bias": True}),
    "rms gelu gqa": (Transformer, {"norm": "rms", "activation": "gelu", "num_kv_heads": 2, "layer_norm_eps": 1e-2}),
    "windows": (Transformer, {"window_size": 3, "activation": "gelu_tanh", "num_kv_heads": 1}),
    "windows of one": (Transformer, {"window_size": 0, "norm_first": False, "norm": "rms"}),
    "two vocabularies": (
        Transformer,
        {"source_vocab_size": 33, "tie_embeddings": False, "activation": "swiglu", "d_ff": 37},
    ),
    "marian": (
        Transformer,
        {"norm_first": False, "positions": "halves", "output_bias": True, "embed_pad": True, "activation": "silu"},
    ),
    "bart": (
        Transformer,
        {"norm_first": False, "positions": "learned", "embedding_norm": True, "activation": "gelu", "max_len": 61},
    ),
    "mbart": (Transformer, {"positions": "learned", "embedding_norm": True, "tie_embeddings": False, "d_model": 60}),
    "a norm on sines": (Transformer, {"embedding_norm": True, "norm": "rms", "layer_norm_eps": 1e-2}),
    "bias, unscaled": (Transformer, {"tie_embeddings": False, "output_bias": True, "scale_embedding": False}),
    "odd sizes": (Transformer, {"d_model": 60, "num_heads": 3, "d_ff": 67, "vocab_size": 129, "num_kv_heads": 3}),
    "deep decoder": (Transformer, {"num_encoder_layers": 1, "num_decoder_layers": 3, "d_model": 72, "num_heads": 1}),
    "wide heads": (Transformer, {"head_dim": 24, "num_kv_heads": 1, "attention_bias": True, "num_decoder_layers": 1}),
    "gpt": (GPT, {}),
    "many tokens": (GPT, {"vocab_size": 1100, "num_layers": 1}),
    "sinusoidal": (GPT, {"positions": "sinusoidal", "bias": False, "tie_embeddings": False, "activation": "relu"}),
    "llama": (
        GPT,
        {"positions": "rotary", "norm": "rms", "activation": "swiglu", "num_kv_heads": 2, "bias": False, "d_ff": 45},
    ),
    "rotary windows": (
        GPT,
        {"positions": "rotary", "window_size": 5, "d_model": 108, "num_heads": 3, "rotary_base": 100.0},
    ),
    "gemma 4": (GPT, GEMMA4),
    "gpt windows": (GPT, {"window_size": 4, "num_kv_heads": 1, "activation": "gelu_tanh", "layer_norm_eps": 1e-2}),
    "t5": (
        Transformer,
        {
            "positions": "relative", "num_buckets": 8, "max_distance": 9, "norm": "rms", "bias": False,
            "embed_pad": True, "scale_embedding": False, "scale_output": True,
        },
    ),
    "t5 1.1": (
        Transformer,
        {
            "positions": "relative", "max_distance": 40, "norm": "rms", "bias": False, "activation": "geglu_tanh",
            "tie_embeddings": False, "d_ff": 37, "num_heads": 2, "window_size": 30,
        },
    ),
    "relative, post-norm": (
        Transformer,
        {
            "positions": "relative", "num_buckets": 6, "max_distance": 200, "norm_first": False, "scale_output": True,
            "window_size": 4, "d_model": 36, "num_heads": 3, "num_kv_heads": 1, "tie_embeddings": False,
        },
    ),
}  # fmt: skip
RELATIVE = [name for name, (_, options) in CONFIGS.items() if options.get("positions") == "relative"]
