"""Makes folders of decoder-only models as transformers saves them, one for each kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints.families import ENGLISH, byte_level, write_pieces

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

TEXTS = ["the dog reads a book", "two birds", " a woman in  the park", "men walk 漢 the dog"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip


def save(folder: Path, model: Any, tokenizer: Any, **search: Any) -> None:
    torch.manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 2 else 0.2) + is_norm)
    for name, value in search.items():
        setattr(model.generation_config, name, value)
    model.eval().save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)


def gpt2(folder: Path) -> None:
    """Makes a folder with a byte-level BPE without BOS and PAD."""
    folder.mkdir()
    byte_level(["<|endoftext|>"]).save_model(str(folder))
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(folder)
    end = tokenizer.eos_token_id
    config = transformers.GPT2Config(**SIZES, vocab_size=len(tokenizer) + 3, eos_token_id=end, bos_token_id=end)
    save(folder, transformers.GPT2LMHeadModel(config), tokenizer)


def merges(folder: Path) -> None:
    """Makes a GPT-2 folder without a tokenizer.json."""
    gpt2(folder)
    (folder / "tokenizer.json").unlink()


def llama3(folder: Path) -> None:
    """Makes a folder with a byte-level BPE whose post-processor adds BOS, several end ids, and a chat template."""
    backend = byte_level(["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"])._tokenizer
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        **SIZES, vocab_size=len(tokenizer) + 4, bos_token_id=0, eos_token_id=1, num_key_value_heads=2
    )
    folder.mkdir()
    model = transformers.LlamaForCausalLM(config)
    save(folder, model, tokenizer, eos_token_id=[3, 1], do_sample=True, temperature=0.6, top_p=0.9, max_length=40)


def llama2(folder: Path) -> None:
    """Makes a folder with a SentencePiece BPE in a tokenizer.json, in which PAD is a token."""
    _llama_pieces(folder)
    tokenizer = transformers.LlamaTokenizer.from_pretrained(folder, add_bos_token=True, pad_token="<unk>")
    _llama(folder, tokenizer, len(tokenizer), pad_token_id=0)
    (folder / "tokenizer.model").unlink()


def pieces(folder: Path) -> None:
    """Makes a folder with only a SentencePiece model, and additional tokens."""
    size = _llama_pieces(folder).get_piece_size()
    each = (("<|im_end|>", True), ("<note>", False))
    added = {str(size + i): {"content": token, "special": is_special} for i, (token, is_special) in enumerate(each)}
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "added_tokens_decoder": added}
    _llama(folder, None, size + 2)
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))


def _llama(folder: Path, tokenizer: Any, size: int, **ids: Any) -> None:
    config = transformers.MistralConfig(
        **SIZES, vocab_size=size, bos_token_id=1, eos_token_id=2, num_key_value_heads=2, sliding_window=None, **ids
    )
    model = transformers.MistralForCausalLM(config)
    if tokenizer is None:

        class Nothing:
            def save_pretrained(self, folder: Path) -> None: ...

        tokenizer = Nothing()
    save(folder, model, tokenizer)


def _llama_pieces(folder: Path) -> Any:
    return write_pieces(
        folder / "tokenizer.model", ENGLISH, vocab_size=340, model_type="bpe", byte_fallback=True, unk_id=0, bos_id=1,
        eos_id=2, pad_id=-1, normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip


def sentencepiece_of(model: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=model)


# By the kind of folder.
FOLDERS: dict[str, Callable[[Path], None]] = {
    "gpt2": gpt2, "merges": merges, "llama3": llama3, "llama2": llama2, "pieces": pieces,
}  # fmt: skip
