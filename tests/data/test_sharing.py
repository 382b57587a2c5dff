"""Each batch is computed by one process; all processes get the same number of batches and similar work."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cases.models.bench_training_step import MULTI30K
from fastformer.data.batching import plan_epoch
from fastformer.data.sharing import balance, cost

COSTS = st.lists(st.floats(0, 1e6), max_size=40)


@given(COSTS, st.integers(1, 9))
def test_each_batch_is_assigned_once_and_counts_are_equal(costs, world) -> None:
    shares = balance(costs, world)
    assert sorted(place for share in shares for place in share) == [*range(len(costs))]
    counts = [len(share) for share in shares]
    assert len(counts) == world and max(counts) - min(counts) <= (len(costs) % world > 0)


@given(COSTS.filter(len), st.integers(2, 9))
def test_work_is_similar_and_no_share_is_far_above_the_mean(costs, world) -> None:
    shares = balance(costs, world)
    for share in shares:
        assert [costs[place] for place in share] == sorted((costs[place] for place in share), reverse=True)
    loads = [sum(costs[place] for place in share) for share in shares]
    assert max(loads) <= sum(costs) / world + max(costs) * (1 + 1e-9)


def test_the_longest_first_evens_out() -> None:
    shares = balance([9.0, 8.0, 2.0, 1.0, 7.0, 3.0], 2)
    assert sorted(sum((9.0, 8.0, 2.0, 1.0, 7.0, 3.0)[place] for place in share) for share in shares) == [14.0, 16.0]
    assert balance([1.0, 5.0, 3.0], 1) == [[0, 1, 2]]  # one process keeps the order


@pytest.mark.parametrize(("batching", "world"), [("packed", 2), ("random", 4)])
def test_the_slowest_process_of_an_update_is_near_the_mean(batching, world) -> None:
    """The sentences of 300 updates are as long as Multi30k's.

    Batches dealt in turn would be further from the mean.
    """
    count, generator = 2 * world, torch.Generator().manual_seed(0)
    lengths = torch.tensor(MULTI30K)[torch.randint(len(MULTI30K), (29_000,), generator=generator)]
    sizes = {"d_model": 256, "layers": 3, "vocab_size": 6000, "padded": batching != "packed"}
    costs: list[float] = []
    epoch = 0
    while len(costs) < 300 * count:
        batches = plan_epoch(lengths, max_tokens=512, batching=batching, seed=0, epoch=epoch)
        costs += [cost(lengths[batch], **sizes) for batch in batches[: 300 * count - len(costs)]]
        epoch += 1
    in_turn = [[*range(rank, count, world)] for rank in range(world)]
    above: dict[str, list[float]] = {"dealt by cost": [], "in turn": []}
    for first in range(0, len(costs), count):
        some = costs[first : first + count]
        for name, shares in (("dealt by cost", balance(some, world)), ("in turn", in_turn)):
            loads = [sum(some[place] for place in share) for share in shares]
            above[name].append(max(loads) / statistics.fmean(loads))
    ours, others = map(statistics.fmean, above.values())
    assert ours <= 1.03 and ours - 1 < 0.6 * (others - 1), (ours, others)


def test_no_process_is_refused() -> None:
    with pytest.raises(ValueError, match="process"):
        balance([1.0], 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=8))
def test_cost_grows_with_tokens_padding_and_length(sides) -> None:
    lengths = torch.tensor(sides)
    sizes = {"d_model": 64, "layers": 2, "vocab_size": 1000}
    plain = cost(lengths, **sizes)
    assert cost(lengths, padded=True, **sizes) >= plain * (1 - 1e-9)
    assert cost(torch.cat([lengths, lengths]), **sizes) == pytest.approx(2 * plain)
    # As many tokens in one sequence take longer: attention compares all of them.
    if not lengths[:, 0].any():
        assert cost(lengths.sum(0, keepdim=True), **sizes) >= plain * (1 - 1e-9)
