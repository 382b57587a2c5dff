"""Attention calls for the tests of the Triton kernels, with plain PyTorch's result and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fastformer.ops._dispatch import OPS
from tests.checks import assert_accurate, error
from tests.ops.attention_cases import Case as PlainCase
from tests.ops.attention_cases import plain_attention

SEED = (0x1234567_89ABCDEF, 0x0FEDCBA9_87654321)


@dataclass(frozen=True)
class Case:
    """One call. `mask` is "none", "bool" or "additive"; `mask_shape` says which of its four dims are not broadcast."""

    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    seqlen_q: int = 40
    seqlen_k: int = 56
    window: tuple[int | None, int | None] = (None, None)
    lengths: tuple[int, ...] | None = None
    packed: bool = False
    lengths_q: tuple[int, ...] | None = None
    mask: str = "none"
    mask_shape: tuple[bool, bool, bool, bool] = (True, True, True, True)
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    softcap: float = 0.0
    options: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return "-".join(self.options) or "plain"

    def times(self, factor: int) -> Case:
        """Returns the same options with sequences, lengths and windows that are `factor` times as long."""

        def longer(sizes: tuple) -> tuple:
            return tuple(None if size is None else size * factor for size in sizes)

        return replace(
            self,
            seqlen_q=self.seqlen_q * factor,
            seqlen_k=self.seqlen_k * factor,
            window=longer(self.window),
            lengths=None if self.lengths is None else longer(self.lengths),
            lengths_q=None if self.lengths_q is None else longer(self.lengths_q),
        )

    @property
    def scale(self) -> float:
        return self.softmax_scale or self.head_dim**-0.5


OPTIONS: dict[str, dict] = {
    "causal": {"window": (None, 0)},
    "window": {"window": (9, 5)},
    "left": {"window": (12, None)},
    "before": {"window": (20, -3)},
    "seqlens_k": {"lengths": (37, 5)},
    "packed": {"packed": True, "lengths_q": (33, 17), "lengths": (37, 48)},
    "bool": {"mask": "bool", "mask_shape": (True, False, True, True)},
    "bool_keys": {"mask": "bool", "mask_shape": (True, False, False, True)},
    "additive": {"mask": "additive"},
    "bias": {"mask": "additive", "mask_shape": (False, True, True, True)},
    "additive_keys": {"mask": "additive", "mask_shape": (True, False, False, True)},
    "gqa": {"heads": 4},
    "mqa": {"heads": 3, "kv_heads": 1},
    "dropout": {"dropout_p": 0.3},
    "head_dim": {"head_dim": 40},
    "softcap": {"softcap": 0.7},
    "one_block": {"seqlen_k": 27, "lengths": None},
}


def case_of(*names: str) -> Case | None:
    """Returns the case with these options, or None if they exclude each other."""
    case = Case(options=names)
    seen: set[str] = set()
    for name in names:
        changes = OPTIONS[name]
        clash = seen & set(changes)
        if clash:
            return None
        seen |= set(changes)
        case = replace(case, **changes)
    if case.packed and case.mask != "none":
        return None
    return case


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", number: int = 0) -> dict[str, Tensor | None]:
    """Returns random tensors of a case, in fp64 rounded to `dtype`, so that all get the same numbers."""
    drawn = repr(case).replace(", softcap=0.0", "")  # calls without a cap keep the numbers that they had before it
    generator = torch.Generator().manual_seed(len(drawn) + 1 + 1000 * number)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    inputs: dict[str, Tensor | None] = {
        # Halved: P comes from lse and a second QK^T, whose roundings grow with the scores; eager has neither.
        "q": draw(case.batch, case.seqlen_q, case.heads, case.head_dim) / 2,
        "k": draw(case.batch, case.seqlen_k, case.kv_heads, case.head_dim),
        "v": draw(case.batch, case.seqlen_k, case.kv_heads, case.head_dim),
        "dout": draw(case.batch, case.seqlen_q, case.heads, case.head_dim),
        "mask": None,
    }
    sizes = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    shape = [size if is_full else 1 for size, is_full in zip(sizes, case.mask_shape, strict=True)]
    if case.mask == "bool":
        mask = torch.rand(shape, generator=generator) < 0.7
        mask[0, 0, 0] = False  # at least one row sees nothing
        inputs["mask"] = mask.to(device)
    elif case.mask == "additive":
        mask = draw(*shape) / 2
        mask[0, 0, 0, : shape[3] // 2] = float("-inf")
        inputs["mask"] = mask
    return inputs


def lengths_of(case: Case) -> tuple[list[int], list[int]]:
    """Returns the number of queries and keys of each sequence."""
    return (list(case.lengths_q or [case.seqlen_q] * case.batch), list(case.lengths or [case.seqlen_k] * case.batch))


def visible(case: Case, device: str = "cpu") -> Tensor:
    """Returns bool (batch, 1, seqlen_q, seqlen_k): the keys that lengths and windows leave, by their definition."""
    lengths_q, lengths_k = lengths_of(case)
    i = torch.arange(case.seqlen_q, device=device)[None, None, :, None]
    j = torch.arange(case.seqlen_k, device=device)[None, None, None, :]
    len_q = torch.tensor(lengths_q, device=device)[:, None, None, None]
    len_k = torch.tensor(lengths_k, device=device)[:, None, None, None]
    diagonal = len_k - len_q if case.packed else case.seqlen_k - case.seqlen_q
    seen = (j < len_k) & (i < len_q)
    left, right = case.window
    if left is not None:
        seen = seen & (j >= i + diagonal - left)
    if right is not None:
        seen = seen & (j <= i + diagonal + right)
    return seen


def plain(case: Case, inputs: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
    """Computes eager PyTorch with the materialised softmax and autograd, in `dtype` and the padded layout."""
    leaves = {name: inputs[name].to(dtype).requires_grad_() for name in ("q", "k", "v")}
    q, k, v, mask = (*leaves.values(), inputs["mask"])
    if case.mask == "additive":
        leaves["mask"] = mask = mask.to(dtype).requires_grad_()
    options = PlainCase("", softmax_scale=case.scale, dropout_p=case.dropout_p, softcap=case.softcap)
    out, lse = plain_attention(q, k, v, mask, None, options, torch.tensor(SEED), visible(case, str(q.device)))
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs["dout"].to(dtype))
    results = {"out": out.detach(), "lse": lse}
    return results | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def pack(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


def packed_results(case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts padded results to the packed layout."""
    lengths_q, lengths_k = lengths_of(case)
    packed = {name: pack(results[name], lengths_q) for name in ("out", "dq")}
    packed |= {name: pack(results[name], lengths_k) for name in ("dk", "dv")}
    return packed | {"lse": pack(results["lse"].transpose(1, 2), lengths_q).T}


def cumulative(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def run_triton(case: Case, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Returns the kernels' results for a case, through the launchers that the op calls."""
    from fastformer.kernels import attention as kernels

    q, k, v, dout, mask = (inputs[name] for name in ("q", "k", "v", "dout", "mask"))
    device = str(q.device)
    seed = torch.tensor(SEED, device=device) if case.dropout_p else None
    if case.packed:
        lengths_q, lengths_k = lengths_of(case)
        q, dout, k, v = pack(q, lengths_q), pack(dout, lengths_q), pack(k, lengths_k), pack(v, lengths_k)
        rest = (
            cumulative(lengths_q, device), cumulative(lengths_k, device), max(lengths_q), max(lengths_k),
            case.scale, *case.window, case.dropout_p, seed, case.softcap,
        )  # fmt: skip
        assert why_unsupported("varlen_attention_fwd", q, k, v, *rest) is None
        out, lse = kernels.varlen_attention_fwd(q, k, v, *rest)
        dq, dk, dv = kernels.varlen_attention_bwd(dout, q, k, v, out, lse, *rest)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    lengths = None if case.lengths is None else torch.tensor(case.lengths, dtype=torch.int32, device=device)
    dense_rest = (mask, lengths, case.scale, *case.window, case.dropout_p, seed)
    cap = case.softcap
    additive = case.mask == "additive"
    assert why_unsupported("attention_fwd", q, k, v, *dense_rest, cap) is None
    out, lse = kernels.attention_fwd(q, k, v, *dense_rest, cap)
    dq, dk, dv, dmask = kernels.attention_bwd(dout, q, k, v, out, lse, *dense_rest, additive, cap)
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return results | ({"dmask": dmask} if additive else {})


def why_unsupported(op_name: str, *args: object) -> str | None:
    """Returns the kernels' reason to refuse a call of an op, with arguments in the order of the schema."""
    from fastformer.kernels import attention as kernels

    return kernels.why_unsupported(op_name, **OPS[op_name].bind(args))


def check(case: Case, dtype: torch.dtype, device: str = "cpu", inputs: dict[str, Tensor | None] | None = None) -> None:
    """Checks out, lse and every gradient of a case by the rule."""
    # Of a handful of rows plain PyTorch's largest error is a matter of luck, and of the CPU: they are drawn some times.
    rows = case.batch * case.heads * case.seqlen_q
    draws = min(6, -(-32 // rows)) if inputs is None else 1
    results: list[tuple[dict[str, Tensor], ...]] = []
    for i in range(draws):
        drawn = inputs or make_inputs(case, dtype, device, i)
        exact, eager = plain(case, drawn, torch.float64), plain(case, drawn, dtype)
        if case.packed:
            exact, eager = packed_results(case, exact), packed_results(case, eager)
        results.append((run_triton(case, drawn), exact, eager))
    ours, exact, eager = (
        {name: torch.stack([run[name] for run in runs]) for name in runs[0]} for runs in zip(*results, strict=True)
    )
    for name, value in ours.items():
        if dtype == torch.float32 and value.is_cuda:
            # Three TF32 products carry 2**-21 or so each, not eager's 2**-24: the bound that the docs state.
            finite = exact[name][exact[name].isfinite()]
            assert error(value, exact[name]) <= 2**-18 * float(finite.abs().max()) + 2 * error(
                eager[name], exact[name]
            ), name
            continue
        if name == "dq" and (rounding := _rounding_of_delta(case, inputs or drawn, exact["out"], dtype)):
            assert error(value, exact[name]) <= rounding + 3 * error(eager[name], exact[name]), name
            continue
        rival = eager[name].to(torch.float32) if name == "lse" else eager[name]
        assert_accurate(value, rival, exact[name], name)


def _rounding_of_delta(case: Case, inputs: dict[str, Tensor | None], exact_out: Tensor, dtype: torch.dtype) -> float:
    """Returns how far dq may be off because delta, rowsum(dout * out), is of the rounded output; 0 if that can't show.

    It shows in a row that sees one key, under dropout: dS = dP - delta is 0 there, and out is v / (1 - p), rounded.
    """
    dout, k = inputs["dout"], inputs["k"]
    if not case.dropout_p or case.mask != "additive" or dout is None or k is None:
        return 0.0
    out = exact_out.double().reshape(-1, *dout.shape)
    rounded = ((out.to(dtype).double() - out) * dout.double()).sum(-1).abs().max()
    return float(rounded * case.scale * k.double().abs().max())
