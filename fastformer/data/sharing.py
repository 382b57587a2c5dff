"""Deals the batches of an update to the processes, so that all finish at about the same time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch import Tensor


def cost(lengths: Tensor, *, d_model: int, layers: int = 1, vocab_size: int = 0, padded: bool = False) -> float:
    """Estimates the cost of a batch: the multiplications of its forward pass, divided by d_model**2.

    A layer has 12 * d_model**2 weights, and 4 * d_model**2 more for a second attention if a decoder reads a source.
    Attention compares each token with every other one, so the cost of a long sequence grows faster than its length
    (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", appendix).

    Args:
        lengths: (examples, 2) source and target lengths of the batch; sources of length 0 in a language model.
        d_model, layers, vocab_size: the sizes of the model.
        padded: whether every example is as long as the longest one.
    """
    sides = lengths.double()
    if padded and len(lengths):
        sides = sides.amax(dim=0).expand_as(sides)
    source, target = sides.unbind(1)
    in_layers = 12 * source.sum() + 12 * target.sum() + 4 * target[source > 0].sum()
    in_attention = 2 * (source.square() + target.square() / 2 + source * target).sum() / d_model
    return float(layers * (in_layers + in_attention) + target.sum() * vocab_size / d_model)


def balance(costs: Sequence[float], world: int) -> list[list[int]]:
    """Deals batches to processes: the costliest first, each to the process with the least work (Graham 1969, LPT).

    All processes get the same number of batches, because with sharded weights all of them communicate in every batch.
    If the number of batches isn't divisible by that of processes, some get one more. The first batches of all processes
    cost about the same, and so do the second ones.

    Args:
        costs: the cost of each batch; at least 0.
        world: the number of processes.

    Returns:
        For each process the indices of its batches in `costs`, the costliest first; a single process keeps their order.

    Raises:
        ValueError: no process.
    """
    if world < 1:
        raise ValueError(f"expected at least one process to share work, got {world}")
    if world == 1:
        return [[*range(len(costs))]]
    shares: list[list[int]] = [[] for _ in range(world)]
    least, more = divmod(len(costs), world)
    waiting = [(0.0, rank) for rank in range(world)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, rank = heapq.heappop(waiting)
        shares[rank].append(place)
        room = least - len(shares[rank])
        if room == -1:
            more -= 1
        if room > 0 or (room == 0 and more):
            heapq.heappush(waiting, (load + costs[place], rank))
        if not more:  # processes that already have one batch more than the others get none
            waiting = [each for each in waiting if len(shares[each[1]]) < least]
            heapq.heapify(waiting)
    return shares
