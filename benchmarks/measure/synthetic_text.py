"""Makes any number of pairs of made-up sentences, with words as frequent as in a language."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy

_WORDS = 20_000
_PAIRS_AT_ONCE = 50_000
_SYLLABLES = [a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou")]


def _vocabulary(seed: int) -> list[str]:
    """Words of two to four syllables, shorter ones first, since the frequent words of a language are short."""
    chooser, words = random.Random(seed), dict[str, None]()
    while len(words) < _WORDS:
        longer = min(2, len(words) // 1000)  # there are 4,225 words of two syllables
        words["".join(chooser.choices(_SYLLABLES, k=2 + chooser.randint(0, longer)))] = None
    return list(words)


def write_pairs(path: Path, pairs: int, *, seed: int = 0, shortest: int = 3, longest: int = 9) -> Path:
    """Writes lines of `source<TAB>target`. The n-th word is drawn with a probability of about 1 / n (Zipf's law).

    Args:
        path: the file to write.
        pairs: the number of lines.
        seed: the seed of words and sentences.
        shortest, longest: the least and the greatest number of words of a side.

    Returns:
        The path.
    """
    sides = [numpy.array(_vocabulary(2 * seed + side), dtype=object) for side in (0, 1)]
    chooser = numpy.random.default_rng(seed)
    up_to = numpy.cumsum(1 / numpy.arange(1, _WORDS + 1))
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, pairs, _PAIRS_AT_ONCE):
            count = min(_PAIRS_AT_ONCE, pairs - start)
            columns = []
            for words in sides:
                lengths = chooser.integers(shortest, longest + 1, count)
                drawn = numpy.searchsorted(up_to, chooser.random(int(lengths.sum())) * up_to[-1])
                texts = iter(words[drawn].tolist())
                columns.append([" ".join(itertools.islice(texts, length)) for length in lengths.tolist()])
            file.writelines(f"{source}\t{target}\n" for source, target in zip(*columns, strict=True))
    return path
