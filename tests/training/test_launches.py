"""The launches of a training step on a GPU, counted on a stand-in for it, in a process of its own.

Small models train as fast as the host launches, so each of these counts is a bound: lower it when a change saves some.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from benchmarks.measure.record import ROOT

pytest.importorskip("triton")

SCRIPT = """
import collections, json, os, sys
from benchmarks.gpu import stand_in
stand_in.stand_in()

import torch

import fastformer.nn
import fastformer.ops
from fastformer.data import Example, collate
from fastformer.models import Transformer

MAKERS = {"zeros", "new_zeros", "zeros_like", "full", "new_full", "ones_like"}
# The stand-in fills with zeros what is empty on a GPU. The others launch nothing by themselves.
IDLE = {"zero_", "fill_", "to", "linear", "matmul", "contiguous", "item", "_local_scalar_dense", "promote_types",
        "empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "lift_fresh", "result_type",
        "view", "_unsafe_view", "reshape", "_reshape_alias", "view_as", "flatten", "unflatten", "as_strided", "alias",
        "t", "transpose", "permute", "expand", "expand_as", "unsqueeze", "squeeze", "detach", "select", "slice",
        "narrow", "slice_backward", "numpy_T", "chunk", "split", "split_with_sizes", "tensor_split", "unbind"}

def launches(call):
    stand_in.grids.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        call()
    found = collections.Counter(name for name, _ in stand_in.grids)
    waiting = [event for event in profiled.events() if event.cpu_parent is None]
    while waiting:
        event = waiting.pop()
        library, _, name = event.name.partition("::")
        if library == "aten" and name not in IDLE:
            found["memset" if name in MAKERS else name] += 1
        else:
            waiting += event.cpu_children
    return found

def of_the_model(layers):
    sizes = {"d_model": 64, "num_heads": 2, "d_ff": 128, "num_encoder_layers": layers, "num_decoder_layers": layers}
    model = Transformer.from_preset("base", vocab_size=500, **sizes)
    examples = [Example([5, 6, 7, 8], [5, 6, 7]), Example([5, 6, 7, 8, 9], [5, 6, 7, 9])]
    batch = collate(examples, packed=True)
    layouts = {"source_layout": batch.source_layout, "target_layout": batch.target_layout}
    return model, lambda: model.loss(batch.source, batch.target_in, batch.target_out, **layouts)

def of_the_modules(layers):
    layer = fastformer.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    model = fastformer.nn.TransformerEncoder(layer, layers)
    x = torch.zeros(2, 16, 64)
    return model, lambda: model(x).sum()

def of_an_accelerated_model(layers):
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(vocab_size=50, n_embd=64, n_layer=layers, n_head=2)
    model = fastformer.accelerate(GPT2LMHeadModel(config), fused_loss=True)
    ids = torch.ones(2, 16, dtype=torch.long)
    return model, lambda: model(ids, labels=ids).loss

def counted(make, layers):
    torch.manual_seed(0)
    model, forward = make(layers)
    model.train()
    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward()
        loss.backward()
    step()
    model.zero_grad(set_to_none=True)
    return launches(step)

def of_a_norm(dim):
    os.environ["FASTFORMER_STRICT"] = "0"
    x, weight, bias = (torch.zeros(*shape, dim, requires_grad=True) for shape in ((2,), (), ()))
    return launches(lambda: fastformer.ops.add_layer_norm(x, None, weight, bias)[0].sum().backward())

makers = {"model": of_the_model, "modules": of_the_modules, "accelerated": of_an_accelerated_model}
found = {name: [counted(make, layers) for layers in (1, 2)] for name, make in makers.items()}
print(json.dumps(found | {"norm": [of_a_norm(dim) for dim in (512, 16384)]}))
"""


@cache
def counts() -> dict[str, list[dict[str, int]]]:
    """Returns for each case the launches of a step with one layer and with two, and of a narrow and a wide norm."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    proc = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert proc.returncode == 0, proc.stderr[-2000:]
    found: dict[str, list[dict[str, int]]] = json.loads(proc.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "case, of_a_layer, of_the_rest",
    [("model", 119, 41), ("modules", 59, 3), ("accelerated", 69, 40)],  # a layer of "model" is one on each side
)
def test_a_step_launches_no_more_than_this(case: str, of_a_layer: int, of_the_rest: int) -> None:
    pytest.importorskip("transformers")
    one, two = map(Counter, counts()[case])
    layer = two - one
    rest = one - layer
    assert sum(layer.values()) <= of_a_layer, layer
    assert sum(rest.values()) <= of_the_rest, rest
    assert layer["_attention_fwd_kernel"] == (3 if case == "model" else 1)  # the count sees our kernels


def test_the_gradients_of_the_parts_of_a_weight_are_not_added() -> None:
    """Cross-attention reads the rows for queries and those for keys by themselves, in one weight."""
    layer = Counter(counts()["model"][1]) - Counter(counts()["model"][0])
    assert layer["add_"] == 1 and layer["copy_"] == 0


def test_a_norm_that_is_too_wide_for_its_backward_kernel_is_differentiated_by_pytorch() -> None:
    """The forward kernel takes wider rows."""
    for launches, is_ours in zip(counts()["norm"], (True, False), strict=True):
        assert launches["_add_layer_norm_fwd_kernel"] == 1
        assert ("_add_layer_norm_bwd_kernel" in launches) == is_ours
        assert ("mul" in launches) != is_ours, launches
