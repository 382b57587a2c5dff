"""Runs that decode together must have the same tokenizer, by its contents."""

from __future__ import annotations

import pytest

from fastformer.checkpoints import load_models
from fastformer.data import ByteTokenizer, Tokenizer, train_bpe
from fastformer.models import Transformer


def test_tokenizers_are_compared_by_their_contents(tmp_path) -> None:
    texts = ["the old man", "an old hat", "the cat"]
    tokenizers: dict[str, Tokenizer] = {
        "a": train_bpe(texts, 24),
        "same": train_bpe(texts[::-1], 24),
        "other": train_bpe(["der alte Hut", "ein altes Tor", "die Katze"], 24),
        "bytes": ByteTokenizer(),
    }
    assert tokenizers["other"].vocab_size == tokenizers["a"].vocab_size
    for name, tokenizer in tokenizers.items():
        sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 16, "num_heads": 2, "d_ff": 16}
        Transformer.from_preset("tiny", **sizes).save_pretrained(tmp_path / name, tokenizer)
    models, tokenizer = load_models([tmp_path / "a", str(tmp_path / "same"), tmp_path / "a"])
    assert len(models) == 3 and tokenizer.encode("the cat") == tokenizers["a"].encode("the cat")
    for name, found in (("other", "another one"), ("bytes", "one of 259 ids")):
        with pytest.raises(ValueError, match=rf"\b{name}\b.*\b{found}\b"):
            load_models([tmp_path / "a", tmp_path / name])
    with pytest.raises(ValueError, match=r"\bfolder\b"):
        load_models([])
