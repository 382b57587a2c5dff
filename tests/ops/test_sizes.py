"""Tests the C++ ops at every size around the widths of vectors and panels: no tail is lost or written twice.

How exact the ops are is tested by the rule, op by op. Here a wrong element is an error of the order of the result, so
the bound is loose and one draw of each size is enough.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastformer.ops import (
    add_layer_norm,
    attention,
    decode_attention,
    embedding,
    feed_forward,
    linear_cross_entropy,
    linear_topk,
    rotary,
    rotary_tables,
    use_backend,
)
from tests.conftest import skip_without

SIZES = [*range(1, 36), 47, 48, 49, *range(62, 67), *range(127, 130), *range(255, 258)]
Op = Callable[..., Tensor]
Inputs = dict[str, Tensor]


def _random(**shapes: tuple[int, ...]) -> Inputs:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def _head_dim(n: int) -> tuple[Op, Inputs]:
    return (lambda q, k, v: attention(q, k, v, is_causal=True), _random(q=(1, 5, 2, n), k=(1, 7, 1, n), v=(1, 7, 1, n)))


def _keys(n: int) -> tuple[Op, Inputs]:
    inputs = _random(q=(1, 3, 1, 8), k=(1, n, 1, 8), v=(1, n, 1, 8), attn_mask=(1, 1, 3, n))
    return lambda q, k, v, attn_mask: attention(q, k, v, attn_mask=attn_mask), inputs


def _queries(n: int) -> tuple[Op, Inputs]:
    return lambda q, k, v: attention(q, k, v), _random(q=(1, n, 1, 8), k=(1, 5, 1, 8), v=(1, 5, 1, 8))


def _cached(n: int) -> tuple[Op, Inputs]:
    lengths = torch.tensor([n, max(n - 3, 0)], dtype=torch.int32)
    inputs = _random(q=(2, 1, 2, n), k=(2, 1, 1, n), k_cache=(2, n + 1, 1, n), v_cache=(2, n + 1, 1, n))

    def op(q: Tensor, k: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return decode_attention(q, k_cache.clone(), v_cache.clone(), lengths, k=k, v=k)

    return op, inputs


def _norm(n: int) -> tuple[Op, Inputs]:
    seed = torch.tensor([5, n])

    def op(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat(add_layer_norm(x, residual, weight, bias, dropout_p=0.2, dropout_seed=seed), -1)

    return op, _random(x=(3, n), residual=(3, n), weight=(n,), bias=(n,))


def _embedding(n: int) -> tuple[Op, Inputs]:
    ids, seed = torch.tensor([[4, 0, 4], [1, 2, 2]]), torch.tensor([5, n])

    def op(weight: Tensor, table: Tensor) -> Tensor:
        return embedding(ids, weight, position_table=table, padding_idx=1, dropout_p=0.2, dropout_seed=seed)

    return op, _random(weight=(5, n), table=(4, n))


def _rotary(n: int) -> tuple[Op, Inputs]:
    cos, sin = rotary_tables(5, 2 * n)
    return (
        lambda x: torch.cat((rotary(x, cos, sin), rotary(x, cos, sin, interleaved=True)), -1),
        _random(x=(1, 5, 2, 2 * n + n % 3)),
    )


def _hidden(n: int) -> tuple[Op, Inputs]:
    seed = torch.tensor([5, n])

    def op(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        options = {"dropout_p": 0.2, "dropout_seed": seed}
        relu = feed_forward(x, w1[:n], b1[:n], w2, b2, **options)
        return torch.cat((relu, feed_forward(x, w1, b1, w2, b2, activation="swiglu", **options)), -1)

    return op, _random(x=(33, 9), w1=(2 * n, 9), b1=(2 * n,), w2=(7, n), b2=(7,))


def _features(n: int) -> tuple[Op, Inputs]:
    def op(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return feed_forward(x, w1, b1, w2, b2, activation="gelu")

    return op, _random(x=(33, n), w1=(9, n), b1=(9,), w2=(n, 9), b2=(n,))


def _rows(n: int) -> tuple[Op, Inputs]:
    def op(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return feed_forward(x, w1, b1, w2, b2, activation="gelu_tanh")

    return op, _random(x=(n, 5), w1=(9, 5), b1=(9,), w2=(6, 9), b2=(6,))


def _loss(rows: int, dim: int, vocab_size: int) -> tuple[Op, Inputs]:
    target = torch.randint(vocab_size, (rows,))
    target[0] = vocab_size - 1

    def op(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target, bias, label_smoothing=0.1, reduction="sum")

    return op, _random(x=(rows, dim), weight=(vocab_size, dim), bias=(vocab_size,))


def _best(rows: int, dim: int, vocab_size: int) -> tuple[Op, Inputs]:
    # All of them: a logit that is lost, or found twice, moves others.
    return lambda x, weight: linear_topk(x, weight, vocab_size).values, _random(x=(rows, dim), weight=(vocab_size, dim))


CASES: dict[str, Callable[[int], tuple[Op, Inputs]]] = {
    "attention-head_dim": _head_dim,
    "attention-keys": _keys,
    "attention-queries": _queries,
    "decode_attention": _cached,
    "add_layer_norm": _norm,
    "embedding": _embedding,
    "rotary": _rotary,
    "feed_forward-hidden": _hidden,
    "feed_forward-features": _features,
    "feed_forward-rows": _rows,
    "linear_cross_entropy-classes": lambda n: _loss(5, 6, n),
    "linear_cross_entropy-features": lambda n: _loss(5, n, 9),
    "linear_cross_entropy-rows": lambda n: _loss(n, 6, 9),
    "linear_topk-classes": lambda n: _best(9, 6, n),
    "linear_topk-classes-few-rows": lambda n: _best(5, 6, n),
    "linear_topk-features": lambda n: _best(9, n, 9),
    "linear_topk-features-few-rows": lambda n: _best(3, n, 40),
    "linear_topk-rows": lambda n: _best(n, 6, 9),
}


def _results(op: Op, inputs: Inputs, backend: str, learns: bool) -> Inputs:
    leaves = {name: value.detach().requires_grad_(learns) for name, value in inputs.items()}
    with use_backend(backend):
        out = op(**leaves)
        if not learns:
            return {"out": out}
        dout = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).bfloat16().to(out.dtype) + 1.5
        gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip((f"d{name}" for name in leaves), gradients, strict=True))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_every_size(case: str, dtype: torch.dtype) -> None:
    skip_without("cpp", "attention")
    tolerance = 2e-5 if dtype == torch.float32 else 0.04
    for n in SIZES:
        op, inputs = CASES[case](n)
        narrow = {name: value.to(dtype) for name, value in inputs.items()}
        learns = not case.startswith(("decode_attention", "linear_topk"))
        ours = _results(op, narrow, "cpp", learns)
        exact = _results(op, {name: value.double() for name, value in narrow.items()}, "reference", learns)
        for name, value in ours.items():
            error = float((value.double() - exact[name].double()).abs().max())
            allowed = tolerance * max(1.0, float(exact[name].abs().max()))
            assert error <= allowed, f"{name} at size {n}: error {error:.1e}, allowed {allowed:.1e}"
