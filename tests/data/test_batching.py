"""Batches hold every example once, keep their budget, and depend on nothing but their arguments."""

from __future__ import annotations

import pytest
import torch

from fastformer.data.batching import (
    BATCHINGS,
    Example,
    collate,
    encode_pair,
    padding_ratio,
    plan_epoch,
    windows,
)

LENGTHS = torch.randint(1, 40, (700, 2), generator=torch.Generator().manual_seed(0))


def plan(batching: str, **options):
    return plan_epoch(LENGTHS, **{"max_tokens": 256, "batching": batching, "seed": 0, "epoch": 0, **options})


@pytest.mark.parametrize("batching", BATCHINGS)
def test_every_example_once_within_the_budget(batching) -> None:
    batches = plan(batching)
    assert sorted(i for batch in batches for i in batch) == list(range(len(LENGTHS)))
    for batch in batches:
        sides = LENGTHS[batch]
        used = sides.sum(0) if batching == "packed" else sides.max(0).values * len(batch)
        assert int(used.max()) <= 256


@pytest.mark.parametrize("batching", BATCHINGS)
def test_pure_function_of_seed_and_epoch(batching) -> None:
    assert plan(batching) == plan(batching)
    assert plan(batching) != plan(batching, epoch=1)
    assert plan(batching) != plan(batching, seed=1)


def test_padding_falls_from_random_to_bucketed_to_packed() -> None:
    random, bucketed = (padding_ratio(LENGTHS, plan(b, max_tokens=1024), packed=False) for b in ("random", "bucketed"))
    assert random > 0.35 and bucketed < 0.7 * random
    assert padding_ratio(LENGTHS, plan("packed"), packed=True) == 0.0


def test_padding_is_weighted_by_tokens() -> None:
    lengths = torch.tensor([[10, 10], [2, 2], [1, 1]])
    # (10 + 2) of 20 slots and 1 of 1, on each side
    assert padding_ratio(lengths, [[0, 1], [2]], packed=False) == pytest.approx(1 - 26 / 42)


def test_collate_shifts_the_target_and_marks_padding() -> None:
    examples = [encode_pair([5, 6, 7], [8]), encode_pair([9], [10, 11])]
    batch = collate(examples, packed=False)
    assert batch.source.tolist() == [[5, 6, 7, 1], [9, 1, 0, 0]]
    assert batch.target_in.tolist() == [[0, 8, 0], [0, 10, 11]]
    assert batch.target_out.tolist() == [[8, 1, -100], [10, 11, 1]]
    assert batch.source_layout.seqlens.tolist() == [4, 2] and batch.num_tokens == 11 and batch.num_slots == 14
    packed = collate(examples, packed=True)
    assert packed.source.tolist() == [5, 6, 7, 1, 9, 1]
    assert packed.target_in.tolist() == [0, 8, 0, 10, 11] and packed.target_out.tolist() == [8, 1, 10, 11, 1]
    assert packed.target_layout.cu_seqlens.tolist() == [0, 2, 5] and packed.num_slots == packed.num_tokens == 11


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


def test_errors() -> None:
    with pytest.raises(ValueError, match="expected a batching out of"):
        plan("sorted")
    with pytest.raises(ValueError, match="longest example, 39 tokens, got 20"):
        plan("packed", max_tokens=20)
    assert collate([Example([], [3, 1])], packed=True).num_source_tokens == 0
