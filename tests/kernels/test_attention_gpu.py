"""Tests the attention kernels on a GPU: bf16, the shipped tiles, torch.compile, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_cases import OPTIONS, Case, case_of, check, make_inputs, run_triton  # noqa: E402
from tests.kernels.repeats import assert_repeats  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SINGLES = [case_of(), *(case for name in OPTIONS if (case := case_of(name)) is not None)]
PAIRS = [case for names in combinations(OPTIONS, 2) if (case := case_of(*names)) is not None]
CASES = [*SINGLES, *PAIRS]


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_option_and_pair(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda")


@pytest.mark.parametrize("case, dtype", [*product(SINGLES, [*HALF, torch.float32]), *product(PAIRS, HALF)], ids=str)
def test_several_blocks(case: Case, dtype: torch.dtype) -> None:
    """Every option runs over several tiles of rows and keys: pipelined steps, atomics, both ends of a range."""
    check(case.times(11), dtype, "cuda")


@pytest.mark.parametrize("options", [("bias",), ("additive_keys",), ("bias", "gqa")], ids=str)
def test_gradients_of_a_mask_repeat(options: tuple[str, ...]) -> None:
    """In the deterministic variant, this includes the sums of a shared bias."""
    case = case_of(*options).times(11)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)
    first, second = run_triton(case, inputs), run_triton(case, inputs)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("deterministic", [False, True])
def test_shipped_tiles(head_dim: int, dropout_p: float, deterministic: bool) -> None:
    """Each config of the tables runs with lengths beyond every tile and tails, in both variants of the backward."""
    torch.use_deterministic_algorithms(deterministic)
    for seqlen_q, seqlen_k, window in ((513, 777, (None, 0)), (777, 513, (None, None)), (300, 300, (70, 11))):
        case = Case(
            batch=1, heads=4, kv_heads=2, head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, window=window,
            dropout_p=dropout_p,
        )  # fmt: skip
        check(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [("bool_keys",), ("additive_keys",), ("bool",), ("additive",), ("bias",)], ids=str)
def test_masks_of_many_blocks(options: tuple[str, ...], head_dim: int) -> None:
    """Masks are loaded before the products, with aligned and odd rows, alone and with dropout and a causal window."""
    for seqlen_q, seqlen_k in ((512, 1024), (333, 777)):
        more: dict[str, Any]
        for more in ({}, {"dropout_p": 0.1, "window": (None, 0)}):
            case = Case(
                **OPTIONS[options[0]] | {"head_dim": head_dim, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k} | more
            )
            check(case, torch.bfloat16, "cuda")


def test_a_key_that_a_mask_hides_may_hold_nan() -> None:
    """Under a boolean mask, the limit on the score turns a NaN score into -inf on the device."""
    case = Case(mask="bool", mask_shape=(True, False, False, True), seqlen_q=300, seqlen_k=500)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    clean = run_triton(case, inputs)
    k, mask = inputs["k"], inputs["mask"]
    assert k is not None and mask is not None
    k[~mask[:, 0, 0]] = float("nan")
    poisoned = run_triton(case, inputs)
    assert torch.equal(clean["out"], poisoned["out"]) and torch.equal(clean["lse"], poisoned["lse"])


def test_beyond_32_bits() -> None:
    """With more than 2**31 elements in q, offsets need 64 bits. The last batch equals itself alone."""
    from fastformer.kernels import attention as kernels

    q = torch.randn(5, 16384, 32, 1024 // 8, device="cuda", dtype=torch.bfloat16)
    q = q.expand(5, 16384, 32, 128)
    big = torch.cat([q, q, q, q, q, q, q])  # 35 x 16384 x 32 x 128 = 2.3e9 elements
    rest = (None, None, 128**-0.5, 64, 0, 0.0, None)
    out, lse = kernels.attention_fwd(big, big, big, *rest)
    alone, lse_alone = kernels.attention_fwd(big[-1:], big[-1:], big[-1:], *rest)
    assert torch.equal(out[-1:], alone) and torch.equal(lse[-1:], lse_alone)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [(), ("causal",), ("causal", "dropout"), ("bool",)], ids=str)
def test_repeats_to_the_bit(options: tuple[str, ...], head_dim: int) -> None:
    """Several blocks and many programs per SM for forward, dk and dv, and dq: 100 runs each, beside a busy stream."""
    base = case_of(*options)
    assert base is not None
    case = replace(base, head_dim=head_dim, batch=4, heads=8, kv_heads=4, seqlen_q=1500, seqlen_k=1500)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)  # nothing is added in an order of chance
    assert_repeats(lambda: [x for _, x in sorted(run_triton(case, inputs).items())])


def test_compile_and_cuda_graph() -> None:
    """fullgraph and dynamic work through forward and backward; a captured call replays on new data, including its
    dropout.
    """
    from fastformer.ops import attention

    def step(seed, q, k, v):
        return attention(q, k, v, is_causal=True, dropout_p=0.1, dropout_seed=seed)

    seed = torch.tensor([3, 4], device="cuda")
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for n in (128, 200):
        leaves = [torch.randn(2, n, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        dout = torch.randn(2, n, 4, 64, device="cuda", dtype=torch.bfloat16)
        eager_out = step(seed, *leaves)
        eager = torch.autograd.grad(eager_out, leaves, dout)
        out = compiled(seed, *leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        assert torch.equal(out, eager_out)
        for actual, expected in zip(grads, eager, strict=True):  # dq adds up by atomics
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-3)

    static = [torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    step(seed, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(seed, *static)
    for x in static:
        x.copy_(torch.randn_like(x))
    seed.copy_(torch.tensor([5, 6], device="cuda"))
    graph.replay()
    assert torch.equal(captured, step(seed, *static))
