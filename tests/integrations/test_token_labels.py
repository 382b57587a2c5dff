"""In heads with a label for each token, labels at padding count like others, as in transformers."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
import transformers

import fastformer
from tests.integrations import families
from tests.integrations.families import IDS, LEFT, PACKED, RIGHT, ran
from tests.nn.comparing import assert_same

heads = pytest.mark.parametrize(
    "name",
    [
        *("BertForMaskedLM", "BertForPreTraining", "BertForTokenClassification", "BertLMHeadModel"),
        *("GPT2ForTokenClassification", "LlamaForTokenClassification", "GPT2LMHeadModel", "LlamaForCausalLM"),
    ],
)


def make(name: str) -> Any:
    kind = getattr(transformers, name)
    if name.startswith("Bert"):
        return families.make("bert", kind).eval()
    model = families.make("gpt2" if "GPT2" in name else "llama")
    torch.manual_seed(6)
    return (model if isinstance(model, kind) else kind(model.config).double()).eval()


def options_of(name: str, labels: Any) -> dict[str, Any]:
    if name == "BertForPreTraining":
        return {"labels": labels, "next_sentence_label": torch.tensor([0, 1, 1, 0])}
    return {"labels": labels % 2 if "Token" in name else labels}


def exactly(name: str) -> Any:
    return families.exactly("llama") if "Llama" in name else contextlib.nullcontext()


@heads
@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("how", ["by name", "by position"])
def test_labels_at_padding_count_as_before(how, mask, name):
    model, options = make(name), options_of(name, IDS)

    def step() -> list[torch.Tensor]:
        if how == "by position":
            place = [*inspect.signature(model.forward).parameters].index("attention_mask")
            loss = model(IDS, *[None] * (place - 1), mask.long(), **options).loss
        else:
            loss = model(input_ids=IDS, attention_mask=mask.long(), **options).loss
        used = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, used, allow_unused=True)
        return [loss, *(g for g in found if g is not None and g.abs().max() > 1e-9)]

    with exactly(name):
        expected = step()
    fastformer.accelerate(model)
    # transformers takes some losses in fp32, whatever the model's dtype.
    for ours, theirs in zip(step(), expected, strict=True):
        assert_same(ours, theirs, "loss or gradient", 1e-6)
    assert PACKED not in ran(step)
