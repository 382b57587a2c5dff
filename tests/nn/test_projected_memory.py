"""A decoder's layers get keys and values of the memory from one product, with the results of a product for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastformer.nn import (
    MultiheadAttention,
    SequenceLayout,
    TransformerDecoder,
    TransformerDecoderLayer,
    projected_memory,
)
from fastformer.nn.projected_memory import project_together
from fastformer.nn.stack import STACK_PLANS

LAYERS = 3
OF_TARGET, OF_MEMORY = (
    SequenceLayout.packed(torch.tensor(lengths), max(lengths)) for lengths in ((5, 2, 4), (3, 6, 1))
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projects together on a CPU, where it isn't faster."""
    monkeypatch.setattr(projected_memory, "DEVICES", {"cpu"})


def decoder(**options: Any) -> TransformerDecoder:
    torch.manual_seed(0)
    layer = TransformerDecoderLayer(16, 4, 32, dropout=0.1, batch_first=True, dtype=torch.float64, **options)
    model = TransformerDecoder(layer, LAYERS)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def results(model: nn.Module, *, packed: bool = True) -> tuple[list[Tensor], int]:
    """Returns the output and all gradients, and the number of products in the forward pass."""
    torch.manual_seed(1)
    shapes = ((11, 16), (10, 16)) if packed else ((1, 10, 16), (1, 10, 16))
    target, memory = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    layouts = {"layout": OF_TARGET, "memory_layout": OF_MEMORY}
    if not packed:
        layouts = {name: SequenceLayout.padded(torch.tensor([10]), 10) for name in layouts}
    model.zero_grad()
    with torch.profiler.profile() as profiled:
        out = model(target, memory, tgt_is_causal=True, **layouts)
    out.backward(torch.randn_like(out))
    products = sum(event.name == "aten::linear" for event in profiled.events() or ())
    leaves = [target, memory, *model.parameters()]
    return [out.detach(), *(leaf.grad.clone() for leaf in leaves if leaf.grad is not None)], products


def compare(model: nn.Module, monkeypatch: pytest.MonkeyPatch, rtol: float = 1e-11, **options: Any) -> int:
    """Compares results with those of layers that project by themselves; returns how many products fewer there are."""
    ours, together = results(model, **options)
    monkeypatch.setattr(projected_memory, "DEVICES", set())
    expected, alone = results(model, **options)
    assert len(ours) == len(expected) == 3 + len(list(model.parameters()))
    for x, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, reference, rtol=rtol, atol=rtol / 100)
    return alone - together


@pytest.mark.parametrize("options", [{}, {"bias": False, "num_kv_heads": 2}, {"norm_first": True}])
def test_one_product_is_that_of_each_layer(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(decoder(**options), monkeypatch) == LAYERS - 1


@pytest.mark.parametrize(("has_bias", "fewer"), [(True, LAYERS - 1), (False, 0)])
def test_layers_may_differ_in_heads_but_not_in_biases(
    has_bias: bool, fewer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder()
    options: Any = {"batch_first": True, "dtype": torch.float64, "num_kv_heads": 1, "bias": has_bias}
    model.layers[1] = TransformerDecoderLayer(16, 4, 32, **options)
    assert compare(model, monkeypatch) == fewer


def test_biases_may_be_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    for layer in model.layers:
        layer.multihead_attn.in_proj_bias = nn.Parameter(torch.randn(48))
    # The dtype of the bias rounds its gradient.
    assert compare(model, monkeypatch, rtol=1e-6) == LAYERS - 1


def test_layers_project_by_themselves_where_together_would_change_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(decoder(), monkeypatch, packed=False) == 0
    monkeypatch.setattr(projected_memory, "DEVICES", {"cpu"})
    recomputing = decoder()
    recomputing.gradient_checkpointing = True
    assert compare(recomputing, monkeypatch) == 0
    monkeypatch.setattr(projected_memory, "DEVICES", {"cpu"})
    hooked = decoder()
    hooked.layers[1].multihead_attn.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    assert compare(hooked, monkeypatch) == 0
    model = decoder()
    monkeypatch.setattr(projected_memory, "DEVICES", {"cpu"})
    memory = torch.randn(10, 16).double()
    with torch.no_grad():
        assert project_together(model, STACK_PLANS.of(model), memory, OF_MEMORY) is None
    model.layers[1].multihead_attn = MultiheadAttention(16, 4, kdim=16, vdim=8, batch_first=True, dtype=torch.float64)
    assert project_together(model, STACK_PLANS.of(model), memory, OF_MEMORY) is None
