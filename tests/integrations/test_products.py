"""The linear maps of transformers' models: swapped, by oneDNN where it is there, and by whatever somebody put there."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.pytorch_utils import Conv1D

import fastformer
from fastformer.integrations import products
from fastformer.nn import linear as linear_module
from tests.integrations import test_bart as seq2seq
from tests.integrations.test_causal import exactly

IDS = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(0))
_BERT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 60,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MAKE: dict[str, Any] = {
    "bart": lambda: seq2seq.make("bart"),
    "marian": lambda: seq2seq.make("marian"),
    "bert": lambda: BertForMaskedLM(BertConfig(**_BERT)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            intermediate_size=40,
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=60, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
}  # fmt: skip
# (Linear, Conv1D): of the layers, and the head.
MAPS = {
    "bart": (2 * 6 + 2 * 10 + 1, 0),
    "marian": (2 * 6 + 2 * 10 + 1, 0),
    "bert": (2 * 6 + 1 + 1, 0),
    "gpt2": (1, 2 * 4),
    "llama": (2 * 7 + 1, 0),
    "t5": (2 * 6 + 2 * 10 + 1, 0),
}
CALLED = {"bart": 4 * 2 + 8 * 2 + 1, "marian": 4 * 2 + 8 * 2 + 1, "bert": 4 * 2 + 2, "gpt2": 2 * 2 + 1, "t5": 25} | {
    "llama": 7 * 2 + 1
}
families = pytest.mark.parametrize("family", MAKE)


def make(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    return MAKE[family]().to(dtype).train()


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights whose products went to oneDNN, which the smallest do here."""
    shapes: list[tuple[int, ...]] = []
    real = linear_module._by_onednn

    def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(weight.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(linear_module, "_by_onednn", by_onednn)
    monkeypatch.setattr(linear_module, "_FEWEST_TO_LEARN", 0)
    return shapes


def step(model: Any) -> dict[str, Tensor]:
    """The loss, the logits and the gradients."""
    model.zero_grad()
    out = model(IDS, labels=IDS)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach()} | gradients


@families
def test_losses_and_gradients_by_the_rule(family: str, counted: list[tuple[int, ...]]) -> None:
    with exactly(family):
        exact = step(make(family, torch.float64))
    model = make(family)
    plain = step(model)
    assert not counted
    report = fastformer.accelerate(model)
    kinds = Counter(report.swapped.values())
    assert (kinds["Linear"], kinds["Conv1D"]) == MAPS[family] and not report.left
    ours = step(model)
    if linear_module._IS_THERE:
        # Forward and two gradients of each, but for those of feed-forward networks, which are an op.
        assert len(counted) == 3 * CALLED[family] and counted.count((24, 60)) == 1
    assert ours.keys() == plain.keys() and len(ours) > 10
    for name, value in ours.items():
        error, allowed = ((found - exact[name]).norm() for found in (value, plain[name]))
        if exact[name].norm() < 1e-12:  # a bias of keys, which changes nothing: all of its gradient is rounding
            assert value.norm() < 1e-7
            continue
        scale = exact[name].norm() * torch.finfo(torch.float32).eps
        assert error <= 2 * allowed + scale, f"{name}: {error:.2e} > 2 x {allowed:.2e}"
    fastformer.restore(model)
    counted.clear()
    for name, value in step(model).items():
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
    report = fastformer.accelerate(model)
    assert set(report.swapped.values()) == {"Linear"} and len(report.swapped) == 2 * 6 + 1
    torch.testing.assert_close(model(pixels).logits, expected, rtol=1e-4, atol=1e-5)


def test_only_those_of_transformers_models_and_none_of_their_kind() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    inner = make("gpt2")
    inner.lm_head.__class__ = Doubled
    model = nn.ModuleDict({"inner": inner, "own": nn.Linear(3, 3)})
    expected = inner(IDS).logits
    report = fastformer.accelerate(model)
    assert type(model["own"]) is nn.Linear and type(inner.lm_head) is Doubled
    assert Counter(report.swapped.values())["Linear"] == 0 and not report.left
    torch.testing.assert_close(inner(IDS).logits, expected)


def test_what_somebody_put_there_is_called(monkeypatch: pytest.MonkeyPatch, counted: list[tuple[int, ...]]) -> None:
    model = make("gpt2")
    model.lm_head.forward = lambda x: x
    report = fastformer.accelerate(model)
    assert report.left == {"lm_head": "it has a forward of its own"}
    assert model(IDS).logits.shape[-1] == 24
    model = make("gpt2")
    fastformer.accelerate(model)
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
    assert model(IDS).logits is seen.pop()
    with torch.no_grad():
        model(IDS)
    assert counted
    counted.clear()
    for kind, x in ((Conv1D, torch.randn(20, 24)), (nn.Linear, torch.randn(20, 24))):
        own = model.transformer.h[0].attn.c_proj if kind is Conv1D else model.lm_head
        with monkeypatch.context() as patched:
            patched.setattr(kind, "forward", lambda self, x: x)
            assert own(x) is x
        with monkeypatch.context() as patched, contextlib.suppress(AttributeError):
            patched.setattr(F, "linear", lambda x, weight, bias=None: x)
            if kind is nn.Linear:
                assert own(x) is x
    assert not counted


def test_a_head_of_another_size_comes_later() -> None:
    model = make("llama")
    fastformer.accelerate(model)
    model.resize_token_embeddings(70)
    assert model(IDS).logits.shape == (4, 9, 70)
    again = fastformer.accelerate(model)
    assert list(again.swapped.values()) in ([], ["Linear"])
    assert model(IDS).logits.shape == (4, 9, 70)


def test_a_patched_conv1d_is_honoured_in_the_fused_network(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2").eval()
    fastformer.accelerate(model)
    monkeypatch.setattr(Conv1D, "forward", lambda self, x: torch.zeros(*x.shape[:-1], self.nf))
    mlp = model.transformer.h[0].mlp
    assert not mlp(torch.randn(2, 20, 24)).any(), "as the model would without us"
    assert products.Conv1D.forward is not Conv1D.forward


@pytest.mark.filterwarnings("ignore")
def test_what_is_quantised_first_is_called_and_later_is_left() -> None:
    from torch.ao.nn.quantized.dynamic import Linear as Quantised
    from torch.ao.quantization import quantize_dynamic

    first, later = make("bert").eval(), make("bert").eval()
    quantize_dynamic(first, {nn.Linear}, inplace=True)
    expected = first(IDS).logits
    report = fastformer.accelerate(first)
    assert "Linear" not in report.swapped.values() and isinstance(first.cls.predictions.decoder, Quantised)
    torch.testing.assert_close(first(IDS).logits, expected, rtol=1e-3, atol=1e-4)
    fastformer.accelerate(later)
    quantize_dynamic(later, {nn.Linear}, inplace=True)
    assert not any(isinstance(module, Quantised) for module in later.modules())
    fastformer.restore(later)
    quantize_dynamic(later, {nn.Linear}, inplace=True)
    assert isinstance(later.cls.predictions.decoder, Quantised)
