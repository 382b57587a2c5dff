"""A valid call of every op, as a function of the number of tokens (or rows of a cache)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer import ops
from fastformer.ops import use_backend
from tests.conftest import skip_without
from tests.covering import each

BACKENDS = ("reference", "cpp", "triton")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SEED = torch.tensor([2**40 + 7, 5])


@dataclass(frozen=True)
class OpCall:
    """A way to call an op.

    Attributes:
        name: the name of the op, and the special property of the call.
        tensors: a function from the number of tokens to the op's tensors by name.
        options: the other arguments of the op.
        learns: whether the op has gradients.
        narrows: whether autocast casts its inputs.
    """

    name: str
    tensors: Callable[[int], dict[str, Tensor]]
    options: Callable[[int], dict[str, Any]] = lambda n: {}
    learns: bool = True
    narrows: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def op(self) -> str:
        return self.name.partition(",")[0]

    @property
    def stem(self) -> str:
        """The stem of the file with the kernels."""
        return "attention" if self.op == "varlen_attention" else self.op

    def __call__(self, n: int, **changes: Any) -> tuple[Tensor, ...]:
        """Returns the outputs of the call for n tokens, with some arguments changed."""
        arguments = {**self.tensors(n), **self.options(n), **changes}
        outputs = getattr(ops, self.op)(**arguments)
        return tuple(outputs) if isinstance(outputs, tuple) else (outputs,)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _heads(n: int) -> dict[str, Tensor]:
    q, k, v = (draw(2, n, heads, 16, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    return {"q": q, "k": k, "v": v}


def _masked(n: int) -> dict[str, Tensor]:
    return {"attn_mask": draw(n, n), "seqlens_k": ints(n, n // 2)}


def _packed(n: int) -> dict[str, Tensor]:
    ends = ints(0, n // 2, n)
    rows = {name: tensor[0] for name, tensor in _heads(n).items()}
    return {**rows, "cu_seqlens_q": ends, "cu_seqlens_k": ends.clone(), "dropout_seed": SEED}


def _cached(n: int) -> dict[str, Tensor]:
    """Returns n rows of a cache of 5 tokens each."""
    heads = {name: draw(n, 1, 4, 16, seed=seed) for seed, name in enumerate("qkv")}
    caches = {f"{name}_cache": draw(n, 5, 4, 16, seed=seed) for seed, name in enumerate("kv")}
    return {**heads, **caches, "cache_seqlens": torch.arange(n, dtype=torch.int32) % 3}


def _table(n: int) -> dict[str, Tensor]:
    order = torch.randperm(5 * n, generator=torch.Generator().manual_seed(n)).int()
    cos, sin = ops.rotary_tables(9, 8)
    return {**_cached(n), "slot_table": order.view(n, 5), "cos": cos, "sin": sin}


def _chosen_rows(n: int) -> dict[str, Tensor]:
    tensors = _cached(n)
    del tensors["k"], tensors["v"]
    return tensors | {"cache_batch_idx": torch.arange(n - 1, -1, -1, dtype=torch.int32)}


def _network(n: int) -> dict[str, Tensor]:
    weights = {"weight1": draw(12, 16), "bias1": draw(12), "weight2": draw(8, 6), "bias2": draw(8)}
    return {"x": draw(n, 16), **weights, "dropout_seed": SEED}


def _norm(n: int) -> dict[str, Tensor]:
    rows = {"x": draw(n, 16), "residual": draw(n, 16, seed=1)}
    return {**rows, "weight": draw(16), "bias": draw(16, seed=1), "dropout_seed": SEED}


def _tokens(n: int) -> dict[str, Tensor]:
    ids = {"ids": torch.arange(2 * n).view(2, n) * 5 % 7, "positions": torch.arange(2 * n).view(2, n) % 5}
    return {**ids, "weight": draw(7, 16), "position_table": draw(5, 16), "dropout_seed": SEED}


def _turned(n: int) -> dict[str, Tensor]:
    cos, sin = ops.rotary_tables(9, 8)
    return {"x": draw(2, n, 3, 16), "cos": cos, "sin": sin, "positions": torch.arange(2 * n).view(2, n) % 9}


def _classes(n: int) -> dict[str, Tensor]:
    return {"x": draw(n, 16), "weight": draw(11, 16), "target": torch.arange(n) * 3 % 11, "bias": draw(11)}


CALLS = [
    OpCall("attention", _heads, lambda n: {"is_causal": True}),
    OpCall("attention, mask", lambda n: _heads(n) | _masked(n)),
    OpCall("attention, dropout", lambda n: _heads(n) | {"dropout_seed": SEED}, lambda n: {"dropout_p": 0.5}),
    OpCall("attention, softcap", lambda n: _heads(n) | _masked(n), lambda n: {"softcap": 0.7}),
    OpCall("varlen_attention", _packed, lambda n: {"max_seqlen_q": n, "max_seqlen_k": n, "dropout_p": 0.5}),
    OpCall(
        "attention_weights",
        lambda n: {**{k: t for k, t in _heads(n).items() if k != "v"}, "lse": 3 + draw(2, 4, n), **_masked(n)},
    ),
    OpCall("decode_attention", _cached, learns=False),
    OpCall("decode_attention, table", _table, learns=False),
    OpCall("decode_attention, softcap", _table, lambda n: {"softcap": 0.7}, learns=False),
    OpCall("decode_attention, rows", _chosen_rows, lambda n: {"is_causal": False}, learns=False),
    OpCall("feed_forward", _network, lambda n: {"activation": "swiglu", "dropout_p": 0.5}),
    OpCall("feed_forward, relu", lambda n: _network(n) | {"weight2": draw(8, 12)}, lambda n: {"dropout_p": 0.5}),
    OpCall("add_layer_norm", _norm, lambda n: {"dropout_p": 0.5}, narrows=False),
    OpCall("add_layer_norm, rms", lambda n: {"x": draw(n, 16)}, lambda n: {"rms_norm": True}, narrows=False),
    OpCall(
        "add_layer_norm, a wider stream",
        lambda n: _norm(n) | {"x": draw(n, 16).bfloat16()},
        lambda n: {"dropout_p": 0.5},
        narrows=False,
    ),
    OpCall("embedding", _tokens, lambda n: {"scale": 3.0, "padding_idx": 1, "dropout_p": 0.5}, narrows=False),
    OpCall("rotary", _turned, narrows=False),
    OpCall("rotary, interleaved", lambda n: _turned(n), lambda n: {"interleaved": True}, narrows=False),
    OpCall("linear", lambda n: {"x": draw(n, 16), "weight": draw(11, 16), "bias": draw(11)}),
    OpCall("linear_cross_entropy", _classes, lambda n: {"label_smoothing": 0.1}),
    OpCall("linear_cross_entropy, none", _classes, lambda n: {"reduction": "none", "z_loss": 0.01}),
    OpCall("linear_cross_entropy, softcap", _classes, lambda n: {"label_smoothing": 0.1, "softcap": 2.0}),
    OpCall("linear_topk", lambda n: {"x": draw(n, 16), "weight": draw(11, 16)}, lambda n: {"k": 3}, learns=False),
]
BY_NAME = {call.name: call for call in CALLS}
# They come in one dtype, whatever the others have.
OF_ONE_DTYPE = {"cos", "sin", "lse"}


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Casts floating-point tensors to a dtype, as an op accepts them."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and name not in OF_ONE_DTYPE else tensor
        for name, tensor in tensors.items()
    }


def results(
    call: OpCall, n: int, tensors: dict[str, Tensor], around_backward: Any = contextlib.nullcontext, **options: Any
) -> dict[str, Tensor]:
    """Returns the outputs and the gradients of the floating-point tensors, by name."""
    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in tensors.items()
        if call.learns and tensor.is_floating_point() and name not in OF_ONE_DTYPE
    }
    copies = {name: tensor.clone() for name, tensor in tensors.items() if name.endswith("_cache")}
    outputs = call(n, **tensors | leaves | copies, **options)
    values = {f"output {i}": output.detach() for i, output in enumerate(outputs)} | copies
    if not leaves:
        return values
    learned = [output for output in outputs if output.requires_grad]
    douts = [draw(*output.shape).to(output) for output in learned]
    with around_backward():
        gradients = torch.autograd.grad(learned, list(leaves.values()), douts, allow_unused=True)
    return values | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}


@pytest.fixture(params=BACKENDS)
def forced(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on each backend, with every op forced onto it."""
    with use_backend(request.param):
        yield request.param


def all_calls(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test with every call as one test, for short tests; it leaves out calls that the backend `forced` lacks."""

    @functools.wraps(test)
    def run(call: OpCall, **others: Any) -> None:
        if "forced" in others:
            skip_without(others["forced"], call.stem)
        test(call=call, **others)

    return each("call", CALLS)(run)
