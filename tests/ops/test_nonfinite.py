"""NaN and infinities pass through every op as through plain PyTorch: none is lost, and none spreads further.

A NaN that a kernel turns into a number is an error that stays hidden: the loss stays finite while a weight is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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
    rotary,
    rotary_tables,
    varlen_attention,
)
from tests.conftest import HAS_GPU, on_backend
from tests.covering import on_backends
from tests.ops import test_add_layer_norm, test_embedding, test_feed_forward, test_linear_cross_entropy, test_rotary
from tests.ops.attention_cases import Case, plain_attention

Tensors = dict[str, Tensor | None]
VALUES = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
SEED = torch.zeros(2, dtype=torch.int64)


@dataclass(frozen=True)
class OpCase:
    """An op, the same computation in plain PyTorch, and their floating-point inputs."""

    name: str
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    inputs: Callable[[], Tensors]
    learns: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def stem(self) -> str:
        return self.name.partition("-")[0].removeprefix("varlen_")


def _attention_inputs(seqlen_k: int = 37, heads: int = 2, mask: bool = False) -> Tensors:
    # Two vectors of AVX-512 and a tail; a second tile of keys where seqlen_k is above 128.
    k = torch.randn(1, seqlen_k, heads, 16)
    tensors: Tensors = {"q": torch.randn(1, 5, 2, 16), "k": k, "v": torch.randn_like(k)}
    return tensors | ({"attn_mask": torch.randn(1, 1, 5, seqlen_k)} if mask else {})


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return plain_attention(q, k, v, attn_mask, None, Case(""), SEED)[0]


def _varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, n, len(x)], dtype=torch.int32) for n, x in ((2, q), (20, k)))
    return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, 3, 20)


def _plain_varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = ((slice(0, 2), slice(0, 20)), (slice(2, None), slice(20, None)))
    return torch.cat([_plain_attention(q[None, i], k[None, j], v[None, j])[0] for i, j in parts])


def _decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = torch.full((len(k),), k.shape[1], dtype=torch.int32)
    return decode_attention(q, k.clone(), v.clone(), lengths, is_causal=False)


def _loss_inputs() -> Tensors:
    inputs = test_linear_cross_entropy.make_inputs((6, 5), 300, "cpu")  # a whole tile of classes and a part of one
    return {name: inputs[name] for name in ("x", "weight", "bias")}


TARGET = torch.tensor([299, 0, 4, 7, 255, 256])
_IDS = torch.tensor([[2, 0, 2, 1], [4, 2, 0, 0]])
_TABLES = rotary_tables(4, 12)
OPS = [
    OpCase("attention", attention, _plain_attention, _attention_inputs),
    OpCase("attention-gqa", attention, _plain_attention, partial(_attention_inputs, heads=1)),
    OpCase("attention-two-tiles", attention, _plain_attention, partial(_attention_inputs, 150)),
    OpCase("attention-mask", attention, _plain_attention, partial(_attention_inputs, mask=True)),
    OpCase(
        "varlen_attention",
        _varlen,
        _plain_varlen,
        lambda: {name: value[0] for name, value in _attention_inputs().items()},
    ),
    OpCase("decode_attention", _decode, _plain_attention, _attention_inputs, learns=False),
    *(
        OpCase(
            f"add_layer_norm-{'rms' if rms_norm else 'layer'}",
            lambda rms_norm=rms_norm, **inputs: add_layer_norm(**inputs, rms_norm=rms_norm)[0],
            lambda rms_norm=rms_norm, **inputs: test_add_layer_norm.plain(**inputs, rms_norm=rms_norm)[0],
            lambda: test_add_layer_norm.make_inputs((5, 37), "cpu"),
        )
        for rms_norm in (False, True)
    ),
    *(
        OpCase(
            f"feed_forward-{activation}-{rows}",
            partial(feed_forward, activation=activation),
            partial(test_feed_forward.plain, activation=activation),
            partial(test_feed_forward.make_inputs, (rows, 12), 37, activation, "cpu"),
        )
        for activation in test_feed_forward.ACTIVATIONS
        for rows in (5, 40)  # few rows take another way
    ),
    *(
        OpCase(
            f"linear_cross_entropy-{reduction}",
            partial(linear_cross_entropy, target=TARGET, reduction=reduction, **options),
            partial(test_linear_cross_entropy.plain, target=TARGET, reduction=reduction, **options),
            _loss_inputs,
        )
        for reduction, options in (("mean", {}), ("none", {}), ("sum", {"label_smoothing": 0.1, "z_loss": 0.01}))
    ),
    OpCase(
        "embedding",
        partial(embedding, _IDS, scale=3.0, padding_idx=0),
        lambda weight, position_table: test_embedding.plain(
            _IDS, weight, position_table, None, scale=3.0, padding_idx=0
        ),
        lambda: {"weight": torch.randn(5, 37), "position_table": torch.randn(4, 37)},
    ),
    *(
        OpCase(
            f"rotary-{interleaved}",
            partial(rotary, cos=_TABLES[0], sin=_TABLES[1], interleaved=interleaved),
            partial(test_rotary.plain, cos=_TABLES[0], sin=_TABLES[1], interleaved=interleaved),
            lambda: {"x": torch.randn(1, 4, 2, 15)},
        )
        for interleaved in (False, True)
    ),
]

# What has a fused function of PyTorch's.
FUSED = ("attention", "attention-gqa", "attention-two-tiles", "attention-mask")
# Triton's interpreter is slow: one size of each kind runs on it.
NOT_INTERPRETED = {*FUSED[1:], "decode_attention", "linear_cross_entropy-sum"}


BACKENDS = ["reference", "fallback", "cpp", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    op = request.node.callspec.params.get("op", OPS[0])
    yield from on_backend(request, op.stem)


def _same(a: Tensor, b: Tensor, backend: str) -> bool:
    """Checks for equal bits; if the reference recomputes a result with NaN, up to its rounding."""
    if backend != "fallback":
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=0.02, atol=0.02) if a.dtype == torch.bfloat16 else torch.allclose(a, b, atol=1e-5)


def _results(op: OpCase, function: Callable, tensors: Tensors, dout: Tensor) -> Tensors:
    """Returns the output and the gradients by name."""
    leaves = {name: value.detach().requires_grad_(op.learns) for name, value in tensors.items()}
    output = function(**leaves)
    if not op.learns:
        return {"output": output}
    gradients = torch.autograd.grad(output, list(leaves.values()), dout.to(output.dtype))
    return {"output": output.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def _poisoned(tensors: Tensors, name: str, position: int, value: float) -> Tensors:
    bad = tensors[name].clone(memory_format=torch.contiguous_format)
    bad.view(-1)[position] = value
    return tensors | {name: bad}


def lacks(op: OpCase, dtype: torch.dtype, backend: str) -> bool:
    """Triton's kernels run in fp32, in the interpreter. The C++ ops alone take another way if rows are few."""
    if backend == "triton" and (HAS_GPU or dtype != torch.float32 or op.name in NOT_INTERPRETED):
        return True
    return backend == "fallback" and op.name not in FUSED or backend != "cpp" and op.name.endswith("-40")


@on_backends("op", OPS, BACKENDS, ["fp32", "bf16", "fp64"], lacks)
def test_as_in_plain_pytorch(op: OpCase, backend: str, dtype: torch.dtype, device: str) -> None:
    tensors = {name: value.to(dtype) for name, value in op.inputs().items()}
    with torch.no_grad():
        # Drawn in fp32: the numbers of the other dtypes are others in other versions of PyTorch.
        dout = torch.randn_like(op.plain(**tensors), dtype=torch.float32).to(dtype) if op.learns else torch.zeros(())
    inputs = tensors | ({"dout": dout} if op.learns else {})

    def run(function: Callable, inputs: Tensors) -> Tensors:
        return _results(op, function, {name: inputs[name] for name in tensors}, inputs.get("dout", dout))

    def run_plain(inputs: Tensors) -> Tensors:
        # In fp32 for bf16: oneDNN's bf16 products with AMX read beyond a row, where a NaN or an infinity spreads.
        return run(op.plain, {name: x.float() if dtype == torch.bfloat16 else x for name, x in inputs.items()})

    clean, plain_clean = run(op.ours, inputs), run_plain(inputs)
    for name, tensor in inputs.items():
        last = tensor.numel() - 1
        places = {"nan": (0, last // 2, last), "inf": (last,), "-inf": (0,)}
        if backend == "triton":
            places = {"nan": (last // 2,), "inf": (last // 2,)}
        for value, positions in places.items():
            for position in positions:
                bad = _poisoned(inputs, name, position, VALUES[value])
                ours, plain = run(op.ours, bad), run_plain(bad)
                for result, expected in plain.items():
                    message = f"{result} with {value} at {position} of {name}"
                    actual, finite = ours[result].to(expected.dtype), expected.isfinite()
                    # What inf - inf or 0 * inf meets is a matter of the order: NaN and inf count as the same there.
                    assert torch.equal(actual.isfinite(), finite), message
                    if value == "nan":
                        assert torch.equal(actual.isnan(), expected.isnan()), message
                        untouched = expected == plain_clean[result]
                        assert _same(ours[result][untouched], clean[result][untouched], backend), message
                    else:
                        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
                        torch.testing.assert_close(
                            actual[finite], expected[finite], rtol=tolerance, atol=tolerance, msg=message
                        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_keys_that_no_query_sees_may_contain_anything(backend: str, dtype: torch.dtype, device: str) -> None:
    """NaN keys that a mask or a length hides don't change the output."""
    if backend == "triton" and (device != "cpu" or dtype != torch.float32):
        pytest.skip("Triton's kernels are checked in fp32, through the interpreter")
    q, k, v = (value.to(dtype) for value in _attention_inputs().values())
    seen = torch.ones(1, 1, 5, 37, dtype=torch.bool)
    seen[..., 20] = seen[..., 36] = False
    bad = k.masked_fill(~seen[0, 0, 0].view(1, -1, 1, 1), torch.nan)
    assert _same(attention(q, bad, v, attn_mask=seen), attention(q, k, v, attn_mask=seen), backend)
    lengths = torch.tensor([36], dtype=torch.int32)
    bad = k.index_fill(1, torch.tensor([36]), torch.nan)
    assert _same(attention(q, bad, v, seqlens_k=lengths), attention(q, k, v, seqlens_k=lengths), backend)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_ignored_row_may_contain_anything(backend: str, reduction: str, device: str) -> None:
    """A NaN in a row of padding doesn't affect the loss and the gradients of other rows."""
    inputs = {name: value.to(device) for name, value in _loss_inputs().items()}
    target = TARGET.to(device).index_fill(0, torch.tensor([2], device=device), -100)
    results = []
    for row in (inputs["x"][2], torch.nan):
        x = inputs["x"].clone()
        x[2] = row
        x.requires_grad_()
        loss = linear_cross_entropy(x, inputs["weight"], target, inputs["bias"], reduction=reduction)
        (dx,) = torch.autograd.grad(loss.sum(), x)
        results.append((loss, dx[target != -100]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
