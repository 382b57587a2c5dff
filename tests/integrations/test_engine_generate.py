"""`generate` of accelerated models on the C++ engine, against transformers' own on the models as they are."""

from __future__ import annotations

from typing import Any

import pytest

from fastformer.checkpoints.hf import FAMILIES
from tests.integrations import conversions, decoders
from tests.integrations.engine_calls import pair_of

EVERY = (*conversions.CASES, *decoders.CASES)
FIRST = [next(name for name in EVERY if name.split()[0].lower() == kind.replace("m2m_", "m2m")) for kind in FAMILIES]


def searches(name: str) -> list[dict[str, Any]]:
    length = 64 if name in decoders.CASES or "T5" in name else 24
    return [
        {"max_new_tokens": length, "do_sample": False},
        {"max_new_tokens": 12, "num_beams": 4, "do_sample": False},
        {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2, "early_stopping": True, "length_penalty": 0.6},
    ]


@pytest.mark.parametrize("name", FIRST)
def test_tokens_are_those_of_transformers(name):
    is_left = name in decoders.CASES
    pair = pair_of(name, left=is_left)
    for options in searches(name):
        pair.check(**options)
    assert pair.near_ties <= pair.rows // 10


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_tokens_of_every_variant_on_either_side_of_padding(name):
    """Proves the conversion of each variant under generate, with padding on both sides where the engine serves it."""
    for is_left in (False, True):
        is_served = is_left == (name in decoders.CASES) or "T5" in name
        pair = pair_of(name, left=is_left)
        for options in searches(name):
            pair.check(is_served=is_served, **options)
        assert pair.near_ties <= pair.rows // 10
