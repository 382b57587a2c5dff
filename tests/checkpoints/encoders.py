"""Makes folders of encoders as transformers saves them, one for each kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.checkpoints.decoders import save
from tests.checkpoints.families import ENGLISH, byte_level, sentencepiece_model, write_pieces
from tests.checkpoints.present import ENCODERS

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

TEXTS = ["The dog reads a book", "two birds", " a woman in  the park", "Men walk 漢 the dog! Café", "", "the " * 60]
PAIRS = [
    ("the dog", "a book"),
    ("the " * 40, "two birds"),
    ("two", "men walk in the park " * 9),
    ("a " * 50, "b " * 50),
]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "num_labels": 2,
}  # fmt: skip


def words(folder: Path, **options: Any) -> Any:
    """Saves a WordPiece tokenizer of transformers."""
    trained = tokenizers.BertWordPieceTokenizer(**{"lowercase": True, **options})
    trained.train_from_iterator([*ENGLISH, "Café The Men"], vocab_size=200, show_progress=False)
    folder.mkdir()
    trained.save_model(str(folder))
    settings = {"do_lower_case": options.get("lowercase", True)}
    return transformers.BertTokenizerFast.from_pretrained(folder, model_max_length=32, **settings)


def bert(folder: Path) -> None:
    """Makes a folder with WordPiece in a tokenizer.json."""
    tokenizer = words(folder)
    save(folder, transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=len(tokenizer))), tokenizer)


def bert_head(folder: Path) -> None:
    """Makes a folder with only a case-sensitive vocab.txt, and a head."""
    tokenizer = words(folder, lowercase=False)
    config = transformers.BertConfig(**SIZES, vocab_size=len(tokenizer) + 3)
    vocab = (folder / "vocab.txt").read_bytes()
    save(folder, transformers.BertForSequenceClassification(config), tokenizer)
    (folder / "vocab.txt").write_bytes(vocab)
    (folder / "tokenizer.json").unlink()
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "do_lower_case": False}))


def roberta(folder: Path) -> None:
    """Makes a folder with a byte-level BPE as vocab.json and merges.txt only, and a head."""
    folder.mkdir()
    byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]).save_model(str(folder))
    vocab, merges = ((folder / name).read_bytes() for name in ("vocab.json", "merges.txt"))
    tokenizer = transformers.RobertaTokenizer.from_pretrained(folder)
    config = transformers.RobertaConfig(**SIZES, vocab_size=len(tokenizer), type_vocab_size=1)
    save(folder, transformers.RobertaForSequenceClassification(config), tokenizer)
    (folder / "vocab.json").write_bytes(vocab)
    (folder / "merges.txt").write_bytes(merges)
    (folder / "tokenizer.json").unlink()


def xlm_roberta(folder: Path) -> None:
    """Makes a folder with Unigram in a tokenizer.json."""
    write_pieces(folder / "sentencepiece.bpe.model", ENGLISH)
    tokenizer = transformers.XLMRobertaTokenizer.from_pretrained(folder)
    config = transformers.XLMRobertaConfig(**SIZES, vocab_size=len(tokenizer), type_vocab_size=1)
    save(folder, transformers.XLMRobertaModel(config), tokenizer)


def pieces(folder: Path) -> None:
    """Makes a folder with only a SentencePiece model."""
    xlm_roberta(folder)
    (folder / "sentencepiece.bpe.model").write_bytes(sentencepiece_model(ENGLISH))
    (folder / "tokenizer.json").unlink()


def distilbert(folder: Path) -> None:
    """Makes a folder with WordPiece without token types, and a head."""
    tokenizer = words(folder)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40}
    config = transformers.DistilBertConfig(**sizes, vocab_size=len(tokenizer))
    vocab = {token: i for token, i in tokenizer.get_vocab().items()}
    own = transformers.DistilBertTokenizerFast.from_pretrained(folder, model_max_length=32)
    assert own.get_vocab() == vocab
    save(folder, transformers.DistilBertForSequenceClassification(config), own)


def mpnet(folder: Path) -> None:
    """Makes a folder with a vocab.txt that has RoBERTa's special tokens."""
    tokenizer = words(folder)
    listed = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    kept = [token for token in listed if not token.startswith("[")]
    lines = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", *kept, "<mask>"]
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for file in folder.glob("*.json"):
        file.unlink()
    own = transformers.MPNetTokenizerFast.from_pretrained(folder)
    config = transformers.MPNetConfig(**SIZES, vocab_size=len(own))
    vocab = (folder / "vocab.txt").read_bytes()
    save(folder, transformers.MPNetModel(config), own)
    (folder / "vocab.txt").write_bytes(vocab)


def albert(folder: Path) -> None:
    """Makes a folder with Unigram that lower-cases, of layers that share their weights."""
    write_pieces(folder / "spiece.model", ENGLISH, pad_id=0, unk_id=1, bos_id=2, eos_id=3, pad_piece="<pad>",
                 bos_piece="[CLS]", eos_piece="[SEP]", control_symbols="[MASK]")  # fmt: skip
    tokenizer = transformers.AlbertTokenizer.from_pretrained(folder)
    (folder / "spiece.model").unlink()
    config = transformers.AlbertConfig(**SIZES, vocab_size=len(tokenizer), embedding_size=24)
    save(folder, transformers.AlbertForSequenceClassification(config), tokenizer)


def modernbert(folder: Path) -> None:
    """Makes a folder with a byte-level BPE that has BERT's special tokens, and a head."""
    backend = byte_level(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"])._tokenizer
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
        mask_token="[MASK]", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    ids = {"pad_token_id": 3, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.ModernBertConfig(**SIZES, **ids, vocab_size=len(tokenizer), local_attention=6)
    save(folder, transformers.ModernBertForSequenceClassification(config), tokenizer)


def nomic(folder: Path) -> None:
    """Makes a folder with a BERT's WordPiece, whose files name the tensors as the original code did, and a head."""
    tokenizer = words(folder)
    config = transformers.NomicBertConfig(**SIZES, vocab_size=len(tokenizer))
    save(folder, transformers.NomicBertForSequenceClassification(config), tokenizer)


def gte(folder: Path) -> None:
    """Makes a folder with an XLM-RoBERTa's Unigram, and files like Nomic's."""
    write_pieces(folder / "sentencepiece.bpe.model", ENGLISH)
    tokenizer = transformers.XLMRobertaTokenizer.from_pretrained(folder)
    config = transformers.GteConfig(**SIZES, vocab_size=len(tokenizer))
    save(folder, transformers.GteModel(config), tokenizer)


def eurobert(folder: Path) -> None:
    """Makes a folder with a byte-level BPE whose texts end with PAD, and a head."""
    backend = byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"])._tokenizer
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|end_of_text|>",
        pair="<|begin_of_text|> $A <|end_of_text|> $B <|end_of_text|>",
        special_tokens=[("<|begin_of_text|>", 0), ("<|end_of_text|>", 1)],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", mask_token="<|mask|>",
        **dict.fromkeys(("eos_token", "pad_token"), "<|end_of_text|>"),
    )  # fmt: skip
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "mask_token_id": 2}
    config = transformers.EuroBertConfig(**SIZES, **ids, vocab_size=len(tokenizer), num_key_value_heads=2)
    save(folder, transformers.EuroBertForSequenceClassification(config), tokenizer)


FOLDERS: dict[str, Callable[[Path], None]] = {
    "bert": bert, "bert head": bert_head, "roberta": roberta, "xlm-roberta": xlm_roberta, "xlm-roberta pieces": pieces,
    "distilbert": distilbert, "mpnet": mpnet, "albert": albert, "modernbert": modernbert,
    "bert nomic": nomic, **({"gte": gte} if "gte" in ENCODERS else {}), "eurobert": eurobert,
}  # fmt: skip
