"""Builds batches of encoded examples: chooses the examples of each batch and lays them out in memory.

The choice is a pure function of (lengths, settings, seed, epoch), so a training that resumes needs nothing but the
number of batches done. There are three ways of batching:

- random: examples in random order, padded to the longest of the batch; the baseline, as most other code does it.
- bucketed: a shuffled pool of many batches is sorted by length and cut by a budget of padded tokens.
- packed: random order, tokens one after another with no padding at all.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fastformer.data.examples import Example
from fastformer.nn import SequenceLayout
from fastformer.settings import Positive, check_value
from fastformer.special_ids import SpecialIds

Part = TypeVar("Part", Tensor, SequenceLayout)

IGNORE_INDEX = -100
BATCHINGS = ("random", "bucketed", "packed")
_POOL = 128  # batches that are sorted together: more hardly lower the padding, and make the epoch less random


@dataclass
class Batch:
    """The inputs of a model's `loss`, and the layouts of their sequences.

    Attributes:
        source: ids, (batch, source_seqlen) or, packed, (total,); None for a language model.
        target_in: the decoder's input, `start` and then the target without its last token; for a language model the
            text itself.
        target_out: the target; -100 at padding.
        source_layout, target_layout: the places of the sequences in the ids.
    """

    source: Tensor | None
    target_in: Tensor
    target_out: Tensor
    source_layout: SequenceLayout | None
    target_layout: SequenceLayout
    num_source_tokens: int
    num_target_tokens: int

    @property
    def num_tokens(self) -> int:
        """The number of real tokens, source and target."""
        return self.num_source_tokens + self.num_target_tokens

    @property
    def num_slots(self) -> int:
        """The number of computed tokens, padding included."""
        return self.target_in.numel() + (0 if self.source is None else self.source.numel())

    def to(self, device: torch.device | str) -> Batch:
        """Copies the batch to another device; the copy to a GPU uses pinned memory, so that the host doesn't wait."""
        pin = torch.device(device).type == "cuda" and self.target_in.device.type == "cpu"

        def move(part: Part) -> Part:
            return part.pin_memory().to(device, non_blocking=True) if pin else part.to(device)

        return Batch(
            None if self.source is None else move(self.source),
            move(self.target_in),
            move(self.target_out),
            None if self.source_layout is None else move(self.source_layout),
            move(self.target_layout),
            self.num_source_tokens,
            self.num_target_tokens,
        )


def plan_epoch(
    lengths: Tensor, *, max_tokens: int, batching: str, seed: int, epoch: int, weights: Tensor | None = None
) -> list[list[int]]:
    """Chooses the examples of each batch of an epoch, in order.

    Args:
        lengths: (examples, 2) source and target lengths.
        max_tokens: the most tokens of a batch, on each side: padded tokens for "random" and "bucketed", real ones for
            "packed".
        batching: one of BATCHINGS.
        seed, epoch: the order is a function of them.
        weights: (examples,) how often the epoch contains each example; for a fraction, each epoch draws the examples
            that it contains. None: each once.

    Returns:
        Lists of indices, one list a batch; without weights every example is in exactly one batch.

    Raises:
        ValueError: an unknown batching, lengths of another shape, or an example longer than max_tokens.
    """
    if batching not in BATCHINGS:
        raise ValueError(f"expected a batching in {BATCHINGS}, got {batching!r}")
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not isinstance(value, int):
            raise ValueError(f"expected {name} to be an integer, got {value!r}")
    longest = longest_sides(lengths, max_tokens)
    # Neighbouring seeds must not share epochs; a generator takes 64 bits.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    if weights is None:
        order = torch.randperm(len(lengths), generator=generator, device="cpu")
    else:
        if weights.shape != lengths.shape[:1]:
            raise ValueError(f"expected weights ({len(lengths)},), got {tuple(weights.shape)}")
        times = (weights + torch.rand(len(lengths), generator=generator, device="cpu")).floor().long()
        order = torch.arange(len(lengths), device="cpu").repeat_interleave(times)
        order = order[torch.randperm(len(order), generator=generator, device="cpu")]
    if batching == "bucketed":
        return _bucketed(order, longest, max_tokens, generator)
    return _cut(order.tolist(), lengths.tolist(), max_tokens, padded=batching == "random")


def longest_sides(lengths: Tensor, max_tokens: int) -> Tensor:
    """Returns the length of each example's longer side, (examples,), and checks it against max_tokens.

    Raises:
        ValueError: lengths of another shape or type, an example longer than max_tokens.
    """
    if not isinstance(lengths, Tensor) or lengths.dim() != 2 or lengths.shape[1] != 2 or lengths.is_floating_point():
        got = f"{lengths.dtype} {tuple(lengths.shape)}" if isinstance(lengths, Tensor) else repr(lengths)
        raise ValueError(f"expected integer lengths (examples, 2), got {got}")
    check_value("max_tokens", max_tokens, Positive)
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"expected lengths of at least 0, got {int(lengths.min())}")
    longest = lengths.max(dim=1).values
    if len(longest) and int(longest.max()) > max_tokens:
        raise ValueError(
            f"expected max_tokens of at least the longest example, {int(longest.max())} tokens, got {max_tokens}"
        )
    return longest


def _cut(order: list[int], lengths: list[list[int]], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Fills batches in order; a batch is full if the next example would raise a side's padded (or real) tokens above
    max_tokens."""
    batches: list[list[int]] = []
    batch: list[int] = []
    sides = [0, 0]  # of each side: the longest example if padded, else the number of tokens
    for index in order:
        grown = [max(s, n) if padded else s + n for s, n in zip(sides, lengths[index], strict=True)]
        if batch and max(grown) * (len(batch) + 1 if padded else 1) > max_tokens:
            batches.append(batch)
            batch, grown = [], list(lengths[index])
        batch.append(index)
        sides = grown
    if batch:
        batches.append(batch)
    return batches


def _bucketed(order: Tensor, longest: Tensor, max_tokens: int, generator: torch.Generator) -> list[list[int]]:
    # Sorting by the longer side matters: by the target alone, a fifth of a translation batch is still padding.
    mean = max(float(longest.float().mean()), 1.0) if len(longest) else 1.0
    pool_size = max(1, int(_POOL * max_tokens / mean))
    sides = [[n, n] for n in longest.tolist()]
    batches: list[list[int]] = []
    for pool in torch.split(order, pool_size):
        ranked = pool[torch.argsort(longest[pool], stable=True)].tolist()  # ties keep their random order
        batches += _cut(ranked, sides, max_tokens, padded=True)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator, device="cpu").tolist()]


def collate(examples: Sequence[Example], *, packed: bool, special_ids: SpecialIds = SpecialIds()) -> Batch:
    """Builds the tensors of a batch, padded to the longest example or packed.

    Args:
        examples: all with a source, or all without one.
        packed: lay the examples one after another without padding.
        special_ids: the model's special ids: `pad` fills padded rows, `start` precedes a shifted target.

    Raises:
        ValueError: no examples, an object that is not an example, examples with and without a source, an empty target.
    """
    for example in examples:
        if not isinstance(example, Example):
            raise ValueError(f"expected examples of type Example, got {type(example).__name__}")
        if bool(example.source) != bool(examples[0].source):
            raise ValueError("expected a source in all examples or in none, got both kinds in one batch")
        if len(example.target) < (1 if example.source else 2):  # a window's last token is only predicted
            raise ValueError(f"expected examples with something to predict, got {example}")
    if not examples:
        raise ValueError("expected at least one example, got none")
    sources = [example.source for example in examples]
    targets = [example.target for example in examples]
    has_source = bool(sources[0])
    if has_source:
        shifted = [[special_ids.start, *target[:-1]] for target in targets]
    else:  # a language model continues text, so no `start` comes in front
        shifted, targets = [target[:-1] for target in targets], [target[1:] for target in targets]
    target_layout = layout_of(targets, packed=packed)
    return Batch(
        source=_join(sources, special_ids.pad, packed) if has_source else None,
        target_in=_join(shifted, special_ids.pad, packed),
        target_out=_join(targets, IGNORE_INDEX, packed),
        source_layout=layout_of(sources, packed=packed) if has_source else None,
        target_layout=target_layout,
        num_source_tokens=sum(map(len, sources)),
        num_target_tokens=sum(map(len, targets)),
    )


def layout_of(sequences: Sequence[Sequence[int]], *, packed: bool) -> SequenceLayout:
    """Returns the layout of sequences padded to the longest, or packed."""
    seqlens = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int32, device="cpu")
    make = SequenceLayout.packed if packed else SequenceLayout.padded
    return make(seqlens, int(seqlens.max()))


def _join(sequences: Sequence[Sequence[int]], fill: int, packed: bool) -> Tensor:
    if packed:
        ids = array("q")  # for each batch of a training; torch.tensor takes four times as long to convert a list
        for sequence in sequences:
            ids.extend(sequence)
        return torch.frombuffer(ids, dtype=torch.int64)
    width = max(len(sequence) for sequence in sequences)
    return torch.tensor([[*sequence, *[fill] * (width - len(sequence))] for sequence in sequences], device="cpu")
