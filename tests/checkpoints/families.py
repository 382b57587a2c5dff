"""Makes folders as transformers saves them, one for each kind of tokenizer, with tiny models that all differ."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartTokenizerFast,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PegasusTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

ENGLISH = ["two men walk the dog in the park", "a woman reads a book", "the dog sees two birds", "men read in the park"]
GERMAN = ["zwei Männer führen den Hund im Park aus", "eine Frau liest ein Buch", "der Hund sieht zwei Vögel"]
TEXTS = ["the dog reads a book", "two birds", "a woman in the park", "men walk the dog"]
SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "forced_eos_token_id": None,
}  # fmt: skip
# As SentencePiece is told of a T5's or a Pegasus's.
T5_IDS: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}


class Saved(NamedTuple):
    """A folder, and the objects that transformers saved there."""

    folder: Path
    model: Any
    tokenizer: Any
    texts: list[str]

    def said(self, **options: Any) -> list[str]:
        """Returns the output of transformers' generate for the texts."""
        pad = self.model.config.pad_token_id
        rows = [self.tokenizer(text)["input_ids"] for text in self.texts]
        ids = torch.tensor([row + [pad] * (max(map(len, rows)) - len(row)) for row in rows])
        with torch.inference_mode():
            found = self.model.generate(ids, attention_mask=(ids != pad).long(), **{"max_new_tokens": 16, **options})
        return self.tokenizer.batch_decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def bart(folder: Path, **search: Any) -> Saved:
    folder.mkdir()
    byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], ENGLISH[:3]).save_model(str(folder))
    tokenizer = BartTokenizerFast.from_pretrained(folder)
    model = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer) + 3, **SIZES)).eval()
    draw(model, 4, 0.3, 0.8)
    with torch.no_grad():
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, -3:] = -100  # ids that no token has
        model.final_logits_bias[0, 1] = 9.0  # PAD, which would be said otherwise
    texts = [*TEXTS[:2], " a woman in  the park", "men walk 漢 the dog"]
    return saved(folder, model, tokenizer, texts, bad_words_ids=[[1]], **search)


def marian(folder: Path, *, separate: bool = False, bad_words: bool = True) -> Saved:
    folder.mkdir()
    pieces = {}
    for side, lines in (("source", ENGLISH), ("target", GERMAN)):
        model = sentencepiece_model(lines, vocab_size=40)
        (folder / f"{side}.spm").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces[side] = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    special = ["</s>", "<unk>", ">>deu<<"]
    names = {side: [*special, *found, "<pad>"] for side, found in pieces.items()}
    if not separate:
        names["source"] = [*special, *sorted({*pieces["source"], *pieces["target"]}), "<pad>"]
    else:  # <pad> is one id for both
        size = max(map(len, names.values()))
        names = {
            side: [*found[:-1], *(f"unused{i}" for i in range(size - len(found))), "<pad>"]
            for side, found in names.items()
        }
    vocab = {name: i for i, name in enumerate(names["source"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    options: dict[str, Any] = {}
    if separate:
        (folder / "target_vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names["target"])}))
        options = {"separate_vocabs": True, "target_vocab_file": str(folder / "target_vocab.json")}
    files = (str(folder / name) for name in ("source.spm", "target.spm", "vocab.json"))
    tokenizer, pad = MarianTokenizer(*files, **options), vocab["<pad>"]
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(vocab), pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad, scale_embedding=True,
            activation_function="swish", share_encoder_decoder_embeddings=not separate, **SIZES,
        )
    ).eval()  # fmt: skip
    draw(model, 1, 0.2, 0.8)
    with torch.no_grad():
        model.model.decoder.layers[-1].final_layer_norm.weight.mul_(3)
        model.final_logits_bias.normal_().mul_(0.3)
        model.final_logits_bias[0, pad] = 9.0 if bad_words else 0.0  # what would be said otherwise
    texts = [*TEXTS[:2], ">>deu<< a woman in the park", "men walk 漢 the dog"]
    return saved(folder, model, tokenizer, texts, **({"bad_words_ids": [[pad]]} if bad_words else {}))


def pegasus(folder: Path) -> Saved:
    """Makes a folder with both kinds of tokenizer."""
    write_pieces(folder / "spiece.model", ENGLISH, vocab_size=48, **T5_IDS)
    tokenizer = PegasusTokenizer.from_pretrained(folder)
    model = PegasusForConditionalGeneration(
        PegasusConfig(
            vocab_size=len(tokenizer), scale_embedding=True, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
            activation_function="relu", **SIZES,
        )
    ).eval()  # fmt: skip
    draw(model, 6, 0.3, 0.8)
    with torch.no_grad():
        model.model.decoder.layer_norm.weight.mul_(3)
        model.final_logits_bias[0, 2:106] = -100.0  # what pre-training alone uses
    return saved(folder, model, tokenizer, TEXTS, bad_words_ids=[[0]])


def t5(folder: Path) -> Saved:
    """Makes a folder with both kinds of tokenizer."""
    write_pieces(folder / "spiece.model", ENGLISH, vocab_size=48, **T5_IDS)
    tokenizer = T5Tokenizer.from_pretrained(folder, extra_ids=4)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer) + 5, d_model=32, d_kv=8, num_heads=3, d_ff=48, num_layers=2,
            feed_forward_proj="gated-gelu", relative_attention_max_distance=20, decoder_start_token_id=0,
        )
    ).eval()  # fmt: skip
    draw(model, 4, 0.3, 0.5)
    with torch.no_grad():
        model.decoder.final_layer_norm.weight.mul_(9)
        # Ids that no token has, and the sentinels, would be said otherwise.
        model.shared.weight[-9:] = 0
        model.shared.weight[0] = 0
    return saved(folder, model, tokenizer, TEXTS)


def byte_level(special: list[str], lines: list[str] = ENGLISH) -> Any:
    """Trains a byte-level BPE of the tokenizers library, whose first ids are the special tokens."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(lines, vocab_size=300, special_tokens=special, show_progress=False)
    return trained


def write_pieces(file: Path, lines: list[str], **options: Any) -> Any:
    """Makes a folder with the file of a SentencePiece model, and returns its processor."""
    file.parent.mkdir()
    file.write_bytes(sentencepiece_model(lines, **options))
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


def sentencepiece_model(lines: list[str], **options: Any) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, minloglevel=2, hard_vocab_limit=False, **options
    )
    return written.getvalue()


def draw(model: Any, seed: int, small: float, large: float) -> None:
    """Makes weights of which every one matters: `small` for vectors and embeddings, `large` for other matrices."""
    torch.manual_seed(seed)  # after the model is made: releases of transformers differ in what they draw for it
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if model.config.model_type in ("marian", "pegasus") and "embed_positions" in name:  # sines
                continue
            is_small = parameter.dim() == 1 or "shared" in name or ("embed_tokens" in name)
            is_norm = "norm" in name and "weight" in name
            parameter.copy_(torch.randn_like(parameter) * (small if is_small else large) + (1 if is_norm else 0))


def saved(folder: Path, model: Any, tokenizer: Any, texts: list[str], **search: Any) -> Saved:
    for name, value in search.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Saved(folder, model, tokenizer, texts)


def without(whole: Saved, folder: Path, *names: str) -> Saved:
    """Returns a copy of a folder without some files."""
    shutil.copytree(whole.folder, folder)
    for name in names:
        (folder / name).unlink()
    return whole._replace(folder=folder)


# By the kind of folder.
FOLDERS = {
    "bart": bart,
    "bart-merges": lambda folder: without(bart(folder.with_name("whole")), folder, "tokenizer.json"),
    "marian": marian,
    "marian-separate": lambda folder: marian(folder, separate=True),
    "pegasus": pegasus,
    "pegasus-spiece": lambda folder: without(pegasus(folder.with_name("whole")), folder, "tokenizer.json"),
    "t5": t5,
    "t5-spiece": lambda folder: without(t5(folder.with_name("whole")), folder, "tokenizer.json"),
}
