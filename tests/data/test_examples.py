"""Compact examples give back the original examples in their order."""

from __future__ import annotations

import random

import pytest
import torch

from fastformer.data import Example, Examples

CHOOSER = random.Random(0)
LIST = [
    Example([CHOOSER.randrange(70_000) for _ in range(CHOOSER.randrange(1, 9))], [CHOOSER.randrange(70_000)] * (i % 7))
    for i in range(50)
]
LIST += [Example([], [5, 6, 7]), Example([3], [1])]


def test_as_a_list() -> None:
    examples = Examples(LIST)
    assert len(examples) == len(LIST) and list(examples) == LIST
    assert examples[-1] == LIST[-1] and examples[3:-2:4] == LIST[3:-2:4] and examples[40:99] == LIST[40:]
    for index in (len(LIST), -len(LIST) - 1):
        with pytest.raises(IndexError):
            examples[index]
    assert examples.lengths.tolist() == [list(example.lengths) for example in LIST]
    assert examples.lengths.dtype == torch.int64
    examples.append([1], [2, 3])  # after its memory was looked at
    assert examples[-1] == Example([1], [2, 3]) and len(examples.lengths) == len(LIST) + 1
    assert not Examples() and Examples().lengths.shape == (0, 2)


def test_the_fingerprint_covers_every_id_and_its_place() -> None:
    fingerprint = Examples(LIST).fingerprint()
    assert fingerprint == Examples(LIST).fingerprint() and len(fingerprint) == 64
    swapped = [LIST[1], LIST[0], *LIST[2:]]
    changed = [Example(LIST[0].source, [*LIST[1].target, 1]), *LIST[1:]]
    moved = [Example([3, 1], []), Example([], [5, 6, 7])]
    others = [Examples(some).fingerprint() for some in (swapped, changed, LIST[:-1], LIST[:-1] + moved[:1])]
    assert len({fingerprint, *others}) == 5
    # The same ids, cut elsewhere.
    cuts = ([Example([3], [1, 1])], [Example([3, 1], [1])], [Example([3], [1]), Example([], [1])])
    assert len({Examples(cut).fingerprint() for cut in cuts}) == 3


def test_examples_are_collated() -> None:
    examples, others = Examples(LIST[:20]), Examples(LIST[20:])
    examples.extend(others)
    examples.extend(Examples())
    assert list(examples) == LIST and examples.fingerprint() == Examples(LIST).fingerprint()
    assert list(others) == LIST[20:]
