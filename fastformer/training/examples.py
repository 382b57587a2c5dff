"""From the settings to encoded examples and a tokenizer."""

from __future__ import annotations

import logging
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastformer import console
from fastformer.data import ByteTokenizer, Examples, Tokenizer, load_tokenizer, train_bpe
from fastformer.data.examples import encode_pair, windows
from fastformer.data.number_words import english, german, number_pairs
from fastformer.data.text import read_documents, read_pairs, read_tsv
from fastformer.data.tokenizer import line_pieces
from fastformer.data.tokenizer_files import ForeignTokenizer
from fastformer.training.config import TrainConfig

logger = logging.getLogger("fastformer")

Pairs = list[tuple[str, str]]
_TRAIN_NUMBERS, _VAL_NUMBERS = 20_000, 1000
_ENCODED_AT_ONCE = 4096  # texts: enough for all cores, and often enough for a progress bar


@dataclass
class Data:
    """What a run trains and validates on.

    Attributes:
        tokenizer: for both sides.
        train, val: encoded examples.
        val_texts: the validation pairs as text, for scores; empty for a language model.
        val_characters: of a language model's validation text.
    """

    tokenizer: Tokenizer
    train: Examples
    val: Examples
    val_texts: Pairs
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
    train_texts, val_texts = _pairs(config)
    if tokenizer is None:
        tokenizer = make_tokenizer(config, [text for pair in train_texts for text in pair])
    train, _ = _encode_pairs(tokenizer, train_texts, config.max_len, "training")
    val, val_texts = _encode_pairs(tokenizer, val_texts, config.max_len, "validation")
    return Data(tokenizer, train, val, val_texts)


def _encode_pairs(tokenizer: Tokenizer, pairs: Pairs, max_len: int, what: str) -> tuple[Examples, Pairs]:
    """The examples of at most max_len tokens, and their texts."""
    examples, kept = Examples(), []
    if hasattr(tokenizer, "encode_target"):
        raise ValueError("expected a tokenizer of both sides, got one with another model for the target, as Marian's")
    encoded = encode_all(tokenizer, [text for pair in pairs for text in pair], what)
    for pair, source, target in zip(pairs, encoded, encoded, strict=True):  # one iterator, two steps at a time
        example = encode_pair(source, target, special_ids=tokenizer.special_ids)
        if max(example.lengths) <= max_len:
            examples.append(example.source, example.target)
            kept.append(pair)
    if not examples:
        raise ValueError(f"every {what} example is longer than max_len {max_len}: raise max_len")
    if len(kept) < len(pairs):
        logger.warning("left out %d %s examples of more than max_len %d tokens", len(pairs) - len(kept), what, max_len)
    return examples, kept


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], what: str) -> Iterator[list[int]]:
    """The ids of each text, with a progress bar on a terminal, and what it came to in the log.

    Characters that a foreign tokenizer has no token for are counted, and named in a warning.
    """
    began, tokens = time.perf_counter(), 0
    unknown: Counter[str] = Counter()
    for start in _progress(range(0, len(texts), _ENCODED_AT_ONCE), f"tokenizing {what} text"):
        batch = texts[start : start + _ENCODED_AT_ONCE]
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            if isinstance(tokenizer, ForeignTokenizer):
                unknown.update("".join(tokenizer.unknown(text, ids)))
            tokens += len(ids)
            yield ids
    logger.info(
        "%s text: %s characters in %s tokens (%.1f s)",
        what, f"{sum(map(len, texts)):,}", f"{tokens:,}", time.perf_counter() - began,
    )  # fmt: skip
    if unknown:
        logger.warning(
            "%s characters of %s in the %s text are unknown to the tokenizer, e.g. %s: the model never sees them",
            f"{unknown.total():,}",
            f"{sum(map(len, texts)):,}",
            what,
            " ".join(repr(character) for character, _ in unknown.most_common(5)),
        )


def _progress(starts: range, what: str) -> Iterable[int]:
    """The same numbers, with a bar where there is a terminal, tqdm, and something to wait for."""
    if len(starts) > 1 and console.is_terminal(sys.stderr):
        try:
            from tqdm import tqdm
        except ImportError:
            return starts
        bar: Iterable[int] = tqdm(starts, what, dynamic_ncols=True, leave=False)
        return bar
    return starts


def make_tokenizer(config: TrainConfig, texts: Sequence[str]) -> Tokenizer:
    """The tokenizer that the settings name, trained on the texts if it is to be."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer == "bpe":
        logger.info("learning a BPE of %d tokens", config.vocab_size)
        return train_bpe(texts, config.vocab_size)
    return load_tokenizer(config.tokenizer)


def _pairs(config: TrainConfig) -> tuple[Pairs, Pairs]:
    if config.train_text:
        raise ValueError(f"expected pairs of texts for model {config.model}, got train_text; did you mean gpt?")
    if config.task == "numbers":
        return number_texts(config.seed)
    if config.train_tsv:
        train = read_tsv(config.train_tsv, skip_bad=config.skip_bad_lines)
        if config.val_tsv:
            return train, read_tsv(config.val_tsv, skip_bad=config.skip_bad_lines)
        return _hold_out(train)
    if config.train_source and config.train_target:
        train = read_pairs(config.train_source, config.train_target, skip_bad=config.skip_bad_lines)
        if config.val_source and config.val_target:
            return train, read_pairs(config.val_source, config.val_target, skip_bad=config.skip_bad_lines)
        return _hold_out(train)
    raise ValueError(
        "expected data to train on, got none: give task numbers, or train_source with train_target, or train_tsv "
        "(train_text for model gpt)"
    )


def _hold_out(train: Pairs) -> tuple[Pairs, Pairs]:
    """Without validation data the last hundredth (at most 500 lines) is taken out of the training data."""
    count = min(500, max(1, len(train) // 100))
    if len(train) <= count:
        raise ValueError(f"expected at least 2 training lines, or validation files, got {len(train)}")
    return train[:-count], train[-count:]


def number_texts(seed: int) -> tuple[Pairs, Pairs]:
    """The built-in task: 20,000 training pairs and 1,000 validation pairs of other numbers.

    Those below a hundred are all trained on: nobody can guess what "zero" means.
    """
    small = range(100)
    val = number_pairs(_VAL_NUMBERS, seed=seed + 1_000_000, exclude=set(small))
    train = [*small, *number_pairs(_TRAIN_NUMBERS - len(small), seed=seed, exclude={*small, *val})]
    return [(english(n), german(n)) for n in train], [(english(n), german(n)) for n in val]


def _load_text(config: TrainConfig, tokenizer: Tokenizer | None) -> Data:
    if not config.train_text:
        raise ValueError("expected train_text, a text file or a folder of them, for model gpt, got none")
    train_texts = read_documents(config.train_text, skip_bad=config.skip_bad_lines)
    if config.val_text:
        val_texts = read_documents(config.val_text, skip_bad=config.skip_bad_lines)
    else:
        train_texts, val_texts = _cut_tenth(train_texts, config.train_text)
    if tokenizer is None:
        tokenizer = make_tokenizer(config, [piece for text in train_texts for piece in line_pieces(text)])
    if "\n" not in tokenizer.decode(tokenizer.encode("a\nb")):
        logger.warning("the tokenizer drops line ends, so the model will write none: train a bpe, or use bytes")
    train = windows(_document_ids(tokenizer, train_texts, "training"), config.seqlen)
    val = windows(_document_ids(tokenizer, val_texts, "validation"), config.seqlen)
    return Data(tokenizer, train, val, [], sum(map(len, val_texts)))


def _cut_tenth(documents: list[str], path: str) -> tuple[list[str], list[str]]:
    """Without validation text the last tenth of the characters is taken out of the training text."""
    total = sum(map(len, documents))
    left = total * 9 // 10
    if not 0 < left < total:
        raise ValueError(f"expected a text of many tokens in {path}, or val_text, got {total:,} characters")
    train: list[str] = []
    for place, document in enumerate(documents):
        if len(document) >= left:
            rest = [document[left:], *documents[place + 1 :]]
            return [*train, document[:left]], [text for text in rest if text]
        train.append(document)
        left -= len(document)
    raise AssertionError("the ninth tenth lies within the text")


def _document_ids(tokenizer: Tokenizer, documents: Sequence[str], what: str) -> array[int]:
    """Documents one after another; the first EOS ends each. Line ends are text."""
    pieces = [tokenizer.pieces(document) for document in documents]
    encoded = encode_all(tokenizer, [piece for some in pieces for piece in some], what)
    ids = array("i")
    for some in pieces:
        for _ in some:
            ids.extend(next(encoded))
        ids.append(tokenizer.special_ids.first_eos)
    for _ in encoded:  # its last words are in the log
        raise AssertionError("more ids than pieces")
    return ids
