"""The launches of a training step on a GPU, counted on a stand-in for it; `check` needs a process of its own.

Small models train as fast as the host launches, so each of these counts is a bound: lower it when a change saves some.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.gpu import stand_in

stand_in.stand_in()

import torch  # noqa: E402

import fastformer.nn  # noqa: E402
import fastformer.ops  # noqa: E402
from fastformer.data import Example, collate  # noqa: E402
from fastformer.models import Transformer  # noqa: E402
from fastformer.nn.copied_weights import copied_weights  # noqa: E402

Made = tuple[torch.nn.Module, Callable[[], torch.Tensor]]

MAKERS = {"zeros", "new_zeros", "zeros_like", "full", "new_full", "ones_like"}
# The stand-in fills with zeros what is empty on a GPU. The others launch nothing by themselves.
IDLE = {
    *("zero_", "fill_", "to", "linear", "matmul", "contiguous", "item", "_local_scalar_dense", "promote_types"),
    *("empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "lift_fresh", "result_type"),
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "view_as", "flatten", "unflatten", "as_strided", "alias"),
    *("t", "transpose", "permute", "expand", "expand_as", "unsqueeze", "squeeze", "detach", "select", "slice"),
    *("narrow", "slice_backward", "numpy_T", "chunk", "split", "split_with_sizes", "tensor_split", "unbind"),
}


def launches(call: Callable[[], Any]) -> Counter[str]:
    stand_in.grids.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        call()
    found = Counter(name for name, _ in stand_in.grids)
    waiting = [event for event in profiled.events() or () if event.cpu_parent is None]
    while waiting:
        event = waiting.pop()
        library, _, name = event.name.partition("::")
        if library == "aten" and name not in IDLE:
            found["memset" if name in MAKERS else name] += 1
        else:
            waiting += event.cpu_children
    return found


def of_the_model(layers: int) -> Made:
    sizes: Any = {"d_model": 64, "num_heads": 2, "d_ff": 128, "num_encoder_layers": layers}
    model = Transformer.from_preset("base", vocab_size=500, **sizes, num_decoder_layers=layers)
    examples = [Example([5, 6, 7, 8], [5, 6, 7]), Example([5, 6, 7, 8, 9], [5, 6, 7, 9])]
    batch = collate(examples, packed=True)
    layouts: Any = {"source_layout": batch.source_layout, "target_layout": batch.target_layout}

    def loss() -> torch.Tensor:
        with copied_weights(model):
            return model.loss(batch.source, batch.target_in, batch.target_out, **layouts)

    return model, loss


def of_the_modules(layers: int) -> Made:
    layer = fastformer.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    model = fastformer.nn.TransformerEncoder(layer, layers)
    x = torch.zeros(2, 16, 64)
    return model, lambda: model(x).sum()


def of_an_accelerated_model(layers: int) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_embd=64, n_layer=layers, n_head=2)
    model = fastformer.accelerate(GPT2LMHeadModel(config), fused_loss=True)
    ids = torch.ones(2, 16, dtype=torch.long)
    return model, lambda: model(ids, labels=ids).loss


def counted(make: Callable[[int], Made], layers: int) -> Counter[str]:
    torch.manual_seed(0)
    model, forward = make(layers)
    model.train()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward()
        loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    return launches(step)


def of_a_norm(dim: int) -> Counter[str]:
    x, weight, bias = (torch.zeros(*shape, dim, requires_grad=True) for shape in ((2,), (), ()))
    return launches(lambda: fastformer.ops.add_layer_norm(x, None, weight, bias)[0].sum().backward())


# The launches of a layer, which is one on each side of the first, and those of the rest.
BOUNDS = {of_the_model: (68, 49), of_the_modules: (58, 3), of_an_accelerated_model: (69, 37)}


def check() -> None:
    """Compares a step with two layers and with three: a layer launches no more than its bound, nor does the rest."""
    for make, (of_a_layer, of_the_rest) in BOUNDS.items():
        two, three = (counted(make, layers) for layers in (2, 3))
        layer = three - two
        rest = two - layer - layer
        assert layer.total() <= of_a_layer, (make, layer)
        assert rest.total() <= of_the_rest, (make, rest)
        assert layer["_attention_fwd_kernel"] == (3 if make is of_the_model else 1)  # the count sees our kernels
        if make is of_the_model:
            # Cross-attention reads the rows for queries and those for keys by themselves, in one weight: the gradients
            # of its parts aren't added. Nor are those of the memory, which all layers project together.
            assert layer["add_"] == 0 and layer["copy_"] == 0, layer
    # A norm that is too wide for its backward kernel is differentiated by PyTorch. The forward kernel takes wider rows.
    os.environ["FASTFORMER_STRICT"] = "0"
    for dim, is_ours in ((512, True), (16384, False)):
        found = of_a_norm(dim)
        assert found["_add_layer_norm_fwd_kernel"] == 1, found
        assert ("_add_layer_norm_bwd_kernel" in found) == is_ours, found
        assert ("mul" in found) != is_ours, found
    os.environ["FASTFORMER_STRICT"] = "1"
