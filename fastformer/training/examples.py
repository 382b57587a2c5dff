"""From the settings to encoded examples and a tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fastformer.data import BPETokenizer, ByteTokenizer, Example, Tokenizer, load_tokenizer, train_bpe
from fastformer.data.batching import encode_pair, windows
from fastformer.data.number_words import english, german, number_pairs
from fastformer.data.text import read_pairs, read_text, read_tsv
from fastformer.data.tokenizer import EOS_ID
from fastformer.training.config import TrainConfig

logger = logging.getLogger("fastformer")

Pairs = list[tuple[str, str]]
_TRAIN_NUMBERS, _VAL_NUMBERS = 20_000, 1000


@dataclass
class Data:
    """What a run trains and validates on.

    Attributes:
        tokenizer: for both sides.
        train, val: encoded examples.
        val_texts: the validation pairs as text, for scores; empty for a language model.
        dropped: training examples longer than max_len.
        val_characters: of a language model's validation text.
    """

    tokenizer: Tokenizer
    train: list[Example]
    val: list[Example]
    val_texts: Pairs
    dropped: int
    val_characters: int = 0


def load_data(config: TrainConfig, tokenizer: Tokenizer | None = None) -> Data:
    """Reads, tokenizes and splits what the settings name.

    Args:
        config: the settings.
        tokenizer: of the run that goes on; None: as the settings say.

    Raises:
        ValueError: no data named, or a file that is missing, empty, misaligned or no UTF-8.
    """
    if config.model == "gpt":
        return _load_text(config, tokenizer)
    train, val = _pairs(config)
    if tokenizer is None:
        tokenizer = make_tokenizer(config, [text for pair in train for text in pair])
    encoded = [encode_pair(tokenizer.encode(source), tokenizer.encode(target)) for source, target in train]
    kept = [e for e in encoded if max(len(e.source), len(e.target)) <= config.max_len]
    if not kept:
        raise ValueError(f"every training example is longer than max_len {config.max_len}: raise max_len")
    if len(kept) < len(encoded):
        logger.warning("left out %d examples of more than max_len %d tokens", len(encoded) - len(kept), config.max_len)
    val_examples, val_texts = [], []
    for source, target in val:
        example = encode_pair(tokenizer.encode(source), tokenizer.encode(target))
        if max(len(example.source), len(example.target)) <= config.max_len:
            val_examples.append(example)
            val_texts.append((source, target))
    if not val_examples:
        raise ValueError(f"every validation example is longer than max_len {config.max_len}: raise max_len")
    return Data(tokenizer, kept, val_examples, val_texts, len(encoded) - len(kept))


def make_tokenizer(config: TrainConfig, texts: list[str]) -> Tokenizer:
    """The tokenizer that the settings name, trained on the texts if it is to be."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer == "bpe":
        return train_bpe(texts, config.vocab_size)
    return load_tokenizer(config.tokenizer)


def _pairs(config: TrainConfig) -> tuple[Pairs, Pairs]:
    for one, other in (("train_source", "train_target"), ("val_source", "val_target")):
        given = [name for name in (one, other) if getattr(config, name)]
        if len(given) == 1:
            raise ValueError(f"expected {one} and {other} together, got {given[0]} alone")
    if config.train_text:
        raise ValueError(f"expected pairs of texts for model {config.model}, got train_text; did you mean gpt?")
    if config.task == "numbers":
        return number_texts(config.seed)
    if config.train_tsv:
        train = read_tsv(config.train_tsv)
        return train, read_tsv(config.val_tsv) if config.val_tsv else _hold_out(train)
    if config.train_source and config.train_target:
        train = read_pairs(config.train_source, config.train_target)
        if config.val_source and config.val_target:
            return train, read_pairs(config.val_source, config.val_target)
        return train, _hold_out(train)
    raise ValueError(
        "expected data to train on, got none: give task numbers, or train_source with train_target, or train_tsv "
        "(train_text for model gpt)"
    )


def _hold_out(train: Pairs) -> Pairs:
    """Without validation data the last hundredth (at most 500 lines) is taken out of the training data."""
    count = min(500, max(1, len(train) // 100))
    if len(train) <= count:
        raise ValueError(f"expected at least 2 training lines, or validation files, got {len(train)}")
    val = train[-count:]
    del train[-count:]
    return val


def number_texts(seed: int) -> tuple[Pairs, Pairs]:
    """The built-in task: 20,000 training pairs and 1,000 validation pairs of other numbers."""
    val = number_pairs(_VAL_NUMBERS, seed=seed + 1_000_000)
    train = number_pairs(_TRAIN_NUMBERS, seed=seed, exclude=set(val))
    return [(english(n), german(n)) for n in train], [(english(n), german(n)) for n in val]


def _load_text(config: TrainConfig, tokenizer: Tokenizer | None) -> Data:
    if not config.train_text:
        raise ValueError("expected train_text, a text file, for model gpt, got none")
    text = read_text(config.train_text)
    if config.val_text:
        val_text = read_text(config.val_text)
    else:
        cut = len(text) * 9 // 10
        text, val_text = text[:cut], text[cut:]
    if tokenizer is None:
        tokenizer = make_tokenizer(config, text.splitlines())
    train, val = (windows(_text_ids(tokenizer, part), config.seqlen) for part in (text, val_text))
    if not train or not val:
        raise ValueError(f"expected a text of many tokens in {config.train_text}, got {len(text):,} characters")
    return Data(tokenizer, train, val, [], 0, len(val_text))


def _text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text as ids. A BPE has no line ends: EOS stands for them."""
    if not isinstance(tokenizer, BPETokenizer):
        return tokenizer.encode(text)
    return [i for line in text.splitlines() for i in (*tokenizer.encode(line), EOS_ID)]
