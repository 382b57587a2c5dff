"""Writes the folders in tests/foreign/ctranslate2 and ctranslate2_decoders: random models, converted by CTranslate2.

    pip install ctranslate2==4.8.5 && python -m tests.foreign.ctranslate2_folders

Each folder has CTranslate2's files, and in expected.json what CTranslate2 computes in fp32 of the rounded weights: the
log-probabilities of translations, and the best hypotheses of two searches; of decoders, the log-probabilities of
prompts, and their continuations.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from fastformer.ops.embedding import sinusoidal_positions
from tests.checkpoints.families import ENGLISH, GERMAN, sentencepiece_model

FOLDERS = Path(__file__).parent / "ctranslate2"
ARGOS = Path(__file__).parent / "argos"
DECODER_FOLDERS = Path(__file__).parent / "ctranslate2_decoders"
VOCAB = 40
SIZES = {
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
                          "activation_function": "swish", "scale_embedding": True, **SIZES}, "int8"),
    ("bart", "Bart", SIZES, "bfloat16"),
    ("pegasus", "Pegasus", {"scale_embedding": True, **SIZES}, "int16"),
    ("m2m", "M2M100", SIZES, None),
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
            if "embed_positions" not in key or kind in ("Bart", "MBart"):
                parameter.copy_(torch.randn_like(parameter) * 0.4 + (1 if "norm" in key and "weight" in key else 0))
            if "encoder_attn." in key or "EncDecAttention" in key:  # so that translations depend on their sources
                parameter.mul_(2.5)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    return model


def convert(folder: Path, kind: str, options: dict[str, Any], quantization: str | None) -> list[str]:
    """Converts a random model, and returns its tokens."""
    config = (model := make(kind, options)).config
    tokens = [f"t{i}" for i in range(VOCAB)]
    tokens[3], tokens[config.pad_token_id], tokens[config.eos_token_id] = "<unk>", "<pad>", "</s>"
    if kind in ("Bart", "MBart", "M2M100"):
        tokens[0] = "<s>"
    convert_model(folder, kind, model, tokens, quantization)
    return tokens


def convert_model(folder: Path, kind: str, model: Any, tokens: list[str], quantization: str | None) -> None:
    """Converts a model with these tokens."""
    # Versions of transformers that the converter was written for have these settings.
    model.config.normalize_before = kind in ("MBart", "Pegasus", "M2M100")
    model.config.normalize_embedding = kind in ("Bart", "MBart")

    class Names:
        pad_token, eos_token, unk_token, bos_token = "<pad>", "</s>", "<unk>", "<s>"

        def convert_ids_to_tokens(self, i: int) -> str:
            return tokens[i]

    save_converted(folder, kind, model, Names(), tokens[:-1] if kind == "Marian" else tokens, quantization)


def save_converted(
    folder: Path, kind: str, model: Any, names: Any, tokens: list[str], quantization: str | None = None, **config: Any
) -> None:
    """Saves what CTranslate2 makes of a model of transformers, with tokens for which `names` is the tokenizer."""
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    loader = _MODEL_LOADERS[f"{kind}Config"]
    spec = loader.get_model_spec(model)
    loader.set_config(spec.config, model, names)
    loader.set_vocabulary(spec, tokens)
    for name, value in config.items():
        setattr(spec.config, name, value)
    spec.validate()
    spec.optimize(quantization=quantization)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec.save(str(folder))


def write(folder: Path, kind: str, options: dict[str, Any], quantization: str | None) -> None:
    """Converts a model, and lets CTranslate2 compute what a reader of the folder has to."""
    import ctranslate2

    tokens, draw = convert(folder, kind, options, quantization), random.Random(5)
    sources = [[*draw.choices(tokens[4:-1], k=k), "</s>"] for k in (1, 2, 3, 4, 5, 6, 7, 7)]
    targets = [draw.choices(tokens[4:-1], k=k) for k in (6, 5, 3, 1, 2, 4, 6, 7)]
    engine = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
    scored = engine.score_batch(sources, targets)
    expected = {"sources": sources, "targets": targets, "log_probs": [each.log_probs for each in scored]}
    for beams in (1, 3):
        found = engine.translate_batch(sources, beam_size=beams, max_decoding_length=10)
        expected[f"hypotheses_{beams}"] = [each.hypotheses[0] for each in found]
    (folder / "expected.json").write_text(json.dumps(expected))


_DECODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
            "max_position_embeddings": 64}  # fmt: skip
_GROUPED: dict[str, Any] = {**_DECODER, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {**_GROUPED, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}
DECODERS: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("gpt2", "GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}, "int8"),
    ("llama", "Llama", _GROUPED, "int8"),
    ("mistral", "Mistral", {**_GROUPED, "sliding_window": 12}, "float16"),
    ("qwen2", "Qwen2", _GROUPED, "int16"),
    ("qwen3", "Qwen3", {**_GROUPED, "head_dim": 8}, "bfloat16"),
    ("gemma", "Gemma", _GEMMA, "int8"),
    ("gemma2", "Gemma2", {**_GEMMA, "query_pre_attn_scalar": 8}, "float16"),
    ("gemma3", "Gemma3Text", {**_GEMMA, "sliding_window": 12, "num_hidden_layers": 6, "query_pre_attn_scalar": 8},
     "int8"),
    ("neox", "GPTNeoX", {**_DECODER, "rotary_pct": 0.5}, None),
]  # fmt: skip


def make_decoder(kind: str, options: dict[str, Any]) -> Any:
    """Makes a decoder in which every parameter matters, with the attributes that the converter reads."""
    torch.manual_seed(7)
    name = kind.removesuffix("Text")
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **options)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = ("norm" in key or "ln_" in key) and "weight" in key and "Gemma" not in kind
            parameter.copy_(torch.randn_like(parameter) * 0.4 + is_norm)
    if kind == "GPTNeoX":
        model.config.__dict__ |= {"rotary_pct": 0.5, "rotary_emb_base": 10000}
        model.__dict__["embed_out"] = model.lm_head
    return model


def convert_decoder(folder: Path, kind: str, settings: dict[str, Any], quantization: str | None) -> list[str]:
    """Converts a decoder, and returns its tokens."""
    tokens = ["<s>", "</s>", "<unk>", *(f"t{i}" for i in range(3, VOCAB))]

    class Names:
        bos_token, eos_token, unk_token, pad_token, chat_template = "<s>", "</s>", "<unk>", None, None

        def convert_ids_to_tokens(self, i: int) -> str:
            return tokens[i]

    save_converted(folder, kind, make_decoder(kind, settings), Names(), tokens, quantization)
    added = [{"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for i, token in enumerate(tokens[:3])]  # fmt: skip
    words = {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<unk>"}
    library = {"added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(library))
    return tokens


def write_decoder(folder: Path, kind: str, settings: dict[str, Any], quantization: str | None) -> None:
    """Converts a decoder, and lets CTranslate2 compute what a reader of the folder has to."""
    import ctranslate2

    tokens, draw = convert_decoder(folder, kind, settings, quantization), random.Random(5)
    prompts = [draw.choices(tokens[3:], k=k) for k in (1, 2, 3, 5, 8, 11)]
    engine = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32")
    options = {"max_length": 20, "sampling_topk": 1, "include_prompt_in_result": False, "end_token": "</s>"}
    # One by one: a batch with a window is an error there.
    expected = {
        "prompts": prompts,
        "log_probs": [engine.score_batch([prompt])[0].log_probs for prompt in prompts],
        "continuations": [engine.generate_batch([prompt], **options)[0].sequences[0] for prompt in prompts],
    }
    (folder / "expected.json").write_text(json.dumps(expected))


class _Drawn(dict[str, torch.Tensor]):
    """Weights of OpenNMT by name, each drawn when the converter asks for it."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._sizes: dict[str, tuple[int, ...]] = {
            "emb_luts.0": (vocab_size, 16),
            "generator": (vocab_size, 16),
            "w_1": (32, 16),
            "w_2": (16, 32),
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        module, kind = name.removesuffix(".pe").rsplit(".", 1)
        if name.endswith(".pe"):
            return sinusoidal_positions(40, 16, "interleaved")[:, None]
        shape: tuple[int, ...] = next((sizes for end, sizes in self._sizes.items() if module.endswith(end)), (16, 16))
        shape = shape if kind == "weight" and "norm" not in module else shape[:1]
        is_norm, factor = "norm" in module and kind == "weight", 3.0 if "context_attn" in module else 0.4
        return torch.randn(shape) * factor + is_norm

    def get(self, name: str, default: Any = None) -> torch.Tensor:
        return self[name]


def convert_argos(folder: Path, quantization: str | None = "int8") -> Any:
    """Writes a package of Argos Translate, whose model OpenNMT-py trains, and returns its SentencePiece model."""
    from argparse import Namespace

    import sentencepiece
    from ctranslate2.converters import opennmt_py

    torch.manual_seed(7)
    pieces = sentencepiece_model([*ENGLISH, *GERMAN], vocab_size=60, normalization_rule_name="identity")
    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    tokens = ["<unk>", "<blank>", "<s>", "</s>", *(processor.id_to_piece(i) for i in range(3, len(processor)))]
    options = Namespace(enc_layers=2, dec_layers=2, heads=2, decoder_type="transformer")
    spec = opennmt_py._get_model_spec_seq2seq(options, _Drawn(len(tokens)), [tokens], [tokens], 1)
    spec.validate()
    spec.optimize(quantization=quantization)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "model").mkdir(parents=True)
    spec.save(str(folder / "model"))
    (folder / "sentencepiece.model").write_bytes(pieces)
    (folder / "metadata.json").write_text(json.dumps({"from_code": "en", "to_code": "de", "package_version": "1.0"}))
    return processor


def write_argos(folder: Path) -> None:
    """Writes a package of Argos Translate, and what CTranslate2 computes."""
    import ctranslate2

    processor = convert_argos(folder)
    engine = ctranslate2.Translator(str(folder / "model"), device="cpu", compute_type="float32")
    texts = [*ENGLISH, "the woman", "two birds 漢", "a dog reads the book in the park"]
    sources = [processor.encode(text, out_type=str) for text in texts]
    expected: dict[str, Any] = {"texts": texts}
    for beams in (1, 3):
        found = engine.translate_batch(sources, beam_size=beams, max_decoding_length=12)
        expected[f"translations_{beams}"] = [processor.decode_pieces(each.hypotheses[0]) for each in found]
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    write_argos(ARGOS)
    for name, kind, options, quantization in CASES:
        write(FOLDERS / name, kind, options, quantization)
    for name, kind, options, quantization in DECODERS:
        write_decoder(DECODER_FOLDERS / name, kind, options, quantization)
