"""Writes the folders in tests/foreign/ctranslate2: random models, converted and computed by CTranslate2.

    pip install ctranslate2==4.8.5 && python -m tests.foreign.ctranslate2_folders

Each folder has CTranslate2's files, and in expected.json what CTranslate2 computes in fp32 of the rounded weights: the
log-probabilities of translations, and the best hypotheses of two searches.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

FOLDERS = Path(__file__).parent / "ctranslate2"
VOCAB = 40
_SIZES = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 24,
}  # fmt: skip
_T5 = {
    "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 2, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
# The name of each folder, the model of transformers, its options, and CTranslate2's type of the weights.
CASES: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("marian", "Marian", {"pad_token_id": VOCAB - 1, "eos_token_id": 0, "decoder_start_token_id": VOCAB - 1,
                          "activation_function": "swish", "scale_embedding": True, **_SIZES}, "int8"),
    ("bart", "Bart", _SIZES, "bfloat16"),
    ("pegasus", "Pegasus", {"scale_embedding": True, **_SIZES}, "int16"),
    ("m2m", "M2M100", _SIZES, None),
    ("t5", "T5", _T5, "float16"),
    ("t5-gated", "T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, **_T5}, "int8"),
]  # fmt: skip


def make(kind: str, options: dict[str, Any]) -> Any:
    """Makes a model in which every parameter matters."""
    torch.manual_seed(7)
    name = {"Marian": "MarianMTModel"}.get(kind, f"{kind}ForConditionalGeneration")
    model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, **options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" not in key or kind == "Bart":
                parameter.copy_(torch.randn_like(parameter) * 0.4 + (1 if "norm" in key and "weight" in key else 0))
            if "encoder_attn." in key or "EncDecAttention" in key:  # so that translations depend on their sources
                parameter.mul_(2.5)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    # Versions of transformers that the converter was written for have these settings.
    model.config.normalize_before = kind in ("Pegasus", "M2M100")
    model.config.normalize_embedding = kind == "Bart"
    return model


def write(folder: Path, kind: str, options: dict[str, Any], quantization: str | None) -> None:
    """Converts a model, and lets CTranslate2 compute what a reader of the folder has to."""
    import ctranslate2
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    model = make(kind, options)
    loader, config = _MODEL_LOADERS[f"{kind}Config"], model.config
    tokens = [f"t{i}" for i in range(VOCAB)]
    tokens[3], tokens[config.pad_token_id], tokens[config.eos_token_id] = "<unk>", "<pad>", "</s>"
    if kind in ("Bart", "M2M100"):
        tokens[0] = "<s>"

    class Names:
        pad_token, eos_token, unk_token, bos_token = "<pad>", "</s>", "<unk>", "<s>"

        def convert_ids_to_tokens(self, i: int) -> str:
            return tokens[i]

    spec = loader.get_model_spec(model)
    loader.set_config(spec.config, model, Names())
    loader.set_vocabulary(spec, tokens[:-1] if kind == "Marian" else tokens)
    spec.validate()
    spec.optimize(quantization=quantization)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec.save(str(folder))
    draw = random.Random(5)
    sources = [[*draw.choices(tokens[4:-1], k=k), "</s>"] for k in (1, 2, 3, 4, 5, 6, 7, 7)]
    targets = [draw.choices(tokens[4:-1], k=k) for k in (6, 5, 3, 1, 2, 4, 6, 7)]
    engine = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
    scored = engine.score_batch(sources, targets)
    expected = {"sources": sources, "targets": targets, "log_probs": [each.log_probs for each in scored]}
    for beams in (1, 3):
        found = engine.translate_batch(sources, beam_size=beams, max_decoding_length=10)
        expected[f"hypotheses_{beams}"] = [each.hypotheses[0] for each in found]
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    for name, kind, options, quantization in CASES:
        write(FOLDERS / name, kind, options, quantization)
