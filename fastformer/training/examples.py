"""Loads the data that the settings name as encoded examples and a tokenizer."""

from __future__ import annotations

import json
import logging
import random
import time
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fastformer import console
from fastformer.data import ByteTokenizer, Examples, PairTokenizer, Tokenizer, load_tokenizer, train_bpe
from fastformer.data.backend import NUM_BYTES
from fastformer.data.bpe import LEARNING, Spaces
from fastformer.data.cuts import pieces as pieces_of
from fastformer.data.examples import Example, encode_pair, windows
from fastformer.data.held_out import different_from, first_ones, keys_of, lowest_keys, number_held_out
from fastformer.data.pair import sides
from fastformer.data.shards.manifest import Manifest
from fastformer.data.shards.reading import ShardedExamples, read_examples
from fastformer.data.text import NothingError, read_documents, read_pairs, read_tsv
from fastformer.data.tokenizer_files import count_unknown
from fastformer.number_words import english, german, number_pairs
from fastformer.training.config import TrainConfig, paths_of, split_at_commas
from fastformer.training.sections import WORDS

logger = logging.getLogger("fastformer")

Pairs = list[tuple[str, str]]
Part = TypeVar("Part")
_TRAIN_NUMBERS, _VAL_NUMBERS = 20_000, 1000
ENCODED_AT_ONCE = 4096  # texts at a time: enough for all cores, and few enough for a progress bar to move


@dataclass
class TrainingData:
    """The data that a run trains and validates on.

    Attributes:
        tokenizer: the tokenizer of both sides, or a `PairTokenizer`.
        train: encoded examples, in memory or in shards.
        val: the same for validation, in memory.
        val_texts: the validation pairs as text, for scores; empty for a language model.
        weights: (examples,) fp32: how often an epoch contains each training example; None: once, or as the shards say.
        val_characters: the number of characters of a language model's validation text.
    """

    tokenizer: Tokenizer
    train: Examples | ShardedExamples
    val: Examples
    val_texts: Pairs
    weights: Tensor | None = None
    val_characters: int = 0


def load_data(config: TrainConfig, tokenizer: Tokenizer | None = None) -> TrainingData:
    """Reads, filters, splits and tokenizes the data that the settings name.

    Args:
        config: the settings.
        tokenizer: of the run that resumes; None: the one that the settings name.

    Raises:
        ValueError: no data named, or a file that is missing, empty, misaligned or not UTF-8.
    """
    if config.train_data:
        return _load_shards(config, tokenizer)
    if config.model == "gpt":
        return _load_text(config, tokenizer)
    corpora, val_texts = _pairs(config)
    train_texts = [pair for corpus in corpora for pair in corpus]
    if tokenizer is None:
        tokenizer = tokenizer_of(config, train_texts)
    train, places = _encode_pairs(tokenizer, train_texts, config.max_len, "training")
    val, fitting = _encode_pairs(tokenizer, val_texts, config.max_len, "validation")
    if config.drop_duplicates:
        train, places = _kept(train, places, first_ones(keys_of(train)), "that repeat others, by their tokens")
    if not (config.task or config.val_tsv or config.val_source):
        train, places = _kept(train, places, different_from(train, val), "that equal held-out ones")
    weights = _weights(config, map(len, corpora))
    return TrainingData(
        tokenizer, train, val, [val_texts[place] for place in fitting], None if weights is None else weights[places]
    )


def _load_shards(config: TrainConfig, tokenizer: Tokenizer | None) -> TrainingData:
    """Opens the shards that `fastformer prepare` made; they are read when they are needed."""
    assert config.train_data is not None
    folder = Path(config.train_data)
    manifest = Manifest.load(folder)
    kind = "text" if config.model == "gpt" else "pairs"
    if manifest.kind != kind:
        raise ValueError(f"expected {kind} for model {config.model}, but {folder} holds {manifest.kind}")
    name, most = ("seqlen", config.seqlen) if kind == "text" else ("max_len", config.max_len)
    if manifest.longest > most:
        raise ValueError(
            f"expected {name} of at least the {manifest.longest} tokens that the longest example in {folder} has, got "
            f"{most}: give --{name} {manifest.settings.get(name, manifest.longest)}"
        )
    own = load_tokenizer(folder)
    manifest.check_tokenizer(own, f"that of {folder}")
    sizes = sides(own)[0].vocab_size, own.vocab_size
    weights = config.weights() or None
    examples = ShardedExamples(folder, window=config.shards_at_once, weights=weights, vocab_sizes=sizes)
    if tokenizer is not None:
        manifest.check_tokenizer(tokenizer, "that of the run")
    elif config.tokenizer not in WORDS:
        manifest.check_tokenizer(tokenizer_of(config, []), f"that of {config.tokenizer}")
    manifest.validation.check_content(folder)
    texts: Pairs = []
    if manifest.validation_texts is not None:
        manifest.validation_texts.check_content(folder)
        texts = _pairs_of(folder / manifest.validation_texts.file)
    val = read_examples(folder / manifest.validation.file, sizes)
    if not val or (texts and len(texts) != len(val)) or (val.num_tokens[0] == 0) != (kind == "text"):
        raise ValueError(f"expected {kind} in {folder / manifest.validation.file}, got others: prepare the data again")
    return TrainingData(own, examples, val, texts, None, manifest.validation_characters)


def _pairs_of(path: Path) -> Pairs:
    """Reads pairs from a file of JSON lines that `prepare` wrote."""
    try:
        pairs = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): prepare the data again") from error
    if not all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(s, str) for s in pair) for pair in pairs):
        raise ValueError(f"expected two texts on each line of {path}, got others: prepare the data again")
    return [(source, target) for source, target in pairs]


def read_validation(config: TrainConfig) -> tuple[list[str], Pairs]:
    """Reads the validation data that the settings name: the documents of a text, or pairs; none of both: no data."""
    documents = _read_documents(config, config.val_text) if config.val_text else []
    return [text for some in documents for text in some], [pair for some in _read_pairs(config, "val") for pair in some]


def validation_data(
    config: TrainConfig, tokenizer: Tokenizer, documents: Sequence[str], pairs: Pairs
) -> tuple[Examples, Pairs, int]:
    """Encodes what `read_validation` returned: examples, and their pairs or a text's number of characters."""
    if documents:
        ids = _document_ids(tokenizer, documents, "validation")
        return windows(ids, config.seqlen), [], sum(map(len, documents))
    examples, fitting = _encode_pairs(tokenizer, pairs, config.max_len, "validation")
    return examples, [pairs[place] for place in fitting], 0


def _kept(examples: Examples, places: list[int], remaining: list[int], which: str) -> tuple[Examples, list[int]]:
    """Returns the training examples that are remaining, and their places; the log counts the others.

    Raises:
        ValueError: none is kept.
    """
    if not remaining:
        raise ValueError(f"expected other training examples than those {which}, got none: give validation files")
    if len(remaining) < len(examples):
        logger.info("left out %s training examples %s", f"{len(examples) - len(remaining):,}", which)
        examples, places = examples.take(remaining), [places[i] for i in remaining]
    return examples, places


def _weights(config: TrainConfig, sizes: Iterable[int]) -> Tensor | None:
    """Computes how often an epoch contains each example from the weights and sizes of the corpora; None: each once."""
    weights = config.weights()
    if not weights or config.task:
        return None
    return torch.cat([torch.full((size,), weight) for weight, size in zip(weights, sizes, strict=True)])


def _encode_pairs(tokenizer: Tokenizer, pairs: Pairs, max_len: int, what: str) -> tuple[Examples, list[int]]:
    """Encodes pairs; returns the examples of at most max_len tokens and the indices of their pairs."""
    examples, fitting = Examples(), []
    of_source, of_target = sides(tokenizer)
    if of_source is not of_target:
        sources = encode_all(of_source, [source for source, _ in pairs], f"{what} source")
        targets = encode_all(of_target, [target for _, target in pairs], f"{what} target")
    else:  # one iterator, two steps at a time
        sources = targets = encode_all(tokenizer, [text for pair in pairs for text in pair], what)
    for place, (source, target) in enumerate(zip(sources, targets, strict=True)):
        example = encode_pair(source, target, special_ids=tokenizer.special_ids)
        if max(example.lengths) <= max_len:
            examples.append(example.source, example.target)
            fitting.append(place)
    if not examples:
        raise ValueError(f"every {what} example is longer than max_len {max_len}: raise max_len")
    if len(fitting) < len(pairs):
        logger.warning(
            "left out %d %s examples of more than max_len %d tokens", len(pairs) - len(fitting), what, max_len
        )
    return examples, fitting


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], what: str) -> Iterator[list[int]]:
    """Encodes texts with a progress bar on a terminal, and logs the totals.

    Characters that a foreign tokenizer has no token for are counted, and named in a warning.
    """
    began, tokens = time.perf_counter(), 0
    unknown: Counter[str] = Counter()
    starts = range(0, len(texts), ENCODED_AT_ONCE)
    title = f"tokenizing {what} text"
    bar = console.progress_bar(is_shown=len(starts) > 1, iterable=starts, desc=title, dynamic_ncols=True, leave=False)
    for start in starts if bar is None else bar:
        batch = texts[start : start + ENCODED_AT_ONCE]
        encoded = tokenizer.encode_batch(batch)
        unknown += count_unknown(tokenizer, batch, encoded)
        for ids in encoded:
            tokens += len(ids)
            yield ids
    logger.info(
        "%s text: %s characters in %s tokens (%.1f s)",
        what, f"{sum(map(len, texts)):,}", f"{tokens:,}", time.perf_counter() - began,
    )  # fmt: skip
    warn_of_unknown(unknown, sum(map(len, texts)), what)


def warn_of_unknown(unknown: Counter[str], characters: int, what: str) -> None:
    """Logs the characters that a tokenizer has no token for, if there are any among those of a text."""
    if unknown:
        logger.warning(
            "%s characters of %s in the %s text are unknown to the tokenizer, e.g. %s: the model never sees them",
            f"{unknown.total():,}",
            f"{characters:,}",
            what,
            " ".join(repr(character) for character, _ in unknown.most_common(5)),
        )


def warn_of_line_ends(tokenizer: Tokenizer) -> None:
    """Logs that a language model will write no line ends, if its tokenizer drops them."""
    if "\n" not in tokenizer.decode(tokenizer.encode("a\nb")):
        logger.warning("the tokenizer drops line ends, so the model will write none: train a bpe, or use bytes")


def tokenizer_of(config: TrainConfig, pairs: Pairs) -> Tokenizer:
    """Makes the tokenizer of a translator, trained on the training pairs if the settings ask for it."""
    if config.shared_vocab:
        return make_tokenizer(config, [text for pair in pairs for text in pair])
    if config.tokenizer in WORDS:
        sides = ([source for source, _ in pairs], [target for _, target in pairs])
        return PairTokenizer(*(make_tokenizer(config, side) for side in sides))
    tokenizers = [load_tokenizer(path) for path in paths_of(config.tokenizer)]
    if len(tokenizers) == 1 and isinstance(tokenizers[0], PairTokenizer):
        return tokenizers[0]
    if len(tokenizers) != 2:
        raise ValueError(f"expected the paths of two tokenizers for shared_vocab false, got {config.tokenizer!r}")
    return PairTokenizer(*tokenizers)


def make_tokenizer(config: TrainConfig, texts: Sequence[str]) -> Tokenizer:
    """Makes the tokenizer that the settings name, trained on the texts if the settings ask for it."""
    user_tokens = split_at_commas(config.user_tokens)
    if config.tokenizer == "bytes":
        return ByteTokenizer(user_tokens, drop_user_tokens=config.drop_user_tokens)
    if config.tokenizer == "bpe":
        logger.info("learning a BPE of %d tokens", config.vocab_size)
        spaces: Spaces = "keep" if config.model == "gpt" else "collapse"
        tokenizer = train_bpe(
            texts,
            config.vocab_size,
            normalization=config.normalization,
            spaces=spaces if config.spaces == "auto" else config.spaces,
            max_token_length=config.max_token_length,
            user_tokens=user_tokens,
            drop_user_tokens=config.drop_user_tokens,
        )
        learned = tokenizer.vocab_size - NUM_BYTES
        if learned < config.vocab_size:
            logger.info("the training text has no more than %d of them", learned)
        return tokenizer
    loaded = load_tokenizer(config.tokenizer)
    if isinstance(loaded, PairTokenizer):
        raise ValueError(f"{config.tokenizer} has a vocabulary for each side: expected shared_vocab false")
    return loaded


def _pairs(config: TrainConfig) -> tuple[list[Pairs], Pairs]:
    """Reads the training pairs of each corpus and the validation pairs."""
    if config.train_text:
        raise ValueError(f"expected pairs of texts for model {config.model}, got train_text; did you mean gpt?")
    if config.task == "numbers":
        train, val = number_texts(config.seed)
        return [train], val
    corpora = _filtered(config, _read_pairs(config, "train"))
    if not corpora:
        raise ValueError(
            "expected data to train on, got none: give task numbers, or train_source with train_target, or train_tsv "
            "(train_text for model gpt), or train_data with a folder that fastformer prepare made"
        )
    val = read_validation(config)[1]
    return (corpora, val) if val else _hold_out(config, corpora)


def _read_pairs(config: TrainConfig, part: str) -> list[Pairs]:
    """Reads the pairs of each corpus; `part` is "train" or "val"."""
    source, target, tsv = (getattr(config, f"{part}_{name}") for name in ("source", "target", "tsv"))
    if tsv:
        return _read_each(config, read_tsv, [(path,) for path in paths_of(tsv)])
    if source and target:
        return _read_each(config, read_pairs, list(zip(paths_of(source), paths_of(target), strict=True)))
    return []


def _read_documents(config: TrainConfig, paths: str) -> list[list[str]]:
    """Reads the documents of each corpus of a language model."""
    return _read_each(config, read_documents, [(path,) for path in paths_of(paths)])


def _read_each(
    config: TrainConfig, read: Callable[..., list[Part]], paths: Sequence[tuple[str, ...]]
) -> list[list[Part]]:
    """Reads the corpora at some paths; one of several may have no good line, if bad lines are skipped."""
    corpora: list[list[Part]] = []
    for some in paths:
        try:
            corpora.append(read(*some, skip_bad=config.skip_bad_lines))
        except NothingError as error:
            is_last = len(corpora) == len(paths) - 1
            if not error.lines or (is_last and not any(corpora)):
                raise
            logger.warning("%s", error)
            corpora.append([])
    return corpora


def _filtered(config: TrainConfig, corpora: list[Pairs]) -> list[Pairs]:
    """Returns the pairs that pass the filters; the log counts the other ones by reason."""
    wanted = config.pair_filter()
    if not wanted:
        return corpora
    remaining, left_out = wanted.apply(corpora)
    total = sum(map(len, corpora))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    if corpora and not any(remaining):
        raise ValueError(f"the filters leave out all {total:,} training pairs: {reasons}")
    logger.info(
        "filters left out %s of %s training pairs%s",
        f"{left_out.total():,}",
        f"{total:,}",
        f": {reasons}" if reasons else "",
    )
    return remaining


def _hold_out(config: TrainConfig, corpora: list[Pairs]) -> tuple[list[Pairs], Pairs]:
    """Moves a hundredth of each corpus (at most 500 lines in all) from the training data to missing validation data.

    Lines that differ by their spaces or by upper case alone count as copies. A copy of a held-out line goes with it,
    into neither part. The choice of the lines depends on the seed and on the numbers of lines, so a run that resumes
    makes the same choice.
    """
    total = sum(map(len, corpora))
    if total < 2:
        raise ValueError(f"expected at least 2 training lines, or validation files, got {total}")
    keys = [[_folded(pair) for pair in corpus] for corpus in corpora]
    different = len(set().union(*keys))
    most = number_held_out(total, max(1, different // 10) if different < total else total, different)
    held_out: dict[int, tuple[str, str]] = {}
    before = 0
    for corpus, corpus_keys in zip(corpora, keys, strict=True):
        count = most * (before + len(corpus)) // total - most * before // total
        before += len(corpus)
        chosen = _drawn(corpus_keys, count, config.seed if config.held_out == "random" else None, held_out)
        held_out |= {corpus_keys[place]: corpus[place] for place in chosen}
    train = [
        [pair for pair, key in zip(corpus, corpus_keys, strict=True) if key not in held_out]
        for corpus, corpus_keys in zip(corpora, keys, strict=True)
    ]
    how = f"drawn at random by seed {config.seed}" if config.held_out == "random" else "the last ones"
    logger.info("held out %s of %s training pairs for validation: %s", f"{len(held_out):,}", f"{total:,}", how)
    copies = total - len(held_out) - sum(map(len, train))
    if copies:
        logger.info("left out %s copies of held-out pairs", f"{copies:,}")
    return train, [*held_out.values()]


def _folded(pair: tuple[str, str]) -> int:
    """Returns a number that copies of a pair have in common."""
    return hash(tuple(" ".join(unicodedata.normalize("NFKC", side).casefold().split()) for side in pair))


def _drawn(keys: Sequence[int], count: int, seed: int | None, taken: Container[int]) -> list[int]:
    """Draws the places of some different keys that aren't taken, or finds the last ones, if there are as many.

    Python's generator draws these numbers in every version.
    """
    left = {key for key in keys if key not in taken}
    count, chooser, places = min(count, len(left)), random.Random(seed), list[int]()
    at = len(keys)
    while len(places) < count:
        at = at - 1 if seed is None else int(chooser.random() * len(keys))
        if keys[at] in left:
            left.remove(keys[at])
            places.append(at)
    return sorted(places)


def number_texts(seed: int) -> tuple[Pairs, Pairs]:
    """Makes the pairs of the built-in task: 20,000 for training and 1,000, of other numbers, for validation.

    All numbers below a hundred are training data, because a model can't guess the meaning of a word such as "zero".
    """
    small = range(100)
    val = number_pairs(_VAL_NUMBERS, seed=seed + 1_000_000, exclude=set(small))
    train = [*small, *number_pairs(_TRAIN_NUMBERS - len(small), seed=seed, exclude={*small, *val})]
    return [(english(n), german(n)) for n in train], [(english(n), german(n)) for n in val]


def _load_text(config: TrainConfig, tokenizer: Tokenizer | None) -> TrainingData:
    if not config.train_text:
        raise ValueError("expected train_text, a text file or a folder of them, for model gpt, got none")
    corpora = _read_documents(config, config.train_text)
    val_texts = read_validation(config)[0]
    if not val_texts:
        each = zip(corpora, paths_of(config.train_text), strict=True)
        cut = [_cut_tenth(texts, path) if texts else ([], []) for texts, path in each]
        corpora, val_texts = [left for left, _ in cut], [text for _, held_out in cut for text in held_out]
        total, held_out = (sum(map(len, texts)) for texts in ([t for left in corpora for t in left], val_texts))
        logger.info(
            "held out %s of %s characters for validation: the last ones", f"{held_out:,}", f"{total + held_out:,}"
        )
    if tokenizer is None:
        pieces = [piece for texts in corpora for text in texts for piece in pieces_of(text, LEARNING)]
        tokenizer = make_tokenizer(config, pieces)
    warn_of_line_ends(tokenizer)
    train, sizes = Examples(), []
    for texts in corpora:
        examples = windows(_document_ids(tokenizer, texts, "training"), config.seqlen)
        sizes.append(len(examples))
        train.extend(examples)
    val, weights = windows(_document_ids(tokenizer, val_texts, "validation"), config.seqlen), _weights(config, sizes)
    characters = sum(map(len, val_texts))
    if config.val_text:
        return TrainingData(tokenizer, train, val, [], weights, characters)
    return _without_copies(TrainingData(tokenizer, train, val, [], weights, characters), config.seed)


def _without_copies(data: TrainingData, seed: int) -> TrainingData:
    """Leaves the windows out of held-out text that are training examples, too.

    If all are, because the text repeats itself, some of the different windows are held out instead.
    """
    assert isinstance(data.train, Examples)
    train, weights, remaining = data.train, data.weights, different_from(data.val, data.train)
    if len(remaining) == len(data.val):
        return data
    logger.info("left out %s held-out windows that the training text has, too", f"{len(data.val) - len(remaining):,}")
    val = data.val.take(remaining)
    if not remaining:
        keys = keys_of(train, seed)
        held_out = lowest_keys(keys, len(keys))
        val = train.take(keys.index(key) for key in sorted(held_out))
        places = [place for place, key in enumerate(keys) if key not in held_out]
        train, weights = train.take(places), None if weights is None else weights[places]
        logger.info("held out %s windows, because the last tenth of the text repeats the rest", f"{len(val):,}")
    return TrainingData(data.tokenizer, train, val, [], weights, characters_of(val, data.tokenizer))


def characters_of(examples: Iterable[Example], tokenizer: Tokenizer) -> int:
    """Counts the characters that windows of a text predict."""
    return sum(len(tokenizer.decode(example.target[1:])) for example in examples)


def _cut_tenth(documents: list[str], path: str) -> tuple[list[str], list[str]]:
    """Moves the last tenth of the training text's characters to missing validation text."""
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
    """Encodes documents one after another; each ends with the first of the EOS ids. Line ends are text."""
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
