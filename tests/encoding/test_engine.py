"""The C++ call of an encoder equals its modules, and is not used if it would differ."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastformer.encoding.engine import EncoderEngine
from fastformer.models import BERT
from fastformer.nn.layout import SequenceLayout
from tests.checks import assert_accurate
from tests.generation.small import needs_cpp
from tests.generation.weights import drawn
from tests.models.test_bert import OPTIONS

SIZES: dict[str, Any] = {"num_layers": 2, "max_len": 300}


def model_of(name: str, **options: Any) -> Any:
    return drawn(BERT, **SIZES | OPTIONS[name] | options)


def texts_of(model: Any, lengths: list[int], seed: int = 0) -> tuple[list[list[int]], list[list[int]] | None]:
    dice, config = random.Random(seed), model.config
    ids = [[dice.randrange(config.vocab_size) for _ in range(length)] for length in lengths]
    return ids, [[dice.randrange(config.token_types) for _ in text] for text in ids] if config.token_types else None


@torch.inference_mode()
def by_modules(model: Any, ids: list[list[int]], types: list[list[int]] | None, kind: str) -> Tensor:
    layout = SequenceLayout.packed(torch.tensor([*map(len, ids)]), max(map(len, ids)))
    flat = [torch.tensor(sum(rows, [])) if rows else None for rows in (ids, types)]
    hidden = model.encode(flat[0], layout=layout, token_types=flat[1])
    if kind == "classify":
        return model.classify_hidden(hidden, layout)
    return hidden if kind == "none" else model.pooled(hidden, layout, kind)


@needs_cpp
@pytest.mark.parametrize("name", OPTIONS)
def test_each_family_equals_its_modules(name: str) -> None:
    model = model_of(name)
    ids, types = texts_of(model, [1, 7, 40, 130])
    exact_model = copy.deepcopy(model).double()
    kinds = ["none", "mean", *(["pooler"] if model.pooler else []), *(["classify"] if model.head else [])]
    assert EncoderEngine.why_unsupported(model) is None
    for precision, bound in (("fp32", 0.0), ("bf16", 0.03), ("int8", 0.1)):
        engine = EncoderEngine(model, precision)
        for kind in kinds:
            exact = by_modules(exact_model, ids, types, kind)
            rows = engine.classify(ids, types) if kind == "classify" else engine.encode(ids, types, kind)
            outputs = torch.from_numpy(rows)
            if precision == "fp32":
                assert_accurate(outputs, by_modules(model, ids, types, kind), exact, kind)
            else:
                assert ((outputs - exact).square().mean() / exact.square().mean()).sqrt() < bound, (precision, kind)


@needs_cpp
@pytest.mark.parametrize("name", ["bert", "pre-norm", "eurobert"])
def test_neighbours_and_autocast_do_not_change_the_bits_of_a_label(name: str) -> None:
    # So wide that products of another number of rows add up in another order.
    engine = EncoderEngine(model_of(name, d_model=256, num_layers=1, num_heads=4, d_ff=64))
    ids, types = texts_of(engine.model, [5, 9, 3, 17, 8, 2, 11])
    together = engine.classify(ids, types)
    for place, text in enumerate(ids):
        np.testing.assert_array_equal(engine.classify([text], types and [types[place]])[0], together[place])
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(engine.classify(ids, types), together)
    assert engine.classify([]).shape == (0, together.shape[1])


def test_logits_of_a_bf16_models_tokens_are_averaged_in_fp32() -> None:
    model = model_of("eurobert").bfloat16()
    model.register_forward_hook(lambda *_: None)
    engine = EncoderEngine(model)
    ids, types = texts_of(model, [1, 7, 40, 130])
    for text, found in zip(ids, engine.classify(ids, types), strict=True):
        with torch.inference_mode():
            logits = model.head(torch.from_numpy(engine.encode([text], None, "none")).bfloat16())
        torch.testing.assert_close(torch.from_numpy(found), logits.double().mean(0).float())


@needs_cpp
def test_int4_computes_with_the_rounded_weights() -> None:
    model = model_of("bert").quantize("int4")
    ids, types = texts_of(model, [1, 7, 40, 130])
    engine = EncoderEngine(model)
    exact = by_modules(copy.deepcopy(model).double(), ids, types, "none")
    outputs = torch.from_numpy(engine.encode(ids, types, "none"))
    assert engine.precision == "int4" and engine.name == "cpp"
    assert ((outputs - exact).square().mean() / exact.square().mean()).sqrt() < 0.1


@needs_cpp
def test_a_change_of_the_model_is_noticed() -> None:
    model = model_of("bert")
    engine = EncoderEngine(model, "fp32")
    ids, types = texts_of(model, [5, 30])

    def agrees() -> bool:
        outputs = torch.from_numpy(engine.encode(ids, types, "pooler"))
        return bool(torch.allclose(outputs, by_modules(model, ids, types, "pooler"), atol=1e-5))

    assert agrees() and engine.name == "cpp"
    with torch.no_grad():
        model.encoder.layers[1].linear1.weight.mul_(1.5)
    assert agrees() and engine.name == "cpp"
    with torch.no_grad():
        model.pooler.weight.data.mul_(2)
    assert agrees() and engine.name == "cpp"
    handle = model.encoder.layers[0].register_forward_hook(lambda module, inputs, out: 2 * out)
    assert agrees() and engine.name == "modules"
    assert np.allclose(engine.classify(ids, types), by_modules(model, ids, types, "classify"), atol=1e-5)
    handle.remove()
    assert agrees() and engine.name == "cpp"
    with torch.no_grad():
        model.head.out.weight.add_(1)
    assert np.allclose(engine.classify(ids, types), by_modules(model, ids, types, "classify"), atol=1e-5)
    model.encoder.layers[0].activation = nn.Tanh()
    assert agrees() and engine.name == "modules"


@needs_cpp
def test_another_gate_is_noticed_at_once() -> None:
    model = model_of("modernbert")
    model.encoder.layers[0].activation = "swiglu"
    assert "swiglu" in (EncoderEngine.why_unsupported(model) or "")


@pytest.mark.parametrize("backend", [pytest.param("cpp", marks=needs_cpp), "modules"])
def test_values_that_are_not_texts_get_an_error(backend: str) -> None:
    model = model_of("bert")
    if backend == "modules":
        model.register_forward_hook(lambda *_: None)
    engine = EncoderEngine(model)
    assert engine.name == backend
    wrong: list[tuple[Any, Any]] = [
        ([[1], []], None),
        ([[1, 70]], None),
        ([[-1]], None),
        ([[2**31]], None),
        ([[2**40]], None),
        ([[2**70]], None),
        ([["a"]], None),
        ([[1.5]], None),
        ([1, 2], None),
        (3, None),
        ([[1]], 3),
        ([[1] * 301], None),
        ([[1, 2]], [[0, 2]]),
        ([[1, 2]], [[0, -1]]),
        ([[1, 2]], [[0, 0], [1]]),
        ([[1, 2]], [[0]]),
        ([[1, 2]], []),
    ]
    for ids, types in wrong:
        with pytest.raises(ValueError, match=r"\bids\b|\btoken_types\b"):
            engine.encode(ids, types)
    with pytest.raises(ValueError, match=r"\bpooling\b"):
        engine.encode([[1]], pooling="median")
    for pooling in ("mean", "none"):
        assert engine.encode([], pooling=pooling).shape == (0, 32)
    assert engine.encode([[1]]).dtype == np.float32


def test_unsupported_models_get_an_error() -> None:
    engine = EncoderEngine(model_of("t5"))
    with pytest.raises(ValueError, match=r"\bpooler\b"):
        engine.encode([[1]], pooling="pooler")
    with pytest.raises(ValueError, match=r"\bhead\b"):
        engine.classify([[1]])
    with pytest.raises(ValueError, match=r"\btoken_types\b"):
        engine.encode([[1]], [[0]])
    with pytest.raises(ValueError, match=r"\bBERT\b"):
        EncoderEngine(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"\bprecision\b"):
        EncoderEngine(engine.model, "fp64")


def test_a_model_of_another_dtype_runs_by_its_modules() -> None:
    assert EncoderEngine(model_of("bert").double()).name == "modules"


@pytest.mark.parametrize("kind", ["mean", "weightedmean", "mean_sqrt_len_tokens"])
def test_modules_in_bf16_pool_in_fp32(kind: str) -> None:
    model = model_of("bert").bfloat16()
    ids, types = texts_of(model, [7, 130])
    states = by_modules(model, ids, types, "none").double()
    layout = SequenceLayout.packed(torch.tensor([7, 130]), 130)
    engine = EncoderEngine(model, "bf16")
    engine.model.register_forward_hook(lambda *_: None)
    outputs = torch.from_numpy(engine.encode(ids, types, kind))
    assert engine.name == "modules"
    torch.testing.assert_close(outputs.double(), model.pooled(states, layout, kind), rtol=1e-5, atol=1e-5)


def test_modules_give_the_same_rows_in_the_same_order() -> None:
    model = model_of("bert")
    ids, types = texts_of(model, [7, 1, 40, 3])
    due = EncoderEngine(model).encode(ids, types, "weightedmean", True)
    labels = EncoderEngine(model).classify(ids, types)
    model.register_forward_hook(lambda *_: None)
    engine = EncoderEngine(model)
    np.testing.assert_allclose(engine.encode(ids, types, "weightedmean", True), due, atol=1e-5)
    np.testing.assert_allclose(engine.classify(ids, types), labels, atol=1e-5)
    with pytest.raises(ValueError, match=r"\bint8\b"):
        EncoderEngine(model, "int8")
