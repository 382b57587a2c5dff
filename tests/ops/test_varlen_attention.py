"""Compares varlen_attention on every backend with materialised attention of each sequence alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fastformer.ops import varlen_attention
from tests.checks import assert_accurate, small_draws
from tests.conftest import on_backend
from tests.covering import each, on_backends
from tests.kernels.attention_cases import Case as PackedCase
from tests.kernels.attention_cases import pack, visible
from tests.ops.attention_cases import Case, make_inputs, plain_attention
from tests.ops.test_attention import BACKENDS, lacks


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_backend(request, "varlen_attention")


@dataclasses.dataclass(frozen=True)
class Packed:
    """The lengths of each sequence's queries and keys, and the options of all."""

    name: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    options: Case = Case("")
    slack: tuple[int, int] = (0, 0)  # rows beyond the last sequence, of q and k

    def __str__(self) -> str:
        return self.name


SELF, CROSS = ((33, 1, 17), (33, 1, 17)), ((5, 20, 9), (40, 3, 16))
GQA = {"num_heads": 4, "num_kv_heads": 2}
CASES = [
    Packed("self", *SELF),
    Packed("self-causal", *SELF, Case("", is_causal=True)),
    Packed("cross", *CROSS),
    Packed("cross-causal", *CROSS, Case("", is_causal=True)),
    Packed("window", *SELF, Case("", window_size=(4, 2))),
    Packed("window-causal-gqa", *CROSS, Case("", window_size=(6, None), is_causal=True, **GQA)),
    Packed("mqa", *CROSS, Case("", num_heads=4, num_kv_heads=1)),
    Packed("dropout-causal", *SELF, Case("", dropout_p=0.2, is_causal=True)),
    Packed("dropout-cross-gqa", *CROSS, Case("", dropout_p=0.3, **GQA)),
    Packed("no-keys", (5, 7, 3), (4, 0, 9)),
    Packed("no-queries", (5, 0, 3), (4, 6, 9), Case("", is_causal=True)),
    Packed("slack", *CROSS, slack=(6, 11)),
    Packed("slack-of-keys", *CROSS, slack=(0, 11)),
    Packed("empty-at-the-end", (5, 20, 9, 0, 0), (40, 3, 16, 0, 0), Case("", dropout_p=0.25), slack=(6, 11)),
    Packed("head-dim-40", *SELF, Case("", head_dim=40, is_causal=True)),
    Packed("scale", *SELF, Case("", softmax_scale=0.3)),
    Packed("softcap-window-gqa", (5, 20), (40, 16), Case("", softcap=1.5, window_size=(9, 4), num_kv_heads=1)),
    Packed("several-blocks", (150, 70), (150, 130), Case("", is_causal=True, num_heads=1, num_kv_heads=1)),
]


def make_packed(case: Packed, dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes q, k, v, dout in fp64 (with values that dtype can represent), cu_seqlens and the seed."""
    total_q, total_k = (sum(n) + extra for n, extra in zip((case.lengths_q, case.lengths_k), case.slack, strict=True))
    inputs = make_inputs(dataclasses.replace(case.options, batch=1, seqlen_q=total_q, seqlen_k=total_k), dtype)
    packed = {name: getattr(inputs, name)[0] for name in ("q", "k", "v", "dout")}
    for name, lengths in (("cu_seqlens_q", case.lengths_q), ("cu_seqlens_k", case.lengths_k)):
        packed[name] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return packed | {"seed": inputs.dropout_seed}


def plain_varlen(q: Tensor, k: Tensor, v: Tensor, case: Packed, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Computes attention of the padded batch, whose dropout is that of the op, with 0 outside of the sequences."""
    q, k, v = (
        pad_sequence(x[: sum(lengths)].split(lengths), batch_first=True)
        for x, lengths in ((q, case.lengths_q), (k, case.lengths_k), (v, case.lengths_k))
    )
    left, right = case.options.window_size
    window = (left, min(0, right or 0) if case.options.is_causal else right)
    sizes = {"seqlen_q": q.shape[1], "seqlen_k": k.shape[1], "lengths_q": case.lengths_q, "lengths": case.lengths_k}
    seen = visible(PackedCase(window=window, packed=True, **sizes), str(q.device))
    options = dataclasses.replace(case.options, is_causal=False, window_size=(None, None))
    out, lse = plain_attention(q, k, v, None, None, options, seed, seen)
    out, lse = pack(out, case.lengths_q), pack(lse.mT, case.lengths_q).T
    slack = case.slack[0]
    return F.pad(out, (0, 0, 0, 0, 0, slack)), F.pad(lse, (0, slack), value=-torch.inf)


def run(case: Packed, packed: dict[str, Tensor], dtype: torch.dtype, device: str, plain: bool) -> dict[str, Tensor]:
    q, k, v = (packed[name].detach().to(device, dtype).requires_grad_() for name in ("q", "k", "v"))
    seed, options = packed["seed"].to(device), case.options
    if plain:
        out, lse = plain_varlen(q, k, v, case, seed)
    else:
        out, lse = varlen_attention(
            q, k, v, packed["cu_seqlens_q"].to(device), packed["cu_seqlens_k"].to(device),
            max(case.lengths_q), max(case.lengths_k), dropout_p=options.dropout_p, dropout_seed=seed, return_lse=True,
            **options.options(),
        )  # fmt: skip
    gradients = torch.autograd.grad(out, (q, k, v), packed["dout"].to(device, dtype))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


@functools.lru_cache(maxsize=3)
def expected_of(case: Packed, dtype: torch.dtype, device: str, draws: int):
    """Returns inputs, the results of plain PyTorch, and the exact ones, for each draw."""
    torch.manual_seed(0)
    drawn = [make_packed(case, dtype) for _ in range(draws)]
    return [
        (packed, *(run(case, packed, kind, device, plain=True) for kind in (dtype, torch.float64))) for packed in drawn
    ]


# tests/kernels has these options, and the interpreter is slow.
IN_KERNELS = {
    *("self", "self-causal", "cross", "window", "mqa", "dropout-causal", "dropout-cross-gqa", "slack-of-keys"),
    *("head-dim-40", "scale"),
}


@on_backends("case", CASES, BACKENDS, ["fp32", "bf16", "fp16"], lacks, IN_KERNELS)
def test_forward_and_backward(case: Packed, dtype: torch.dtype, backend: str, device: str) -> None:
    runs: dict[str, list[dict[str, Tensor]]] = {"ours": [], "plain": [], "exact": []}
    for packed, plain, exact in expected_of(case, dtype, device, small_draws()):
        runs["ours"].append(run(case, packed, dtype, device, plain=False))
        runs["plain"].append(plain)
        runs["exact"].append(exact)
    for name in ("out", "lse", "dq", "dk", "dv"):
        ours, plain, exact = (torch.stack([draw[name] for draw in runs[kind]]) for kind in runs)
        if name == "lse":
            assert ours.dtype == torch.float32 and torch.equal(ours.isneginf(), exact.isneginf())
            plain = plain.float()
        assert_accurate(ours, plain, exact, name)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_maximum_above_the_longest_sequence_changes_nothing(backend, device, is_causal) -> None:
    case = Packed("", (20, 3, 0), (20, 3, 0), Case("", dropout_p=0.25), slack=(5, 5))
    packed = make_packed(case, torch.float32)
    seed, cu = packed["seed"].to(device), packed["cu_seqlens_q"].to(device)
    q, k, v = (packed[name].to(device, torch.float32).requires_grad_() for name in "qkv")
    results = []
    for longest in (20, 64):
        out, lse = varlen_attention(
            q, k, v, cu, cu, longest, longest, is_causal=is_causal, dropout_p=0.25, dropout_seed=seed, return_lse=True
        )
        results.append((out, lse, *torch.autograd.grad(out, (q, k, v), packed["dout"].to(out))))
    for exact, above in zip(*results, strict=True):
        torch.testing.assert_close(above, exact, rtol=1e-5, atol=1e-5)


@each("slack", [(0, 5), (5, 0), (3, 9)])
@each("lengths", [((6, 9), (8, 7)), ((0,), (0,)), ((), ())])
def test_rows_beyond_the_sequences_are_zero(slack: tuple[int, int], lengths: tuple, backend: str, device: str) -> None:
    (cu_q, cu_k), used = zip(*(((0, *accumulate(n)), sum(n)) for n in lengths), strict=True)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (cu_q, cu_k))
    q, k, v = (
        torch.randn(n + extra, 2, 16, device=device, requires_grad=True)
        for n, extra in zip((used[0], used[1], used[1]), (slack[0], slack[1], slack[1]), strict=True)
    )
    longest = [max(n, default=0) for n in lengths]
    out, lse = varlen_attention(q, k, v, cu_q, cu_k, *longest, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    for tensor, rows in ((out, used[0]), (dq, used[0]), (dk, used[1]), (dv, used[1])):
        assert torch.equal(tensor[rows:], torch.zeros_like(tensor[rows:])) and tensor.isfinite().all()
        assert rows == 0 or (tensor[:rows] != 0).any()
    assert lse[:, used[0] :].isneginf().all() and lse[:, : used[0]].isfinite().all()


@each("longest", [0, 3])
@each("lengths_k", [(0,), (0, 0)])
def test_no_sequence_has_a_key(lengths_k: tuple[int, ...], longest: int, backend: str, device: str) -> None:
    """If the key rows belong to no sequence, results and gradients are zero, for any value of the longest length."""
    q, k, v = (torch.randn(rows, 1, 16, device=device, requires_grad=True) for rows in (4, 3, 3))
    ends_q = [4 * i // len(lengths_k) for i in range(len(lengths_k) + 1)]
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in (ends_q, [0, *lengths_k]))
    out, lse = varlen_attention(q, k, v, cu_q, cu_k, 4, longest, return_lse=True)
    assert not out.any() and lse.isneginf().all()
    for gradient in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
        assert not gradient.any()


def test_the_bounds_of_k_are_checked_if_q_shares_them() -> None:
    q, k = torch.randn(5, 2, 16), torch.randn(4, 2, 16)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\bcu_seqlens_k\b"):
        varlen_attention(q, k, k, cu, cu, 3, 3)
    with pytest.raises(ValueError, match=r"\bmax_seqlen_k\b"):
        varlen_attention(q, q, q, cu, cu, 3, 2)
    with pytest.raises(ValueError, match=r"\bcu_seqlens_q\b"):
        varlen_attention(q, q, q, falling := torch.tensor([0, 4, 2], dtype=torch.int32), falling, 4, 4)


def test_compile_with_other_lengths_recompiles_nothing(device: str) -> None:
    def step(q: Tensor, cu: Tensor, longest: int) -> Tensor:
        return varlen_attention(q, q, q, cu, cu, longest, longest, is_causal=True).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((9, 4), (20, 3), (7, 7)):
            cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
            q = torch.randn(sum(lengths), 2, 16, device=device, requires_grad=True)
            ours, plain = compiled(q, cu, max(lengths)), step(q, cu, max(lengths))
            torch.testing.assert_close(ours, plain)
            gradients = [torch.autograd.grad(out.sum(), q)[0] for out in (ours, plain)]
            torch.testing.assert_close(*gradients)
