"""Batches contain every example once, keep their budget, and depend only on their arguments."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.data import Example, Examples
from fastformer.data.batching import BATCHINGS, collate, plan_epoch
from fastformer.data.examples import encode_pair, windows
from fastformer.data.sharing import balance, cost
from fastformer.special_ids import SpecialIds
from tests.covering import each

LENGTHS = torch.randint(1, 40, (700, 2), generator=torch.Generator().manual_seed(0))


def plan(batching: str, lengths: torch.Tensor = LENGTHS, **options):
    return plan_epoch(lengths, **{"max_tokens": 256, "batching": batching, "seed": 0, "epoch": 0, **options})


@pytest.mark.parametrize("batching", BATCHINGS)
def test_every_example_once_within_the_budget(batching) -> None:
    batches = plan(batching)
    assert sorted(i for batch in batches for i in batch) == list(range(len(LENGTHS)))
    for batch in batches:
        sides = LENGTHS[batch]
        used = sides.sum(0) if batching == "packed" else sides.max(0).values * len(batch)
        assert int(used.max()) <= 256


@pytest.mark.parametrize("batching", BATCHINGS)
def test_neighbouring_seeds_and_epochs_share_no_order(batching) -> None:
    # With seed + epoch for a seed, the second epoch of a run would be the first of the next run.
    plans = [plan(batching, seed=seed, epoch=epoch) for seed in range(4) for epoch in range(4)]
    assert plans[0] == plan(batching) and all(one != other for i, one in enumerate(plans) for other in plans[:i])
    # Not the same batches in another order either: examples meet others in each epoch.
    assert {tuple(batch) for batch in plans[0]}.isdisjoint(tuple(batch) for batch in plans[1] if len(batch) > 3)
    plan(batching, seed=10**18)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_order_of_batches_does_not_depend_on_length(batching) -> None:
    lengths = torch.arange(1, 801)[:, None].expand(-1, 2)  # sorted, as some corpora are
    for epoch in range(2):
        batches = plan(batching, lengths, max_tokens=1000, epoch=epoch)
        means = torch.tensor([float(lengths[batch, 0].float().mean()) for batch in batches])
        place = torch.arange(len(means)).float()
        assert len(means) > 100 and abs(float(torch.corrcoef(torch.stack([place, means]))[0, 1])) < 0.3
        rises = int((means.diff() > 0).sum())
        assert 0.3 * len(means) < rises < 0.7 * len(means)


def test_bucketed_batches_differ_in_each_epoch() -> None:
    # No two lengths are alike: sorted as one pool, every epoch would consist of the same batches.
    lengths = torch.randperm(2000, generator=torch.Generator().manual_seed(0))[:, None].expand(-1, 2) + 1
    plans = (plan("bucketed", lengths, max_tokens=4000, epoch=epoch) for epoch in range(2))
    first, second = ({tuple(sorted(batch)) for batch in batches} for batches in plans)
    assert len(first & second) < 0.1 * len(first)


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("max_tokens", [16, 19])
def test_batches_are_filled_to_the_last_token(batching, max_tokens) -> None:
    # 4 tokens each: four examples make 16 exactly, and a fifth would be too many for 19.
    lengths = torch.full((42, 2), 4)
    sizes = [len(b) for b in plan(batching, lengths, max_tokens=max_tokens)]
    assert sorted(sizes) == [2] + [4] * 10


@pytest.mark.parametrize(("batching", "fits"), [("random", False), ("packed", True)])
@pytest.mark.parametrize("side", [0, 1])
def test_budgets_include_padding(batching, fits, side) -> None:
    # 6 + 2 + 2 real tokens, 18 padded ones, on one side; the other has next to nothing.
    lengths = torch.ones(3, 2, dtype=torch.long)
    lengths[:, side] = torch.tensor([6, 2, 2])
    for epoch in range(4):
        batches = plan(batching, lengths, max_tokens=10, epoch=epoch)
        assert (len(batches) == 1) == fits
    assert len(plan(batching, lengths, max_tokens=9)) > 1


@each("count, batching", itertools.product([0, 1, 2, 3], BATCHINGS))
def test_few_examples(batching, count) -> None:
    assert sorted(plan(batching, torch.full((count, 2), 5), max_tokens=5)) == [[i] for i in range(count)]


@pytest.mark.parametrize(
    "ids", [SpecialIds(), SpecialIds(pad=3, eos=(7, 9), unk=None, start=5)], ids=["default", "other"]
)
def test_collate_shifts_the_target_and_marks_padding(ids) -> None:
    pad, eos, start = ids.pad, ids.first_eos, ids.start
    options = {} if ids == SpecialIds() else {"special_ids": ids}
    examples = [encode_pair([11, 2, 6], [12], **options), encode_pair([13], [14, 15], **options)]
    batch = collate(examples, packed=False, **options)
    assert batch.source.tolist() == [[11, 2, 6, eos], [13, eos, pad, pad]]
    assert batch.target_in.tolist() == [[start, 12, pad], [start, 14, 15]]
    assert batch.target_out.tolist() == [[12, eos, -100], [14, 15, eos]]
    assert batch.source_layout.seqlens.tolist() == [4, 2] and batch.num_tokens == 11 and batch.num_slots == 14
    packed = collate(examples, packed=True, **options)
    assert packed.source.tolist() == [11, 2, 6, eos, 13, eos]
    assert packed.target_in.tolist() == [start, 12, start, 14, 15]
    assert packed.target_out.tolist() == [12, eos, 14, 15, eos]
    assert packed.target_layout.cu_seqlens.tolist() == [0, 2, 5] and packed.num_slots == packed.num_tokens == 11
    windows = collate([Example([], [11, 12, 13]), Example([], [14, 15])], packed=False, **options)
    assert windows.target_in.tolist() == [[11, 12], [14, pad]]


def test_language_model_windows() -> None:
    examples = windows(list(range(10, 20)), 4)
    assert [example.target for example in examples] == [[10, 11, 12, 13, 14], [14, 15, 16, 17, 18], [18, 19]]
    for packed in (False, True):
        batch = collate(examples, packed=packed)
        assert batch.source is None and batch.num_tokens == batch.num_target_tokens == 9
        real = batch.target_out != -100
        # No PAD in front: a language model is asked to continue text as it stands.
        assert batch.target_in[real].tolist() == list(range(10, 19))
        assert batch.target_out[real].tolist() == list(range(11, 20))


def test_windows_lose_and_repeat_nothing() -> None:
    for length in range(2, 30):
        for seqlen in range(1, 12):
            examples = windows(list(range(length)), seqlen)
            inputs = [i for example in examples for i in example.target[:-1]]
            predicted = [i for example in examples for i in example.target[1:]]
            assert inputs == list(range(length - 1)) and predicted == list(range(1, length))
            assert [len(example.target) for example in examples[:-1]] == [seqlen + 1] * (len(examples) - 1)
            assert len(examples[-1].target) >= 2  # no window predicts nothing
    assert len(windows([7], 4)) == len(windows([], 4)) == 0


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"\bbatching\b"):
        plan("sorted")
    with pytest.raises(ValueError, match=r"\b39 tokens\b.*\b20\b"):
        plan("packed", max_tokens=20)
    assert collate([Example([], [3, 1])], packed=True).num_source_tokens == 0


@pytest.mark.parametrize("batching", BATCHINGS)
def test_weights_are_the_number_of_times_an_epoch_has_an_example(batching) -> None:
    lengths = torch.randint(1, 9, (900, 2), generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([2.0, 1.0, 0.25]).repeat_interleave(300)
    options = {"max_tokens": 64, "batching": batching, "seed": 3}
    counts = []
    for epoch in range(8):
        plan = plan_epoch(lengths, epoch=epoch, weights=weights, **options)
        assert plan == plan_epoch(lengths, epoch=epoch, weights=weights, **options)
        counts.append(torch.bincount(torch.tensor([i for batch in plan for i in batch]), minlength=900))
        assert counts[-1][:300].eq(2).all() and counts[-1][300:600].eq(1).all() and counts[-1][600:].max() == 1
        assert 40 < counts[-1][600:].sum() < 110
    assert sum(counts)[600:].gt(0).float().mean() > 0.8  # other ones in each epoch
    once = plan_epoch(lengths, epoch=0, weights=torch.ones(900), **options)
    assert sorted(i for batch in once for i in batch) == list(range(900))
    with pytest.raises(ValueError, match=r"\bweights \(900,\).*\(3,\)"):
        plan_epoch(lengths, epoch=0, weights=torch.ones(3), **options)


# Each batch is computed by one process; all processes get the same number of batches and similar work.


COSTS = st.lists(st.floats(0, 1e6), max_size=40)


@settings(deadline=None)
@given(COSTS, st.integers(1, 9))
def test_each_batch_is_assigned_once_and_counts_are_equal(costs, world) -> None:
    shares = balance(costs, world)
    assert sorted(place for share in shares for place in share) == [*range(len(costs))]
    counts = [len(share) for share in shares]
    assert len(counts) == world and max(counts) - min(counts) <= (len(costs) % world > 0)


@settings(deadline=None)
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


def test_no_process_is_refused() -> None:
    with pytest.raises(ValueError, match="process"):
        balance([1.0], 0)


@settings(deadline=None)
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


# Compact examples give back the original examples in their order.


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
