"""Linear layers of transformers' models use fastformer's kernels, or the user's replacement."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.pytorch_utils import Conv1D

import fastformer
from fastformer.nn import linear as linear_module
from tests.conftest import missing_backend
from tests.integrations import families as small
from tests.products import notice_products

linear_op = importlib.import_module("fastformer.ops.linear")

DRAWS = 8
IDS = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(0))
# (Linear, Conv1D): of the layers, and the head.
MAPS = {
    "bart": (2 * 6 + 2 * 10 + 1, 0),
    "marian": (2 * 6 + 2 * 10 + 1, 0),
    "bert": (2 * 6 + 1 + 1, 0),
    "gpt2": (1, 2 * 4),
    "llama": (2 * 7 + 1, 0),
    "t5": (2 * 6 + 2 * 10 + 1, 0),
}
# Products: forward and two gradients of each map, but for those of feed-forward networks, which are an op.
PRODUCTS = {"bart": 3 * 25, "marian": 3 * 25, "bert": 3 * 10, "gpt2": 3 * 5, "llama": 3 * 15, "t5": 3 * 25}
families = pytest.mark.parametrize("family", small.FAMILIES)


def make(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return small.make(family).to(dtype).train()


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns the shapes of the weights that fastformer's kernels multiplied; here, they multiply even the smallest."""
    shapes: list[tuple[int, ...]] = []
    notice_products(monkeypatch, lambda x, weight, is_gradient: shapes.append(tuple(weight.shape)))
    for bound in ("MIN_PRODUCT", "MIN_PRODUCT_TRAINING", "MIN_PRODUCT_BF16"):
        monkeypatch.setattr(linear_op, bound, 0)
    return shapes


def steps(model: Any) -> dict[str, Tensor]:
    """Returns the loss, the logits and the gradients over draws of tokens, because the error of one small gradient is
    luck.
    """
    found: dict[str, list[Tensor]] = {}
    for draw in range(DRAWS):
        ids = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(draw))
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, value in ({"loss": out.loss, "logits": out.logits} | gradients).items():
            found.setdefault(name, []).append(value.detach().clone())
    return {name: torch.stack(values) for name, values in found.items()}


@families
def test_losses_and_gradients_by_the_rule(family: str, counted: list[tuple[int, ...]]) -> None:
    with small.exactly(family):
        exact = steps(make(family, torch.float64))
    model = make(family)
    plain = steps(model)
    assert not counted
    report = fastformer.report(fastformer.accelerate(model))
    kinds = Counter(report.swapped.values())
    assert (kinds["Linear"], kinds["Conv1D"]) == MAPS[family] and not report.left
    ours = steps(model)
    if missing_backend("cpp", "linear") is None:
        assert len(counted) == PRODUCTS[family] * DRAWS and counted.count((24, 60)) == DRAWS
    assert ours.keys() == plain.keys() and len(ours) > 10
    largest = max(float(value.norm()) for value in exact.values())
    for name, value in ours.items():
        error, allowed = ((found - exact[name]).norm() for found in (value, plain[name]))
        if exact[name].norm() < 1e-12:  # a bias of keys, which changes nothing: all of its gradient is rounding
            assert value.norm() < 1e-5 * largest
            continue
        scale = exact[name].norm() * torch.finfo(torch.float32).eps
        assert error <= 2 * allowed + scale, f"{name}: {error:.2e} > 2 x {allowed:.2e}"
    fastformer.restore(model)
    counted.clear()
    for name, value in steps(model).items():
        assert torch.equal(value, plain[name]), name
    assert not counted and not any(isinstance(each, linear_module.Linear) for each in model.modules())


def test_a_model_whose_family_is_not_known() -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=32, patch_size=8
    )
    model = ViTForImageClassification(config).eval()
    pixels = torch.randn(2, 3, 32, 32)
    expected = model(pixels).logits
    report = fastformer.report(fastformer.accelerate(model))
    assert set(report.swapped.values()) == {"Linear"} and len(report.swapped) == 2 * 6 + 1
    torch.testing.assert_close(model(pixels).logits, expected, rtol=1e-4, atol=1e-5)


def test_only_linear_layers_of_transformers_models_are_swapped() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    inner = make("gpt2")
    inner.lm_head.__class__ = Doubled
    model = nn.ModuleDict({"inner": inner, "own": nn.Linear(3, 3)})
    expected = inner(IDS).logits
    report = fastformer.report(fastformer.accelerate(model))
    assert type(model["own"]) is nn.Linear and type(inner.lm_head) is Doubled
    assert Counter(report.swapped.values())["Linear"] == 0 and not report.left
    torch.testing.assert_close(inner(IDS).logits, expected)


@pytest.mark.parametrize("kind", [Conv1D, nn.Linear])
def test_a_users_forward_of_a_class_is_called(kind: type[nn.Module], monkeypatch: Any, counted: Any) -> None:
    model, x = fastformer.accelerate(make("gpt2")), torch.randn(20, 24)
    module = model.lm_head if kind is nn.Linear else model.transformer.h[0].attn.c_proj
    module(x)
    assert counted or missing_backend("cpp", "linear") is not None
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    fastformer.accelerate(model)
    assert module(x) is x


def test_a_head_of_another_size_comes_later() -> None:
    model = make("llama")
    fastformer.accelerate(model)
    model.resize_token_embeddings(70)
    assert model(IDS).logits.shape == (4, 9, 70)
    fastformer.accelerate(model)
    assert type(model.lm_head) is linear_module.Linear
    assert model(IDS).logits.shape == (4, 9, 70)


@pytest.mark.parametrize("rows", [4, 64], ids=["few rows", "many rows"])
@pytest.mark.parametrize(("place", "name"), [(F, "linear"), (torch, "addmm")])
def test_a_users_replacement_of_a_function_acts_as_without_acceleration(place, name, rows, monkeypatch):
    """transformers computes a Conv1D with torch.addmm, and all other products with F.linear."""
    model, plain = make("gpt2"), make("gpt2")
    fastformer.accelerate(model)
    ids = IDS[:1, :1].expand(rows, 9)
    before = model(ids).logits
    theirs = getattr(place, name)
    calls: list[tuple[int, ...]] = []

    def own(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = theirs(*args, **kwargs)
        calls.append(tuple(out.shape))
        return 1.25 * out

    monkeypatch.setattr(place, name, own)
    expected = plain(ids).logits
    asked = calls.copy()
    calls.clear()
    found = model(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(asked) == (1 if name == "linear" else 8) and calls == asked
    assert not torch.allclose(found, before, rtol=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_modules_that_are_quantised_first_are_called() -> None:
    from torch.ao.nn.quantized.dynamic import Linear as Quantised
    from torch.ao.quantization import quantize_dynamic

    first, later = make("bert").eval(), make("bert").eval()
    quantize_dynamic(first, {nn.Linear}, inplace=True)
    expected = first(IDS).logits
    report = fastformer.report(fastformer.accelerate(first))
    assert "Linear" not in report.swapped.values() and isinstance(first.cls.predictions.decoder, Quantised)
    # An activation that lies between two steps of 8 bits may fall to the other side, which moves a few logits, and by
    # less than rounding all activations does.
    found, exact = first(IDS).logits, make("bert").eval()(IDS).logits
    assert torch.isclose(found, expected, rtol=1e-3, atol=1e-4).double().mean() > 0.8
    assert (found - expected).abs().max() < (expected - exact).abs().max()
    fastformer.accelerate(later)
    quantize_dynamic(later, {nn.Linear}, inplace=True)
    assert not any(isinstance(module, Quantised) for module in later.modules())
    fastformer.restore(later)
    quantize_dynamic(later, {nn.Linear}, inplace=True)
    assert isinstance(later.cls.predictions.decoder, Quantised)
