"""Tests GPTs whose layers share keys, differ in their heads or have inputs of their own, in each way to run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.models import GPT, GPTConfig
from fastformer.nn import SequenceLayout
from tests.generation.weights import GEMMA4, drawn
from tests.models.plain_gpt import plain_logits
from tests.nn.comparing import assert_same

IDS = torch.randint(3, 70, (3, 21), generator=torch.Generator().manual_seed(0))


def made(**options: Any) -> GPT:
    with torch.no_grad():
        model = drawn(GPT, **GEMMA4 | options)
    exact = GPT(model.config, dtype=torch.float64)  # whose tables have more digits, too
    exact.load_state_dict(model.state_dict())
    return exact.eval()


def due(model: GPT) -> Tensor:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return torch.stack([plain_logits(model.config, weights, row) for row in IDS])


def test_all_ways_to_run_the_layers_compute_the_same() -> None:
    model = made()
    with torch.no_grad():
        assert_same(model(IDS), due(model), "whole", 1e-11)
        lengths = torch.tensor([21, 9, 1])
        layout = SequenceLayout.packed(lengths, 21)
        packed = model(torch.cat([row[:n] for row, n in zip(IDS, lengths, strict=True)]), layout=layout)
        rows = torch.cat([row[:n] for row, n in zip(due(model), lengths, strict=True)])
        assert_same(packed, rows, "packed", 1e-11)
        for first in (1, 2, 13):  # a prompt, then tokens one by one
            cache = model.new_cache(3, 21)
            parts = [IDS[:, :first], *IDS[:, first:].split(1, 1)]
            hidden = torch.cat([model.decode(part, cache=cache) for part in parts], 1)
            assert_same(model.logits(hidden), due(model), f"cached after {first}", 1e-11)
        assert cache.num_layers == 2 and cache.layer_heads == [(2, 8), (1, 16)]


def test_a_layer_that_is_called_for_its_hook_gets_the_same() -> None:
    model, calls = made(), list[int]()
    model.decoder.layers[2].register_forward_hook(lambda *_: calls.append(1))
    model.decoder.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(0))
    with torch.no_grad():
        assert_same(model(IDS), due(model), "hooked", 1e-11)
    assert calls == [0, 1]


def test_gradients_through_shared_keys_are_the_same_with_checkpoints() -> None:
    found = []
    for saves in (False, True):
        model = made().train()
        model.decoder.gradient_checkpointing = saves
        model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    plain = made().requires_grad_()
    weights = dict(plain.named_parameters())
    logits = torch.stack([plain_logits(plain.config, weights, row[:-1]) for row in IDS])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum").backward()
    for name, gradient in found[0].items():
        assert_same(gradient, weights[name].grad, name, 1e-9)
        assert_same(found[1][name], gradient, name, 1e-12)
    assert "decoder.layers.0.layer_scalar" not in found[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_num_kv_heads": 3}, "num_heads to be a multiple"),
        ({"local_rotary_base": None}, "local_rotary_base"),
        ({"shared_kv_layers": 3}, "shared_kv_layers .* got 3 of 4"),
        ({"shared_kv_layers": 4}, "shared_kv_layers .* got 4 of 4"),
        ({"shared_kv_layers": 0}, "shared_kv_layers, and no experts, for shared_kv_d_ff"),
        ({"num_experts": 3}, "shared_kv_layers, and no experts, for shared_kv_d_ff"),
        ({"qk_norm": "all"}, "qk_norm of 'head' or none for keys_as_values"),
        ({"norm": "layer"}, "norm 'rms' for layer_input_dim, got 'layer'"),
        ({"activation": "relu"}, "layer_input_dim, got 'relu'"),
        ({"linear_layers": (True, False, False, False)}, "linear_layers"),
        ({"rotary_scaling": {"kind": "proportional", "partial_rotary_factor": 1.5}}, "at most 1, got 1.5"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(70, d_model=32, num_heads=4, **GEMMA4 | options)
