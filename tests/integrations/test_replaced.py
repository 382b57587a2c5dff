"""Accelerated models call forwards that a user replaced on classes of transformers, with padded batches."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations, pytorch_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastformer
from fastformer import functional as sdpa
from tests.covering import by_turns
from tests.integrations import families as small
from tests.integrations.families import IDS, RIGHT, TARGETS, exactly

MAKE: dict[str, Callable[[], Any]] = {family: functools.partial(small.make, family) for family in small.FAMILIES}
MAKE["swish"] = lambda: small.make("bert", hidden_act="swish")
# Of each family what is swapped, what is fused with its neighbours, and what is packed through.
CLASSES = {
    "bart": ("Attention", "EncoderLayer", "DecoderLayer", "Encoder", "Decoder", "ForConditionalGeneration"),
    "marian": ("Attention", "EncoderLayer", "DecoderLayer", "Encoder", "Decoder", "MTModel"),
    "bert": ("SelfAttention", "SelfOutput", "Attention", "Intermediate", "Output", "Layer", "Encoder", "ForMaskedLM"),
    "gpt2": ("Attention", "MLP", "Block", "Model", "LMHeadModel"),
    "llama": ("RMSNorm", "Attention", "MLP", "DecoderLayer", "Model", "ForCausalLM"),
    "t5": ("LayerNorm", "DenseActDense", "Attention", "LayerSelfAttention", "LayerFF", "Block", "Stack"),
}
PREFIXES = {"bart": "Bart", "marian": "Marian", "bert": "Bert", "gpt2": "GPT2", "llama": "Llama", "t5": "T5"}
CASES = [(family, PREFIXES[family] + name) for family, names in CLASSES.items() for name in names]
CASES += [("gpt2", "Conv1D"), ("gpt2", "NewGELUActivation"), ("bert", "GELUActivation"), ("swish", "SiLU")]


def source(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def find(family: str, name: str) -> Any:
    places = (source(family), pytorch_utils, activations) if family in CLASSES else (nn,)
    return next(getattr(each, name) for each in places if hasattr(each, name))


def run(model: Any, mask: Tensor | None = RIGHT) -> list[Tensor]:
    """Returns the logits of real tokens, and the gradients."""
    options = {"decoder_input_ids": TARGETS} if model.config.is_encoder_decoder else {}
    torch.manual_seed(0)
    logits = model(input_ids=IDS, attention_mask=None if mask is None else mask.long(), **options).logits
    logits = logits if options or mask is None else logits * mask[..., None]
    model.zero_grad()
    logits.square().sum().backward()
    return [logits, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def replace(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]) -> list[Any]:
    """Replaces the forward of a class by one that computes the same and records tokens (by their shape) and masks."""
    seen: list[Any] = []
    theirs = kind.forward

    @functools.wraps(theirs)  # as a careful hand would
    def own(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        seen.append([tuple(value.shape) for value in values if isinstance(value, Tensor) and value.dim() > 1])
        return theirs(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", own)
    return seen


# Each class once, and a family's in other turns than the next one's: what is alike in them is replaced at either time.
IN_TURNS = [
    pytest.param(family, name, comes, marks=() if (place + turn + number) % 2 == 0 else pytest.mark.slow)
    for place, (family, name) in enumerate(CASES)
    for turn in [list(dict.fromkeys(family for family, _ in CASES)).index(family)]
    for number, comes in enumerate(["before", "later"])
]


@pytest.mark.parametrize(("family", "name", "comes"), IN_TURNS)
def test_a_replaced_forward_is_called_as_without_acceleration(family, name, comes, monkeypatch):
    kind = find(family, name)
    with monkeypatch.context() as patched:
        seen = replace(patched, kind)
        with contextlib.nullcontext() if name.endswith("Norm") else exactly(family):
            expected = run(MAKE[family]())
        theirs, model = list(seen), MAKE[family]()
        assert theirs
        if comes == "before":
            report = fastformer.report(fastformer.accelerate(model))
            named = {place for place, module in model.named_modules() if isinstance(module, kind)}
            assert report.left == dict.fromkeys(named, f"{kind.__name__}.forward was replaced")
            assert f"{kind.__name__}.forward was replaced" in str(report)
    if comes == "later":
        assert not fastformer.report(fastformer.accelerate(model)).left
    with monkeypatch.context() as patched:
        seen = replace(patched, kind)
        fastformer.accelerate(model)
        for ours, other in zip(run(model), expected, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
        assert seen == theirs
    fastformer.accelerate(model)
    # It isn't there any more: all is fast again.
    assert ran(model) == ran_fresh(family)


@functools.cache
def ran_fresh(family: str) -> set[str]:
    """Returns the ops that ran in a model of which nothing was replaced."""
    return ran(fastformer.accelerate(MAKE[family]()))


@pytest.mark.parametrize(("family", "name"), [
    ("bart", "BartForConditionalGeneration"), ("marian", "MarianMTModel"), ("gpt2", "GPT2LMHeadModel"),
    ("llama", "LlamaForCausalLM"),
])  # fmt: skip
def test_a_replaced_head_gives_its_own_loss(family, name, monkeypatch):
    model, kind = MAKE[family]().train(), find(family, name)
    fastformer.accelerate(model, fused_loss=True)
    assert model(IDS, labels=IDS).logits is None
    seen = replace(monkeypatch, kind)
    fastformer.accelerate(model)
    assert model(IDS, labels=IDS).logits is not None and len(seen) == 1


def ran(model: Any) -> set[str]:
    return small.ran(lambda: run(model))


def attended_alike(model: Any, family: str, mask: Tensor | None, calls: list[Any]) -> bool:
    """Accelerates a model, checks that the same calls give the same results, and returns whether there were any."""
    with exactly(family):
        expected, before = run(model, mask), [*calls]
    calls.clear()
    fastformer.accelerate(model)
    for ours, other in zip(run(model, mask), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
    assert calls == before
    return bool(before)


@pytest.mark.parametrize("mask, family", by_turns([None, RIGHT], [*CLASSES]))
def test_a_function_registered_as_sdpa_is_called_as_without_acceleration(family, mask, monkeypatch):
    model, calls = MAKE[family](), []

    def own(module: nn.Module, q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append((q.shape, {name: value for name, value in kwargs.items() if not isinstance(value, Tensor)}))
        return 2 * sdpa_attention_forward(module, q, *args, **kwargs)[0], None

    with monkeypatch.context() as patched:
        patched.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", own)
        assert attended_alike(model, family, mask, calls)
    assert ran(model) == ran_fresh(family)


def test_a_chunk_of_bert_that_was_replaced_is_called(monkeypatch):
    model = MAKE["bert"]()
    fastformer.accelerate(model)
    own = lambda self, x: 2 * x  # noqa: E731
    monkeypatch.setattr(find("bert", "BertLayer"), "feed_forward_chunk", own)
    torch.testing.assert_close(run(model, None)[0], run(MAKE["bert"](), None)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask, family", by_turns([None, RIGHT], [*CLASSES]))
def test_another_attention_is_called_as_without_acceleration(family, mask, monkeypatch):
    model, calls = MAKE[family](), []
    theirs = F.scaled_dot_product_attention

    def own(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(q.shape)
        return 2 * theirs(q, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", own)
        assert attended_alike(model, family, mask, calls)
    fastformer.accelerate(model)
    fast = ran(model)
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", sdpa.scaled_dot_product_attention)
        assert ran(model) == fast
