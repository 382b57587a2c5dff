"""The C++ encoder of a Transformer equals its `encode` in every family, and refuses everything else."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.encoding.source_engine import pack_source
from fastformer.models import Transformer
from fastformer.nn.layout import SequenceLayout
from tests.checks import assert_accurate
from tests.generation.small import needs_cpp
from tests.generation.weights import drawn

SIZES: dict[str, Any] = {"max_len": 300}
CONFIGS: dict[str, dict[str, Any]] = {
    "tensor2tensor": {},
    "the paper": {"norm_first": False, "positions": "interleaved", "attention_bias": True},
    "bart": {
        "norm_first": False, "positions": "learned", "embedding_norm": True, "scale_embedding": False,
        "attention_bias": True, "activation": "gelu", "embed_pad": True,
    },
    "marian": {
        "norm_first": False, "positions": "halves", "attention_bias": True, "activation": "silu", "output_bias": True,
    },
    "m2m100": {"positions": "halves", "first_position": 2, "attention_bias": True},
    "t5": {
        "norm": "rms", "positions": "relative", "num_buckets": 8, "max_distance": 20, "bias": False, "head_dim": 12,
        "activation": "geglu_tanh", "scale_embedding": False, "scale_output": True, "embed_pad": True,
    },
    "apart": {"tie_embeddings": False, "source_vocab_size": 61, "window_size": 5, "num_kv_heads": 2},
}  # fmt: skip


def model_of(name: str, **options: Any) -> Any:
    return drawn(Transformer, **SIZES | CONFIGS[name] | options)


def sources_of(model: Any, lengths: list[int], seed: int = 0) -> list[list[int]]:
    dice, config = random.Random(seed), model.config
    size = config.source_vocab_size or config.vocab_size
    return [[dice.randrange(size) for _ in range(length)] for length in lengths]


def packed(model: Any, precision: str = "fp32") -> Any:
    encoder = pack_source(model, precision)
    assert not isinstance(encoder, str), encoder
    return encoder


@torch.inference_mode()
def by_modules(model: Any, ids: list[list[int]]) -> Tensor:
    layout = SequenceLayout.packed(torch.tensor([*map(len, ids)]), max(map(len, ids)))
    states: Tensor = model.encode(torch.tensor(sum(ids, [])), layout)
    return states


@needs_cpp
@pytest.mark.parametrize("name", CONFIGS)
def test_each_family_equals_its_modules(name: str) -> None:
    model = model_of(name)
    ids = sources_of(model, [1, 7, 40, 130])
    ids[1][3] = model.config.special_ids.pad  # in the middle it is a token like others, whose embedding may be zero
    exact = by_modules(copy.deepcopy(model).double(), ids)
    for precision, bound in (("fp32", 0.0), ("bf16", 0.03), ("int8", 0.1)):
        outputs = torch.from_numpy(packed(model, precision).states(ids, None))
        if precision == "fp32":
            assert_accurate(outputs, by_modules(model, ids), exact, name)
        else:
            assert ((outputs - exact).square().mean() / exact.square().mean()).sqrt() < bound, precision


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_encodes_by_the_rule_and_a_source_has_its_bits_alone(name: str) -> None:
    """`Transformer.encode` runs on the engine if a stack of layers can."""
    model = model_of(name)
    ids = [[1 + token % 60 for token in source] for source in sources_of(model, [9, 1, 40, 7])]  # without PAD
    pad, width = model.config.special_ids.pad, max(map(len, ids))
    batch = torch.tensor([source + [pad] * (width - len(source)) for source in ids])
    real = batch != pad
    outputs, exact = model.encode(batch), copy.deepcopy(model).double().encode(batch)
    model.encoder.packs_weights = False
    assert_accurate(outputs[real], model.encode(batch)[real], exact[real], name)
    model.encoder.packs_weights = True
    if model.encoder_position_bias is None:  # else the modules add a bias, and products of torch have other bits
        for row, source in zip(outputs, ids, strict=True):
            assert torch.equal(model.encode(torch.tensor([source]))[0], row[: len(source)])
    with pytest.raises(ValueError, match=r"\bsource\b"):
        model.encode(batch.flip(1))  # PADs before a token


@needs_cpp
def test_invalid_sources_get_an_error() -> None:
    encoder = packed(model_of("tensor2tensor"))
    for ids in ([[1], []], [[1, 70]], [[-1]], [[1] * 301]):
        with pytest.raises(ValueError):
            encoder.states(ids, None)
    assert encoder.states([], None).shape == (0, 32)
