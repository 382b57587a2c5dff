"""Encoders on the C++ engine: a text has the same bits alone and in any batch, and any config errs by the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.checkpoints.hf import ENCODER_FORMS
from fastformer.integrations import accelerate
from tests.integrations import encoders
from tests.integrations.conversions import CASES, drawn
from tests.integrations.test_engine_encode import batch_of
from tests.integrations.test_engine_sources import check, padded, whole

SIDES = ("right", "left", "holes")
LENGTHS = (13, 12, 3, 11, 1)
SOURCES = ["Bart real", "Marian real", "MBart real", "Pegasus real", "M2M100 real", "T5 1.1"]
# slow: each family with padding everywhere
encoder_cases = pytest.mark.parametrize(
    ("kind", "side"),
    [
        pytest.param(
            kind, side, marks=() if (kind, side) in {("bert", "left"), ("mpnet", "holes")} else pytest.mark.slow
        )
        for kind in ENCODER_FORMS
        for side in SIDES
    ],
)
source_cases = pytest.mark.parametrize(
    ("name", "side"),
    [
        pytest.param(name, side, marks=() if (name, side) == ("Bart real", "left") else pytest.mark.slow)
        for name in SOURCES
        for side in SIDES
    ],
)


def rows_of(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in batch.items()}


def check_bits(call: Any, batch: dict[str, Tensor]) -> int:
    """Compares each row with the same row alone, among others and, if padding is on the right, without padding."""
    count, mask = len(batch["input_ids"]), batch["attention_mask"].bool()
    together = call(batch)
    assert together[mask].isfinite().all()
    for i in range(count):
        alone = call(rows_of(batch, [i]))[0]
        assert torch.equal(alone[mask[i]], together[i][mask[i]]), i
        length = int(mask[i].sum())
        if mask[i, :length].all():
            bare = {name: value[i : i + 1, :length] for name, value in batch.items() if name != "attention_mask"}
            assert torch.equal(call(bare)[0], together[i, :length]), i
    others = [*reversed(range(count)), 0]
    assert torch.equal(call(rows_of(batch, others))[mask[others]], together[others][mask[others]])
    return count


@encoder_cases
@torch.no_grad()
def test_a_text_has_the_same_bits_as_alone(kind: str, side: str, calls: list[int]) -> None:
    case = encoders.Case(kind, encoders.BASE, {"local_attention": 6} if kind == "modernbert" else {})
    model = accelerate(case.make(torch.float32, attn_implementation="eager" if kind == "mpnet" else "sdpa"))
    batch = batch_of(case, side, LENGTHS)
    if side == "left":
        batch = rows_of(batch, [0, 1, 3])  # a window reaches from the first position to a token
    count = check_bits(lambda batch: model(**batch)[0], batch)
    assert calls[0] >= 2 + count  # on the engine


@source_cases
@torch.no_grad()
def test_a_source_has_the_same_bits_as_alone(name: str, side: str, calls: list[int]) -> None:
    model = accelerate(CASES[name].make(torch.float32))
    count = check_bits(lambda batch: model(**whole(batch)).encoder_last_hidden_state, padded(side))
    assert calls[0] >= 2 + count


@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.parametrize("threads", [2, 3])
@torch.no_grad()
def test_bits_do_not_depend_on_the_threads(threads: int) -> None:
    case = encoders.Case("bert", encoders.BASE, {"hidden_size": 96, "intermediate_size": 200})
    model = accelerate(case.make(torch.float32, attn_implementation="sdpa"))
    batch = {"input_ids": torch.randint(5, 60, (20, 40), generator=torch.Generator().manual_seed(0))}
    torch.set_num_threads(1)
    due = model(**batch)[0]
    torch.set_num_threads(threads)
    assert torch.equal(model(**batch)[0], due)
    assert torch.equal(model(input_ids=batch["input_ids"][:1])[0], due[:1])


@pytest.mark.slow  # every option with every other, at unusual sizes
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("family", ["Bart", "Marian", "MBart", "Pegasus", "M2M100", "T5"])
def test_random_configs_compute_the_same(family: str, seed: int, calls: list[int]) -> None:
    check(drawn(family, seed), whole(padded(SIDES[seed % 3])))
    assert calls == [1]
