"""The batches of an update, and the share of them that this process computes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fastformer.data import Batch
from fastformer.data.sharing import balance, cost


class Update(list[Batch]):
    """The batches of an update that this process computes, with token counts over all processes.

    Args:
        batches: the batches of this process.
        places: the index of each batch among all batches of the update, which seeds its dropout; None: this process
            computes all batches.
        lengths: (examples, 2) source and target lengths of each batch of the update, of all processes; None: as above.
        padded: whether every example is as long as the longest of its batch.

    Attributes:
        num_target_tokens: the number of target tokens of all processes: the divisor of the summed losses.
        num_tokens, num_slots: the numbers for all processes; see `Batch`.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        places: Sequence[int] | None = None,
        lengths: Sequence[Tensor] | None = None,
        *,
        padded: bool = False,
    ) -> None:
        super().__init__(batches)
        self.places = [*range(len(self))] if places is None else [*places]
        if lengths is None:
            self.num_target_tokens = sum(batch.num_target_tokens for batch in self)
            self.num_tokens = sum(batch.num_tokens for batch in self)
            self.num_slots = sum(batch.num_slots for batch in self)
        else:
            self.num_target_tokens = sum(int(each[:, 1].sum()) for each in lengths)
            self.num_tokens = sum(int(each.sum()) for each in lengths)
            slots = (len(each) * each.amax(0) if padded else each for each in lengths)
            self.num_slots = sum(int(each.sum()) for each in slots)


def places_of(lengths: Sequence[Tensor], model: Any, rank: int, size: int, *, padded: bool) -> list[int]:
    """Returns the places of the batches of an update that a process computes; see `balance`.

    Args:
        lengths: (examples, 2) source and target lengths of each batch.
        model: the settings of the model, which determine the cost of a token.
        rank, size: the rank of the process, and the number of processes.
        padded: whether every example is as long as the longest of its batch.
    """
    if size == 1:
        return [*range(len(lengths))]
    layers: int = getattr(model, "num_layers", 0) or getattr(model, "num_encoder_layers", 1)
    d_model, vocab_size = model.d_model, model.vocab_size
    costs = [cost(each, d_model=d_model, layers=layers, vocab_size=vocab_size, padded=padded) for each in lengths]
    return balance(costs, size)[rank]


def dropout_seed(seed: int, step: int, place: int) -> int:
    """Computes the seed of a batch's dropout from the run's seed, the update and the batch's place in it.

    The seed doesn't depend on the process that computes the batch. It is a hash, so that neighbouring seeds, updates
    and places have no dropout in common.
    """
    digest = hashlib.sha256(f"{seed} {step} {place}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # every generator accepts 63 bits
