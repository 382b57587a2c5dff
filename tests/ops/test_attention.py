"""Compares attention on every backend with materialised attention: outputs, lse and all gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastformer.ops import attention, attention_weights, record_backends, use_backend
from tests.checks import assert_accurate, assert_op_accurate, is_interpreted, keep_mask, small_draws
from tests.conftest import HAS_GPU, on_backend
from tests.covering import each, on_backends
from tests.ops.attention_cases import CASES, Case, make_inputs, plain_attention

BY_NAME = {case.name: case for case in CASES}
# The interpreter runs each of these options, and every pair, in tests/kernels; many sequences are for threads to share.
IN_KERNELS = {
    *("causal", "window", "window-right", "bool-mask", "float-mask", "lengths", "gqa", "dropout", "head-dim-40"),
    *("softcap-mask", "softcap-bool-mask-dropout", "softcap-causal-gqa", "dropout-causal-gqa", "bool-mask-heads"),
    *("dropout-mask-lengths", "float-mask-all", "mqa-mask", "gqa-mask-of-many", "gqa-many-sequences"),
}


BACKENDS = ["reference", "fallback", "cpp", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_backend(request, "attention")


def run(case: Case, inputs, dtype: torch.dtype, device: str, plain: bool):
    """Returns (out, lse, gradients by name)."""
    q, k, v, mask = inputs.cast(dtype, device)
    seqlens_k = None if inputs.seqlens_k is None else inputs.seqlens_k.to(device)
    seed = inputs.dropout_seed.to(device)
    if plain:
        out, lse = plain_attention(q, k, v, mask, seqlens_k, case, seed)
    else:
        options = case.options() | {"dropout_p": case.dropout_p, "dropout_seed": seed}
        out, lse = attention(q, k, v, attn_mask=mask, seqlens_k=seqlens_k, return_lse=True, **options)
    leaves = {"dq": q, "dk": k, "dv": v}
    if mask is not None and mask.requires_grad:
        leaves["dmask"] = mask
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.dout.to(device, dtype))
    return out, lse, dict(zip(leaves, gradients, strict=True))


def skip_unless_supported(backend: str, dtype: torch.dtype, device: str) -> None:
    if backend == "cpp" and dtype == torch.float16:
        pytest.skip("the C++ kernels have no fp16")
    if (backend, dtype, device) == ("triton", torch.bfloat16, "cpu"):
        pytest.skip("tl.dot on bf16 is broken in Triton's interpreter")


def lacks(case: object, dtype: torch.dtype, backend: str) -> bool:
    """The C++ kernels have no fp16. The interpreter's bf16 is wrong, and it runs fp16 in tests/kernels."""
    return dtype == torch.float16 if backend == "cpp" else is_emulated(backend) and dtype != torch.float32


def is_emulated(backend: str) -> bool:
    return backend == "triton" and not HAS_GPU


def is_left_out(case: Case, dtype: torch.dtype, backend: str) -> bool:
    if backend == "fallback":  # PyTorch's exponential is right to 20 ulp, which shows where scores are large
        return case.name in ("scale", "head-dim-96") and dtype == torch.float32
    return lacks(case, dtype, backend) or is_emulated(backend) and case.name in IN_KERNELS


@on_backends("case", CASES, BACKENDS, ["fp32", "bf16", "fp16"], is_left_out)
def test_forward_and_backward(case, dtype, backend, device) -> None:
    few = case.seqlen_q == 1 and not is_interpreted()  # few results: the worst of 8 draws is luck
    assert_case_accurate(case, dtype, device, 8 * small_draws() if few else small_draws())


@functools.lru_cache(maxsize=3)
def expected_of(case: Case, dtype: torch.dtype, device: str, draws: int):
    """Returns inputs, the results of plain PyTorch, and the exact ones, for each draw."""
    torch.manual_seed(0)
    drawn = [make_inputs(case, dtype) for _ in range(draws)]
    return [
        (inputs, *(run(case, inputs, kind, device, plain=True) for kind in (dtype, torch.float64))) for inputs in drawn
    ]


def assert_case_accurate(case: Case, dtype: torch.dtype, device: str, draws: int) -> None:
    """Checks every result of a case by the rule, over the given number of draws."""
    drawn: list[dict[str, list[torch.Tensor]]] = [{}, {}, {}]  # ours, plain PyTorch's, the exact ones
    for inputs, *expected in expected_of(case, dtype, device, draws):
        for results, (out, lse, gradients) in zip(
            drawn, (run(case, inputs, dtype, device, plain=False), *expected), strict=True
        ):
            for name, value in {"out": out, "lse": lse, **gradients}.items():
                results.setdefault(name, []).append(value.detach())
    ours, plain, exact = ({name: torch.stack(values) for name, values in results.items()} for results in drawn)
    assert ours["lse"].dtype == torch.float32
    assert torch.equal(ours["lse"].isneginf(), exact["lse"].isneginf())
    empty = ours["lse"].isneginf()  # rows that see nothing
    assert not any(ours[name].transpose(2, 3)[empty].any() for name in ("out", "dq"))
    plain["lse"] = plain["lse"].float()
    for name, value in ours.items():
        assert_accurate(value, plain[name], exact[name], name)


def test_a_soft_cap_is_right_to_the_last_bits(backend, device) -> None:
    """The log of the sum of a row with one key is its score, which is an exponent of softmax everywhere else."""
    scores = torch.cat([torch.linspace(-12, 12, 700), torch.logspace(-8, 0, 300), torch.tensor([0.625, -0.625])])
    q = torch.zeros(1, len(scores), 1, 8, device=device)
    q[0, :, 0, 0] = scores.to(device)
    k = torch.zeros(1, 1, 1, 8, device=device)
    k[..., 0] = 1
    _, lse = attention(q, k, k, softmax_scale=1.0, softcap=1.0, return_lse=True)
    exact = scores.double().tanh()
    ulp = torch.finfo(torch.float32).eps * 2.0 ** exact.abs().log2().floor()
    # A GPU's quotient is right to 2 ulp, and that of a value near the border is as large as the result.
    assert ((lse.flatten().cpu() - exact).abs() / ulp).max() < (3 if device == "cuda" else 1.25)


@each("key", [0, 15, 16, 31, 36, 127, 128, 149])
@pytest.mark.parametrize("masked", [False, True])
def test_one_key_far_above_the_others(key, masked, backend, device) -> None:
    """With scores of 1000 and scores near 0, exp overflows unless the maximum is over all keys."""
    if backend == "triton" and device == "cpu" and key != 149:
        pytest.skip("the interpreter is slow: one key runs on it")
    q, v = torch.ones(1, 2, 1, 8, device=device), torch.randn(1, 150, 1, 8, device=device)
    k = torch.rand(1, 150, 1, 8, device=device)
    k[:, key] = 125.0
    attn_mask = torch.zeros(2, 150, device=device) if masked else None
    out, lse = attention(q, k, v, attn_mask=attn_mask, softmax_scale=1.0, return_lse=True)
    torch.testing.assert_close(out, v[:, key : key + 1].expand_as(out), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, 1000.0))


@pytest.mark.parametrize("masked", [False, True])
@each("size", [1e8, 1e10, 1e14])
def test_scores_too_large_for_their_digits(size, masked, backend, device) -> None:
    """The rounding error of the largest score is a large number here, which must not show up in its exponential."""
    generator = torch.Generator().manual_seed(3)
    diagonal = (torch.eye(32) * (1 + torch.rand(32, generator=generator)))[None, :, None]
    q = (diagonal * size**0.5).to(device).requires_grad_()
    k = (diagonal * (size**0.5 * 1.1)).to(device).requires_grad_()
    v = torch.randn(1, 32, 1, 32, generator=generator).to(device).requires_grad_()
    attn_mask = torch.zeros(32, 32, device=device) if masked else None
    out = attention(q, k, v, attn_mask=attn_mask, softmax_scale=0.3)
    torch.testing.assert_close(out, v)
    dout = torch.randn(1, 32, 1, 32, generator=generator).to(device)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    if backend == "reference":  # it keeps the weights: lse has no digits to make them from again
        torch.testing.assert_close(dv, dout)
    if backend != "fallback":  # PyTorch's weights are e^8 here, and more
        assert dv.abs().max() <= dout.abs().max()
        assert all(gradient.abs().max() < 100 * size**0.5 for gradient in (dq, dk))


# Where a query's first or last key lies beside the edge of a tile or of a pair of bf16, and tiles of every part.
EDGES = [
    *((n, m, (None, 0)) for n, m in ((140, 151), (129, 128), (63, 65), (65, 64), (31, 160), (128, 257), (2, 129))),
    *(
        (130, 195, window)
        for window in ((63, 0), (64, 0), (65, -1), (None, 1), (127, None), (128, 64), (1, 0), (-64, 65))
    ),
    # The widest windows that still hide a key: the last of the first row, or the reverse; and those beyond them.
    *((5, 7, window) for window in ((None, 3), (None, 4), (5, None), (6, None), (5, 3))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each("seqlen_q, seqlen_k, window_size", EDGES)
def test_edges_of_tiles_and_windows(seqlen_q, seqlen_k, window_size, dtype, backend, device) -> None:
    if backend == "triton" and device == "cpu":
        pytest.skip("tests/kernels has the edges of its tiles")
    shapes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "batch": 1}
    assert_case_accurate(Case("", **shapes, window_size=window_size), dtype, device, draws=3)


@pytest.mark.parametrize("seqlen", [64, 70, 192])
def test_far_negative_logits_beside_a_padded_tail(seqlen, backend, device) -> None:
    # Padding scored as 0 against an lse near -120 would overflow in the backward pass and give inf * 0 = NaN.
    case = Case("far", seqlen_q=seqlen, seqlen_k=seqlen, num_heads=1, num_kv_heads=1, seqlens_k=(seqlen - 1, 37))
    inputs = make_inputs(case, torch.float32)
    inputs.q, inputs.k = -inputs.q.abs() * 10, inputs.k.abs() * 10
    out, lse, gradients = run(case, inputs, torch.float32, device, plain=False)
    exact_out, exact_lse, exact = run(case, inputs, torch.float64, device, plain=True)
    assert (lse < -88).float().mean() > 0.5 and out.isfinite().all()
    # lse is kept in fp32: its rounding is a relative error of every recomputed weight.
    relative = 4 * torch.finfo(torch.float32).eps * exact_lse.abs().max().item()
    for name, value in {"out": out, **gradients}.items():
        expected = exact_out if name == "out" else exact[name]
        assert (value - expected).abs().max() <= relative * expected.abs().max(), name


def test_rows_that_see_nothing_do_not_read_stale_memory(backend: str, device: str) -> None:
    """The call before it had only NaN, and probably used the same scratch memory."""
    q, k, v = (torch.randn(1, 24, 1, 64, device=device) for _ in range(3))
    for _ in range(3):
        assert attention(q, k, v * torch.nan).isnan().all()
        out = attention(q, k, v, seqlens_k=torch.zeros(1, dtype=torch.int32, device=device))
        assert torch.equal(out, torch.zeros_like(out))


@each("lowest", [0.7, 1.0])
@each("dtype", [torch.float64, torch.float32])
def test_a_row_masked_by_the_lowest_number_is_not_an_empty_row(dtype, lowest, backend, device) -> None:
    # Masks that are added hide padding by it, and where they hide all PyTorch takes the mean.
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernels take no fp64")
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, n, 2, 16, dtype=dtype, device=device) for n in (5, 150, 150))
    mask = torch.zeros(5, 150, dtype=dtype, device=device)
    mask[1], mask[2, :140], mask[3, 3:] = (lowest * torch.finfo(dtype).min,) * 3
    mask[4] = -torch.inf
    out, lse = attention(q, k, v, attn_mask=mask, return_lse=True)
    q, k, v, mask = (x.double().cpu() for x in (q, k, v, mask))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4 + mask
    scores[:, :, 1] = mask[1, 0]  # beside which a score is nothing, in fp64 as well
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(0), v)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-5, atol=1e-6)
    exact_lse = scores.logsumexp(-1)
    torch.testing.assert_close(lse.double().cpu(), exact_lse, rtol=2**-22, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_gradients_beside_a_mask_that_swallows_scores(dtype, backend, device) -> None:
    """lse equals the mask, because it is too inexact to include the logarithm of the number of keys."""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernels take no fp64")
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, n, 1, 16, dtype=dtype, device=device) for n in (5, 40, 40))
    q, k, v = ((x * scale).requires_grad_() for x, scale in ((q, 6), (k, 6), (v, 1)))  # scores of 100
    mask = torch.zeros(5, 40, dtype=dtype, device=device)
    mask[0, 7], mask[1], mask[1, 3] = 1e30, -1e30, -1e20
    mask[2], mask[3], mask[4] = torch.finfo(dtype).min, -1e30, -1e30
    mask[4, 30:] = -torch.inf
    weights = mask.softmax(-1)
    for row in range(5):
        dout = torch.zeros(1, 5, 1, 16, dtype=dtype, device=device)
        dout[:, row] = torch.randn(16, dtype=dtype, device=device)
        dq, dk, dv = torch.autograd.grad(attention(q, k, v, attn_mask=mask), (q, k, v), dout)
        expected = torch.einsum("qk,bqhd->bkhd", weights, dout)
        if backend in ("triton", "fallback") and row >= 2:  # which, as PyTorch's own, give each of them a weight of 1
            assert (dv.abs() <= 1.001 * dout[:, row].abs()).all()
            continue
        torch.testing.assert_close(dv, expected, rtol=1e-5, atol=1e-6)
        dscores = weights[row] * torch.einsum(
            "bkhd,bhd->k", v - torch.einsum("k,bkhd->bhd", weights[row], v)[:, None], dout[:, row]
        )
        torch.testing.assert_close(dq[0, row, 0], dscores @ k[0, :, 0] / 4, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dk[0, :, 0], torch.outer(dscores, q[0, row, 0]) / 4, rtol=1e-4, atol=1e-4)


@each("seqlen_q, seqlen_k, batch", [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_empty(seqlen_q, seqlen_k, batch, backend, device) -> None:
    q = torch.randn(batch, seqlen_q, 2, 8, device=device, requires_grad=True)
    k = torch.randn(batch, seqlen_k, 2, 8, device=device, requires_grad=True)
    out = attention(q, k, k)
    assert out.shape == q.shape and (out == 0).all()
    out.sum().backward()
    assert (q.grad == 0).all() and (k.grad == 0).all()


@pytest.mark.parametrize("window_size", [(None, None), (40, 3)])
def test_dropout_follows_its_definition(window_size, backend, device) -> None:
    # Where q is 0 the scores are equal, and with v the identity the output is the weights themselves; with dout the
    # identity so is dv, transposed. Several blocks of keys, of which a window's begin anywhere, and a cut last one.
    n, heads, dropout_p = 107 if is_interpreted() else 171, 2, 0.3
    q = torch.zeros(1, n, heads, n, device=device)
    eye = torch.eye(n, device=device)[None, :, None].repeat(1, 1, heads, 1)
    v = eye.clone().requires_grad_()
    seed = torch.tensor([0x1234567_89ABCDEF, 0x0FEDCBA9_F7654321], device=device)
    i, j = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    mask = keep_mask(seed, dropout_p, n, n, heads)[None]
    left, right = window_size
    if left is not None:
        mask = mask & (j >= i - left) & (j <= i + right)
    out = attention(q, q, v, window_size=window_size, dropout_p=dropout_p, dropout_seed=seed)
    out.backward(eye)
    assert torch.equal(out.transpose(1, 2) != 0, mask)
    assert v.grad is not None and torch.equal(v.grad.permute(0, 2, 3, 1) != 0, mask)


@each("far", [2**62, 2**63 - 1, 2**70])
def test_windows_beyond_all_numbers(far: int, backend: str, device: str) -> None:
    """A side with more keys than exist means all; a side that begins after the last key shows none."""
    q, k, v = (torch.randn(1, seqlen, 1, 16, device=device) for seqlen in (5, 7, 7))
    for window, same in (((far, far), (None, None)), ((far, 0), (None, 0)), ((1, far), (1, None))):
        assert torch.equal(attention(q, k, v, window_size=window), attention(q, k, v, window_size=same))
    for empty in ((-far, None), (None, -far)):
        assert not attention(q, k, v, window_size=empty).any()


# Broadcast along the keys, the queries or neither, transposed, expanded: where the values of a mask may lie.
MASKS = {
    "keys": lambda: torch.randn(2, 1, 1, 150),
    "queries": lambda: torch.randn(1, 2, 70, 1),
    "one": lambda: torch.randn(1, 1, 1, 1),
    "transposed": lambda: torch.randn(1, 2, 150, 70).transpose(2, 3),
    "expanded": lambda: torch.randn(1, 2, 70, 1).expand(2, 2, 70, 150),
    "sliced": lambda: torch.randn(2, 2, 70, 300)[..., 1::2],
    "other-dtype": lambda: torch.randn(2, 1, 70, 150).half().double(),
}


@each("layout", MASKS)
@each("kind", ["bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_mask_may_have_any_strides(dtype, kind, layout, backend, device) -> None:
    """The output and the gradients are bit-identical to those of a contiguous mask."""
    if backend == "triton" and device == "cpu":
        pytest.skip("tests/kernels has the masks")
    if backend == "fallback" and layout == "other-dtype":
        pytest.skip("it runs on the reference, whose bits are not PyTorch's")
    tensors = [torch.randn(2, seqlen, 2, 16, device=device).to(dtype) for seqlen in (70, 150, 150, 70)]
    mask = MASKS[layout]().to(device)
    mask = mask > -0.5 if kind == "bool" else mask if layout == "other-dtype" else mask.to(dtype)
    full = mask.expand(2, 2, 70, 150).clone(memory_format=torch.contiguous_format)
    full = full if full.dtype == torch.bool else full.to(torch.float32 if layout == "other-dtype" else dtype)
    results = []
    for attn_mask in (mask, full):
        q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
        out = attention(q, k, v, attn_mask=attn_mask)
        results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# What PyTorch's kernel takes: the rest of the calls run on the reference.
FALLBACKS = {
    "full": ("torch", "torch"),
    "causal": ("torch", "torch"),
    "causal-longer-keys": ("torch", "torch"),
    "window-nothing": ("torch", "torch"),
    "bool-mask-heads": ("torch", "torch"),
    "float-mask": ("torch", "reference"),  # whose gradient is wanted
    "lengths-causal-empty": ("torch", "torch"),
    "gqa": ("torch", "torch"),
    "dropout": ("reference", "reference"),
    "softcap-causal-gqa": ("reference", "reference"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_without_the_extension_pytorchs_attention_runs(name: str, no_extension: None) -> None:
    with record_backends() as ran:
        run(BY_NAME[name], make_inputs(BY_NAME[name], torch.float32), torch.float32, "cpu", plain=False)
    forward, backward = FALLBACKS[name]
    assert ran == {("attention_fwd", forward), ("attention_bwd", backward)}


def test_a_mask_is_not_rounded_for_pytorch(no_extension: None) -> None:
    q = torch.randn(1, 4, 1, 8).bfloat16()
    mask = torch.tensor(256.0) + torch.rand(1, 1, 4, 4)  # all 256 in bf16
    with record_backends() as ran:
        out = attention(q, q, q, attn_mask=mask)
    assert ran == {("attention_fwd", "reference")}
    with use_backend("reference"):
        assert torch.equal(out, attention(q, q, q, attn_mask=mask))


# Compares attention_weights with the materialised softmax.


# A larger scale makes a larger lse, whose rounding then shifts whole rows (see tests.checks.RELAXED).
UNDROPPED = [case for case in CASES if not case.dropout_p and case.mask != "float" and case.name != "scale"]
UNDROPPED.append(Case("scale", softmax_scale=0.35))


def plain_weights(q: Tensor, k: Tensor, attn_mask: Tensor | None, seqlens_k: Tensor | None, case: Case) -> Tensor:
    """Returns the weights (batch, num_heads, seqlen_q, seqlen_k), as attention to unit vectors."""
    units = torch.eye(k.shape[1], dtype=q.dtype, device=q.device)[None, :, None]
    units = units.expand(k.shape[0], -1, k.shape[2], -1)
    seed = torch.zeros(2, dtype=torch.int64)
    return plain_attention(q, k, units, attn_mask, seqlens_k, case, seed)[0].transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each("case", UNDROPPED)
def test_accuracy(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype)
    q, k, v, mask = inputs.cast(dtype, device)
    seqlens_k = None if inputs.seqlens_k is None else inputs.seqlens_k.to(device)

    def ours(q: Tensor, k: Tensor) -> Tensor:
        _, lse = attention(q, k, k, attn_mask=mask, seqlens_k=seqlens_k, return_lse=True, **case.options())
        return attention_weights(q, k, lse, attn_mask=mask, seqlens_k=seqlens_k, **case.options())

    def plain(q: Tensor, k: Tensor) -> Tensor:
        return plain_weights(q, k, mask, seqlens_k, case)

    with use_backend("reference"):
        assert_op_accurate(ours, plain, {"q": q.detach(), "k": k.detach()})


def test_an_additive_mask_takes_effect(device: str) -> None:
    case = next(case for case in CASES if case.name == "float-mask-all")
    inputs = make_inputs(case, torch.float32)
    q, k, v, mask = (x.detach() for x in inputs.cast(torch.float32, device))
    _, lse = attention(q, k, v, attn_mask=mask, window_size=case.window_size, return_lse=True)
    ours = attention_weights(q, k, lse, attn_mask=mask, window_size=case.window_size)
    exact = plain_weights(q.double(), k.double(), mask.double(), None, case)
    assert_accurate(ours, plain_weights(q, k, mask, None, case), exact)
    torch.testing.assert_close(ours.sum(-1), (lse > -torch.inf).float())
