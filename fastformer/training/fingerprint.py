"""What examples a run trains on, in few bytes: enough to notice other data, edited lines, or another order."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import chain, islice

from fastformer.data import Example

_BLOCK = 100_000  # examples whose ids are in memory a second time


def fingerprint(examples: Sequence[Example]) -> dict[str, int | str]:
    """The examples' number, the tokens of both sides, and a SHA-256 of all ids in order."""
    digest = hashlib.sha256()
    source_tokens = target_tokens = 0
    iterator = iter(examples)
    while block := list(islice(iterator, _BLOCK)):
        for side in ([example.source for example in block], [example.target for example in block]):
            lengths, ids = array("q", map(len, side)), array("q", chain.from_iterable(side))
            digest.update(lengths.tobytes())  # or a token could change sides unnoticed
            digest.update(ids.tobytes())
        source_tokens += sum(len(example.source) for example in block)
        target_tokens += sum(len(example.target) for example in block)
    return {
        "examples": len(examples),
        "source_tokens": source_tokens,
        "target_tokens": target_tokens,
        "sha256": digest.hexdigest(),
    }


def describe(found: dict[str, int | str]) -> str:
    """ "20,000 examples of 180,000 and 120,000 tokens"."""
    return f"{found['examples']:,} examples of {found['source_tokens']:,} and {found['target_tokens']:,} tokens"


def check_same(expected: dict[str, int | str], found: dict[str, int | str], run: object) -> None:
    """Holds the data of a run that goes on against those that it began with.

    Raises:
        ValueError: other data.
    """
    if expected == found:
        return
    before, now = describe(expected), describe(found)
    if before == now:
        now = "as many of other content or in another order"
    raise ValueError(
        f"expected the training data that {run} is about, {before}, got {now}: give the same files, or train anew in "
        "another folder"
    )
