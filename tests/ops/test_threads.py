"""The C++ ops give the same bits on one, two and three threads: no races, and fixed orders of sums.

The tests run with OMP_NUM_THREADS=1; here the number is set, and the sizes are large enough for the work to be split.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.conftest import skip_without

CPP = torch.ops.fastformer_cpp
SEED = torch.tensor([2**40 + 5, 99])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Run = Callable[[torch.dtype], tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _heads(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _attention(
    dtype: torch.dtype,
    mask: Tensor | None,
    window: tuple[int | None, int | None],
    dropout_p: float,
    seqlens: tuple[int, ...] = (170, 101),
    num_kv_heads: int = 2,
) -> tuple:
    query, key = (len(seqlens), 150, 4, 32), (len(seqlens), 170, num_kv_heads, 32)
    q, k, v, dout = _heads(dtype, query, key, key, query)
    options = (torch.tensor(seqlens, dtype=torch.int32), 0.2, *window, dropout_p, SEED)
    out, lse = CPP.attention_fwd(q, k, v, mask, *options, 0.0)
    return out, lse, *CPP.attention_bwd(dout, q, k, v, out, lse, mask, *options, mask is not None, 0.0)


def _shared_mask(dtype: torch.dtype, mask: tuple[int, ...], seqlens: tuple[int, ...], num_kv_heads: int) -> tuple:
    # Neighbouring tasks, which run at the same time, share the gradient, and meet in each of its numbers many times.
    return _attention(dtype, torch.randn(mask).to(dtype), (None, None), 0.0, seqlens, num_kv_heads)


def _varlen(dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v, dout = _heads(dtype, (300, 4, 32), (310, 2, 32), (310, 2, 32), (300, 4, 32))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ((0, 10, 200, 290), (0, 150, 300, 300)))
    options = (cu_q, cu_k, 190, 150, 0.2, None, 0, 0.1, SEED, 0.0)
    out, lse = CPP.varlen_attention_fwd(q, k, v, *options)
    return out, lse, *CPP.varlen_attention_bwd(dout, q, k, v, out, lse, *options)


def _decode(dtype: torch.dtype, seqlen_q: int, table: bool = False, rows: int = 3) -> tuple[Tensor, ...]:
    new, cache = (rows, seqlen_q, 2, 64), (rows, 440, 2, 64)
    q, k, v, k_cache, v_cache = _heads(dtype, (rows, seqlen_q, 4, 64), new, new, cache, cache)
    lengths = torch.tensor([400, 11, 300] * (rows // 3), dtype=torch.int32)
    slots = torch.randperm(rows * 440, dtype=torch.int32).view(rows, 440) if table else None
    out = CPP.decode_attention(q, k_cache, v_cache, lengths, k, v, None, slots, 0.2, True, 350, 0.0)
    return out, k_cache, v_cache


def _add_layer_norm(dtype: torch.dtype, rms_norm: bool) -> tuple[Tensor, ...]:
    x, residual, dy, ds, weight, bias = _heads(dtype, *[(400, 300)] * 4, (300,), (300,))
    y, s, mean, rstd = CPP.add_layer_norm_fwd(x, residual, weight, bias, 1e-5, 0.1, SEED, rms_norm)
    return y, s, rstd, *CPP.add_layer_norm_bwd(dy, ds, s, weight, mean, rstd, 0.1, SEED, rms_norm, True, dtype)


def _embedding(dtype: torch.dtype) -> tuple[Tensor, ...]:
    weight, table, dout = _heads(dtype, (50, 64), (120, 64), (20, 100, 64))
    ids, positions = torch.randint(40, (20, 100)), torch.randint(120, (20, 100))
    options = (2.0, 7, 0.1, SEED)
    out = CPP.embedding_fwd(ids, weight, table, positions, *options, False)
    return out, *CPP.embedding_bwd(dout, ids, positions, 50, 120, *options, dtype, False)


def _feed_forward(dtype: torch.dtype, activation: str) -> tuple[Tensor, ...]:
    wide = 600 if activation == "swiglu" else 300
    x, w1, b1, w2, b2, dout = _heads(dtype, (200, 64), (wide, 64), (wide,), (70, 300), (70,), (200, 70))
    w1, w2 = w1 * 0.1, w2 * 0.1
    out, saved = CPP.feed_forward_fwd(x, w1, b1, w2, b2, activation, 0.1, SEED, True)
    return out, saved, *CPP.feed_forward_bwd(dout, x, w1, b1, w2, saved, activation, 0.1, SEED, True)


def _linear_cross_entropy(dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, weight, bias = _heads(dtype, (600, 48), (3000, 48), (3000,))
    target = torch.randint(3000, (600,)).masked_fill_(torch.rand(600) < 0.2, -100)
    options = (-100, 0.1, False, 0.01)
    losses, lse = CPP.linear_cross_entropy_fwd(x, weight, bias, target, *options, 0.0)
    gradients = CPP.linear_cross_entropy_bwd(torch.randn(600), x, weight, bias, target, lse, *options, 0.0)
    return losses, lse, *gradients, *CPP.linear_cross_entropy_fwd_bwd(x, weight, bias, target, *options, True, 0.0)


def _linear_topk(dtype: torch.dtype, rows: int) -> tuple[Tensor, ...]:
    x, weight = _heads(dtype, (rows, 48), (7000, 48))
    integers = CPP.linear_topk(x.round(), weight.round(), 20, True, 0.0)  # many ties
    return *CPP.linear_topk(x, weight, 8, True, 0.0), *CPP.linear_topk(x, weight, 1, False, 0.0), *integers


def _rotary(dtype: torch.dtype, interleaved: bool) -> tuple[Tensor, ...]:
    (x,) = _heads(dtype, (3, 200, 4, 70))
    cos, sin = torch.randn(2, 300, 32)
    return (CPP.rotary_fwd(x, cos, sin, torch.randint(300, (3, 200)), interleaved, False),)


CASES: dict[str, Run] = {
    "attention-causal-dropout": lambda dtype: _attention(dtype, None, (None, 20), 0.1),
    # Few keys' heads: the queries' heads of a group are tasks of their own.
    "attention-mqa": lambda dtype: _attention(dtype, None, (None, 0), 0.0, (170,), 1),
    "attention-mask": lambda dtype: _attention(dtype, torch.randn(2, 4, 150, 170).to(dtype), (30, None), 0.0),
    # One gradient, to which several tasks add: those of all heads, those of all sequences, or all.
    "attention-mask-of-sequences": lambda dtype: _shared_mask(dtype, (2, 1, 1, 170), (170, 150), 4),
    "attention-mask-of-heads": lambda dtype: _shared_mask(dtype, (1, 4, 1, 170), (170, 150, 160, 140), 1),
    "attention-shared-mask": lambda dtype: _shared_mask(dtype, (1, 1, 150, 170), (170, 150), 2),
    "varlen_attention": _varlen,
    "decode_attention": lambda dtype: _decode(dtype, 1),
    "decode_attention-many-rows": lambda dtype: _decode(dtype, 2, rows=15),  # a row as a whole is a task
    "decode_attention-blocked": lambda dtype: _decode(dtype, 20),
    "decode_attention-table": lambda dtype: _decode(dtype, 1, table=True),
    "decode_attention-table-many-rows": lambda dtype: _decode(dtype, 2, table=True, rows=15),
    "decode_attention-table-blocked": lambda dtype: _decode(dtype, 20, table=True),
    "add_layer_norm": lambda dtype: _add_layer_norm(dtype, False),
    "add_layer_norm-rms": lambda dtype: _add_layer_norm(dtype, True),
    "embedding": _embedding,
    "feed_forward-relu": lambda dtype: _feed_forward(dtype, "relu"),
    "feed_forward-gelu": lambda dtype: _feed_forward(dtype, "gelu"),
    "feed_forward-swiglu": lambda dtype: _feed_forward(dtype, "swiglu"),
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_topk": lambda dtype: _linear_topk(dtype, 150),
    "linear_topk-few-rows": lambda dtype: _linear_topk(dtype, 2),
    "linear": lambda dtype: (CPP.linear(*_heads(dtype, (300, 90), (400, 90)), None),),
    "linear-few-rows": lambda dtype: (CPP.linear(*_heads(dtype, (3, 90), (400, 90)), None),),
    # Cut into other slices on each number of threads, once the left and once the right one.
    "linear_weight_grad": lambda dtype: (CPP.linear_weight_grad(*_heads(dtype, (700, 400), (700, 90))),),
    "linear_weight_grad-wide": lambda dtype: (CPP.linear_weight_grad(*_heads(dtype, (700, 90), (700, 400))),),
    "rotary": lambda dtype: _rotary(dtype, False),
    "rotary-interleaved": lambda dtype: _rotary(dtype, True),
}


ADDS_UP = ("attention-mask-of-sequences", "attention-mask-of-heads", "attention-shared-mask")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str, dtype: torch.dtype) -> None:
    skip_without("cpp", "attention")
    results = []
    # A race shows by chance: where tasks would add to the same numbers, it gets several.
    for threads in (1, 2, 3, *(8 * (2, 3) if case in ADDS_UP else ())):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        results.append(CASES[case](dtype))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# The C++ ops on CPUs with fewer instructions, or with AMX: each in a process, since a CPU's features are read once.


# Prints a digest of the results in bf16, after comparing them with plain PyTorch; also with oneDNN switched off, and
# with rows that overlap, neither of which brgemm takes.
PRODUCTS = """
import hashlib
import torch
from fastformer.ops import attention, feed_forward, linear, linear_cross_entropy, linear_topk, use_backend
from fastformer.ops._attention_reference import AttentionOptions
from tests.checks import assert_accurate

torch.manual_seed(0)
digest = hashlib.sha256()

def compare(op, *inputs):
    inputs = [each.bfloat16() for each in inputs]
    results = []
    for backend, dtype in (("cpp", torch.bfloat16), ("reference", torch.bfloat16), ("reference", torch.float64)):
        leaves = [each.to(dtype).requires_grad_() for each in inputs]
        with use_backend(backend):
            out = op(*leaves)
            dout = torch.ones_like(out).cumsum(-1) / out.shape[-1]
            results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    for found, plain, exact in zip(*results):
        assert_accurate(found, plain, exact)
        digest.update(found.float().numpy().tobytes())

def compare_all():
    q = torch.randn(2, 70, 4, 64)
    for keys in (81, 300):
        k, v = torch.randn(2, 2, keys, 2, 64)
        compare(lambda q, k, v: attention(q, k, v, is_causal=True), q, k, v)
    one, many = torch.randn(1, 1, 2, 64), torch.randn(1, 90, 2, 64)
    compare(lambda one, k: attention(one.expand_as(k), k, k), one, many)
    compare(lambda q, one: attention(q, one.expand_as(q), one.expand_as(q)), many, one)
    for rows in (3, 90, 900):
        for features in (130, 1030):  # brgemm doesn't split long sums
            compare(linear, *map(torch.randn, ((rows, features), (66, features), (66,))))
        compare(
            lambda x, w1, b1, w2, b2: feed_forward(x, w1, b1, w2, b2, activation="swiglu"),
            *map(torch.randn, ((rows, 64), (192, 64), (192,), (64, 96), (64,))),
        )
    target = torch.randint(500, (90,))
    compare(
        lambda x, weight: linear_cross_entropy(x, weight, target, reduction="sum")[None],
        *map(torch.randn, ((90, 48), (500, 48))),
    )

compare_all()
with torch.backends.mkldnn.flags(enabled=False):
    compare_all()
print(digest.hexdigest())
"""


def _digest(settings: dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-c", PRODUCTS]
    process = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()[-1]


@pytest.mark.slow
def test_products_of_bf16_on_other_cpus() -> None:
    skip_without("cpp", "attention")
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("no AVX-512 on this CPU: AVX2 has one path")
    digests = {
        name: _digest(settings)
        for name, settings in {
            "dot products": {"FASTFORMER_CPU_FEATURES": "avx512_bf16"},
            "without dot products": {"FASTFORMER_CPU_FEATURES": ""},
            "brgemm": {"FASTFORMER_BRGEMM": "1"},
        }.items()
    }
    features = torch.cpu._is_avx512_bf16_supported()
    # Each path rounds differently, so equal bits would mean that a setting has no effect.
    assert len(set(digests.values())) == (3 if features else 1) or torch.cpu._is_amx_tile_supported()
