"""Layers whose hooks gather parameters for a call compute as without hooks, and never return views."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastformer.nn as ours
from fastformer.nn import guards


class Gatherer:
    """Hooks like those of FSDP, without parameters to bring."""

    def __init__(self) -> None:
        self.views: list[bool] = []

    def before(self, module, inputs):
        return None

    def behind(self, module, inputs, output):
        tensors = output if isinstance(output, tuple) else (output,)
        self.views += [each._is_view() for each in tensors if isinstance(each, torch.Tensor) and each.requires_grad]


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("decodes", [False, True])
def test_outputs_are_not_views(norm_first, decodes, monkeypatch) -> None:
    torch.manual_seed(0)
    sizes = (16, 2, 32, 0.1)
    options = {"norm_first": norm_first, "batch_first": True, "dtype": torch.float64}
    plain: ours.TransformerDecoder | ours.TransformerEncoder
    norm = nn.LayerNorm(16).double()
    if decodes:
        plain = ours.TransformerDecoder(ours.TransformerDecoderLayer(*sizes, **options), 2, norm)
    else:
        plain = ours.TransformerEncoder(ours.TransformerEncoderLayer(*sizes, **options), 2, norm)
    hooked, gatherer = copy.deepcopy(plain), Gatherer()
    monkeypatch.setattr(guards, "GATHERING", {Gatherer.before, Gatherer.behind})
    for layer in hooked.layers:
        layer.register_forward_pre_hook(gatherer.before)
        layer.register_forward_hook(gatherer.behind)
    x, memory = torch.randn(3, 5, 16, dtype=torch.float64), torch.randn(3, 4, 16, dtype=torch.float64)
    found = []
    for stack in (plain, hooked):
        torch.manual_seed(1)
        found.append(stack(x, memory) if decodes else stack(x))
        found[-1].square().sum().backward()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)
    for mine, other in zip(hooked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-12)
    assert gatherer.views and not any(gatherer.views)
