"""Which examples are held out for validation, in memory and in shards.

Examples are equal if their ids are: a text and its copy with other spaces may be. No example is trained on that equals
a held-out one, and of a text that repeats its examples at most about a tenth of the different ones are held out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from fastformer.data.examples import Examples

MOST = 500


def number_held_out(total: int, tenth: int, different: int) -> int:
    """Returns how many different examples are held out: a hundredth of all, at least one and at most MOST.

    Args:
        total: the number of all examples.
        tenth: about a tenth of the different ones, which are fewer if a text repeats its examples.
        different: the number of different ones, or of some of them.

    Raises:
        ValueError: no example would be left.
    """
    if different < 2:
        raise ValueError(f"expected at least 2 different examples, or validation files, got {different}")
    return max(1, min(MOST, total // 100, tenth, different - 1))


def key_of(source: Sequence[int], target: Sequence[int], seed: int = 0) -> bytes:
    """Returns 16 bytes that are equal for equal ids only; the seed decides which examples have low ones."""
    content = array("i", (len(source), *source, *target)).tobytes()
    salt = seed.to_bytes(16, "little", signed=True)
    return hashlib.blake2b(content, digest_size=16, salt=salt).digest()


def keys_of(examples: Examples, seed: int = 0) -> list[bytes]:
    """Returns the keys of some examples."""
    return [key_of(example.source, example.target, seed) for example in examples]


def first_ones(keys: Iterable[bytes]) -> list[int]:
    """Returns the places of the keys that don't occur before."""
    seen: set[bytes] = set()
    places = []
    for place, key in enumerate(keys):
        if key not in seen:
            seen.add(key)
            places.append(place)
    return places


def different_from(examples: Examples, others: Examples) -> list[int]:
    """Returns the places of the examples that equal none of the others."""
    taken = set(keys_of(others))
    return [place for place, key in enumerate(keys_of(examples)) if key not in taken]


def lowest_keys(keys: Sequence[bytes], total: int) -> set[bytes]:
    """Chooses the keys of the examples to hold out from those of all examples.

    Raises:
        ValueError: no example would be left.
    """
    different = sorted(set(keys))
    return set(different[: number_held_out(total, len(different) // 10, len(different))])
