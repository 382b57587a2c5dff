"""The modules of fastformer.nn, self-attention without weights, layers and stacks of six, in evaluation and training.

The rivals are torch.nn, torch.nn under torch.compile, and `fastformer.baseline`. All get torch.nn's weights. The
attention biases, which the baseline doesn't have, are 0, as they are at first in torch.nn. With half padding, the
lengths are spread evenly. The outputs at padding don't count: all modules write zeros there before they return, and the
gradient of the output is zero there, so fastformer's stacks are told to skip it. torch.nn has its own fast path for the
evaluation of an encoder, which also skips padding; the settings here enable it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fastformer.nn
from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape
from fastformer.baseline import transformer as baseline

LAYERS = 6
STACKED = {"encoder": "encoder_layer", "decoder": "decoder_layer"}


def lengths_of(shape: Shape) -> list[int]:
    """Returns the lengths of the sequences: with half padding, in equal steps from one (2 * batch)-th up."""
    batch, seqlen = shape["batch"], shape["seqlen"]
    if shape.get("padding", "none") == "none":
        return [seqlen] * batch
    return [max(1, round(seqlen * (2 * row + 1) / (2 * batch))) for row in range(batch)]


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes x, memory and the output's gradient (batch, seqlen, dim), and padding (batch, seqlen), True = padding."""
    size = shape["batch"], shape["seqlen"], shape["dim"]
    inputs = {name: torch.randn(size, device=device, requires_grad=True) for name in ("x", "memory")}
    padding = torch.arange(shape["seqlen"])[None] >= torch.tensor(lengths_of(shape))[:, None]
    dout = torch.randn(size).masked_fill(padding[..., None], 0.0).to(device)
    return inputs | {"dout": dout, "padding": padding.to(device)}


def make(name: str, library: Any, shape: Shape) -> nn.Module:
    """Makes a module of torch.nn, or of fastformer.nn, which has the same names and arguments; post-norm by default."""
    dim, heads, dropout = shape["dim"], shape["heads"], shape.get("dropout_p", 0.0)
    module: nn.Module
    if name == "multihead_attention":
        module = library.MultiheadAttention(dim, heads, dropout, batch_first=True)
    elif name in STACKED:
        stack = library.TransformerEncoder if name == "encoder" else library.TransformerDecoder
        module = stack(make(STACKED[name], library, shape), shape.get("layers", LAYERS))
    else:
        layer = library.TransformerEncoderLayer if name == "encoder_layer" else library.TransformerDecoderLayer
        module = layer(dim, heads, 4 * dim, dropout, batch_first=True)
    return module


def make_baseline(name: str, shape: Shape) -> nn.Module:
    """Makes the equivalent module of fastformer.baseline."""
    dim, heads, dropout = shape["dim"], shape["heads"], shape.get("dropout_p", 0.0)
    if name == "multihead_attention":
        return baseline.MultiHeadAttention(dim, heads, dropout)
    if name in STACKED:
        layers = [make_baseline(STACKED[name], shape) for _ in range(LAYERS)]
        return baseline.Stack(layers, None)  # type: ignore[arg-type]
    is_decoder = name == "decoder_layer"
    return baseline.Layer(dim, 4 * dim, heads, is_decoder, False, dropout, dropout, dropout, 1e-5)


def make_rival(kind: str, name: str, shape: Shape) -> nn.Module:
    """Makes the module of one rival, in fp32 on the CPU; all have the weights of torch.nn's module of these sizes."""
    generator = torch.get_rng_state()
    torch.manual_seed(0)
    original = make(name, nn, shape)
    for parameter in original.parameters():
        if parameter.dim() > 1:  # a stack begins with copies of one layer, which would hide swapped weights
            nn.init.xavier_uniform_(parameter)
    for layer in original.modules():
        if isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            # Far from relu's kink, one half on and one off: if rounding switched a unit, the gradient would be that of
            # another function, in any of the modules.
            layer.linear1.bias.data.fill_(4.0)[::2].neg_()
    torch.set_rng_state(generator)
    if kind == "fastformer":
        module = make(name, fastformer.nn, shape)
        if name in STACKED:
            module.padding = "skip"  # type: ignore[assignment]
        module.load_state_dict(original.state_dict())
    elif kind == "baseline":
        module = make_baseline(name, shape)
        module.load_state_dict({key: original.state_dict()[key] for key in module.state_dict()})
    else:
        module = copy.deepcopy(original)
    return module


@functools.lru_cache(maxsize=64)  # enough for the cases that passes are taken over
def _module(kind: str, name: str, key: tuple[tuple[str, Any], ...], training: bool, like: tuple[Any, ...]) -> nn.Module:
    return make_rival(kind, name, dict(key)).to(*like).train(training)


def module_of(kind: str, name: str, x: Inputs, shape: Shape, training: bool) -> nn.Module:
    """Returns the module of one rival, made once, in the dtype and on the device of the inputs."""
    sizes = {size: shape[size] for size in ("dim", "heads", "dropout_p") if size in shape}
    return _module(kind, name, tuple(sizes.items()), training, (x["x"].device, x["x"].dtype))


def call(kind: str, name: str, module: nn.Module, x: Inputs, shape: Shape) -> Tensor:
    """Calls the module as its users do. The padding mask is passed only if there is padding."""
    tokens, memory = x["x"], x["memory"]
    is_decoder = name in ("decoder", "decoder_layer")
    padding = None if shape["padding"] == "none" else x["padding"]
    hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).triu(1)
    out: Tensor
    if kind == "baseline":
        seen = (~x["padding"])[:, None, None]
        if name == "multihead_attention":
            out = module(tokens, tokens, seen)
        else:
            out = module(tokens, seen & ~hidden, memory, seen) if is_decoder else module(tokens, seen)
    elif name == "multihead_attention":
        out, _ = module(tokens, tokens, tokens, key_padding_mask=padding, need_weights=False)
    elif is_decoder:
        out = module(
            tokens, memory, tgt_mask=hidden, tgt_is_causal=True,
            tgt_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
    else:
        out = module(tokens, src_key_padding_mask=padding)
    return out


@functools.cache
def _compiled_call() -> Callable[..., Tensor]:
    """Compiles a function in this file, because dynamo skips torch.nn's own files, where Module.compile would begin."""
    compiled: Callable[..., Tensor] = torch.compile(call, dynamic=False)
    return compiled


def _call_of(kind: str) -> Callable[..., Tensor]:
    return _compiled_call() if kind == "torch.compile" else call


def evaluation(kind: str, name: str) -> Provider:
    """Makes the provider of a module in evaluation: its output, with zeros at padding."""

    def run(x: Inputs, shape: Shape) -> Tensor:
        out = _call_of(kind)(kind, name, module_of(kind, name, x, shape, False), x, shape)
        return out if shape["padding"] == "none" else out.masked_fill_(x["padding"][..., None], 0.0)

    return run


def training(kind: str, name: str, like: str | None = None) -> Provider:
    """Makes the provider of a module in training: the gradients of its inputs and of all parameters.

    like: return only those gradients that this kind of module has, too.
    """

    def run(x: Inputs, shape: Shape) -> list[Tensor]:
        torch.manual_seed(0)  # the same dropout in every call, so that backends can be compared
        module = module_of(kind, name, x, shape, True)
        parameters = dict(module.named_parameters())
        inputs = [x["x"], x["memory"]] if name in ("decoder", "decoder_layer") else [x["x"]]
        gradients = torch.autograd.grad(
            _call_of(kind)(kind, name, module, x, shape), [*inputs, *parameters.values()], x["dout"]
        )
        if like is None:
            return list(gradients)
        names = dict(module_of(like, name, x, shape, True).named_parameters()).keys()
        by_name = dict(zip(parameters, gradients[len(inputs) :], strict=True))
        return [*gradients[: len(inputs)], *(by_name[parameter] for parameter in names)]

    return run


def flops_of(name: str, shape: Shape, training: bool) -> float:
    """Counts the products of real tokens: 2 a weight forward, and 4 and 10 a score and column of q in attention."""
    lengths, dim = lengths_of(shape), shape["dim"]
    tokens, scores = sum(lengths), sum(n * n for n in lengths)
    attention, feed_forward = 4 * dim**2, 8 * dim**2
    weights, seen = {
        "multihead_attention": (attention, scores),
        "encoder_layer": (attention + feed_forward, scores),
        "decoder_layer": (2 * attention + feed_forward, 1.5 * scores),  # half of its self-attention's scores are hidden
    }[STACKED.get(name, name)]
    linear, products = 2.0 * tokens * weights, 4.0 * seen * dim
    layers = shape.get("layers", LAYERS) if name in STACKED else 1
    return layers * (3 * linear + 3.5 * products if training else linear + products)


def _shapes(batch: int, seqlen: int, dim: int, heads: int) -> list[dict[str, Any]]:
    sizes = {"batch": batch, "seqlen": seqlen, "dim": dim, "heads": heads}
    return [{**sizes, "padding": padding} for padding in ("half", "none")]


def benchmarks_of(name: str) -> list[Benchmark]:
    """Returns the evaluation and training benchmarks of one module.

    Training runs with the usual dropout, and without dropout to be checked.
    """
    shapes = {"cpu": _shapes(8, 128, 512, 8), "cuda": _shapes(32, 512, 1024, 16)}
    kinds = ("fastformer", "torch.nn", "torch.compile", "baseline")
    common: dict[str, Any] = {
        "suite": "modules",
        "make_inputs": make_inputs,
        "baseline": "torch.nn",
        "compiled": ("torch.compile",),
        "tokens": lambda shape: sum(lengths_of(shape)),
    }
    return [
        Benchmark(
            name=name,
            shapes=shapes,
            providers={kind: evaluation(kind, name) for kind in kinds},
            modes=("fwd",),
            flops=lambda shape, mode: flops_of(name, shape, training=False),
            **common,
        ),
        Benchmark(
            name=f"{name}_training",
            shapes={
                device: [{**shape, "dropout_p": p} for p in (0.0, 0.1) for shape in device_shapes]
                for device, device_shapes in shapes.items()
            },
            providers={kind: training(kind, name) for kind in kinds},
            oracles={"baseline": training("torch.nn", name, like="baseline")},
            modes=("step",),
            quick=int(name not in STACKED),  # compiling a stack's backward pass takes a minute, like checking it
            flops=lambda shape, mode: flops_of(name, shape, training=True),
            **common,
        ),
    ]


BENCHMARKS = [
    benchmark
    for name in ("multihead_attention", "encoder_layer", "encoder", "decoder_layer", "decoder")
    for benchmark in benchmarks_of(name)
]
