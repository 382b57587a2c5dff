"""Calls of the attention launchers that the compile report records: every option, each head_dim, both lengths."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from benchmarks.machine_code.cases import dropout_of


def attention_call(
    dtype: torch.dtype, head_dim: int, options: tuple[str, ...], seqlen: int, deterministic: bool = False, *,
    generic: bool = True, queries: int | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Makes a forward and a backward call of the attention launchers with these options.

    generic: whether the generic kernels run on all devices; otherwise the device's own run.
    queries: the number of queries, if it is not that of the keys; then only the forward call is made.
    """
    from fastformer.kernels import _attention_hopper
    from fastformer.kernels import attention as kernels

    def call() -> None:
        batch, heads, kv_heads = 2, 8, 4 if "gqa" in options else 8

        new = functools.partial(torch.empty, dtype=dtype, device="cuda")
        window = (100 if "window" in options else None, 0 if {"causal", "window"} & set(options) else None)
        dropout = dropout_of(options)
        softcap = 50.0 if "softcap" in options else 0.0
        with contextlib.ExitStack() as stack:
            stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(deterministic)
            for name in ("FORWARD", "BACKWARD") if generic else ():
                stack.enter_context(mock.patch.object(_attention_hopper, name, ()))
            if "packed" in options:
                q, k = new(batch * seqlen, heads, head_dim), new(batch * seqlen, kv_heads, head_dim)
                cu = new(batch + 1, dtype=torch.int32)
                rest = (cu, cu, seqlen, seqlen, head_dim**-0.5, *window, *dropout, softcap)
                out, lse = kernels.varlen_attention_fwd(q, k, k, *rest)
                kernels.varlen_attention_bwd(out, q, k, k, out, lse, *rest)
                return
            q, k = new(batch, queries or seqlen, heads, head_dim), new(batch, seqlen, kv_heads, head_dim)
            mask = None
            if {"bool", "additive", "bool_keys", "additive_keys"} & set(options):
                # "_keys": the same for all rows, like torch.nn's key_padding_mask.
                same_rows = {"bool_keys", "additive_keys"} & set(options)
                shape = (batch, 1, 1, seqlen) if same_rows else (1, heads, q.shape[1], seqlen)
                mask = new(*shape, dtype=torch.bool if {"bool", "bool_keys"} & set(options) else dtype)
            lengths = new(batch, dtype=torch.int32) if "seqlens_k" in options else None
            dense_rest = (mask, lengths, head_dim**-0.5, *window, *dropout)
            out, lse = kernels.attention_fwd(q, k, k, *dense_rest, softcap)
            if queries is not None:
                return
            learned = bool({"additive", "additive_keys"} & set(options))
            kernels.attention_bwd(out, q, k, k, out, lse, *dense_rest, learned, softcap)

    return call


OPTIONS: tuple[tuple[str, ...], ...] = (
    (), ("causal",), ("seqlens_k",), ("causal", "seqlens_k", "gqa"), ("causal", "packed"), ("packed", "gqa"),
    ("window",), ("dropout",), ("causal", "dropout"), ("packed", "dropout"), ("bool_keys",), ("bool",),
    ("additive_keys",), ("additive",), ("bool_keys", "dropout"), ("causal", "bool_keys", "dropout"),
    ("window", "additive", "dropout", "seqlens_k", "gqa"), ("causal", "softcap"),
    ("window", "packed", "gqa", "softcap"), ("window", "dropout", "seqlens_k"), ("window", "packed", "dropout", "gqa"),
    ("window", "bool_keys", "dropout"),
)  # fmt: skip
# With three products instead of one, the fewest registers are left for a mask and for dropout.
FP32_OPTIONS: tuple[tuple[str, ...], ...] = (
    ("causal", "bool"), ("causal", "dropout"), ("causal", "bool_keys", "dropout"), ("causal", "bool", "dropout"),
    ("causal", "softcap"),
)  # fmt: skip
# The options in tests/benchmarks/machine_code/test_report.py.
QUICK_OPTIONS: tuple[tuple[str, ...], ...] = (
    ("causal", "dropout"), ("causal", "packed"), ("bool_keys",), ("bool",), ("additive_keys",),
)  # fmt: skip


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16, fp32 = torch.bfloat16, torch.float32
    if quick:
        for options in QUICK_OPTIONS:
            yield "bf16 d64 " + "+".join(options), attention_call(bf16, 64, options, 4096)
        yield "bf16 d64 deterministic causal", attention_call(bf16, 64, ("causal",), 4096, deterministic=True)
        return
    for head_dim in (16, 32, 40, 64, 80, 128, 256):
        for options in OPTIONS:
            title = f"bf16 d{head_dim} " + "+".join(options or ("full",))
            yield title, attention_call(bf16, head_dim, options, 4096)
    for head_dim in (32, 64, 128, 256):
        for seqlen in (128, 512):
            for options in ((), ("causal", "dropout")):
                title = f"bf16 d{head_dim} n{seqlen} " + "+".join(options or ("full",))
                yield title, attention_call(bf16, head_dim, options, seqlen)
        for options in (("packed", "dropout"), ("causal", "packed", "dropout")):  # sentences
            title = f"bf16 d{head_dim} short {'+'.join(options)}"
            yield title, attention_call(bf16, head_dim, options, 128)
        for options in (("causal",), ("window", "additive", "dropout", "seqlens_k", "gqa")):
            title = f"bf16 d{head_dim} deterministic " + "+".join(options)
            yield title, attention_call(bf16, head_dim, options, 4096, deterministic=True)
    for dtype, head_dim in ((bf16, 64), (bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128)):
        title = f"{'bf16' if dtype == bf16 else 'fp32'} d{head_dim} few queries"
        for options in (("gqa",), ("gqa", "bool_keys"), ("bool", "softcap"), ("seqlens_k",)):
            yield f"{title} {'+'.join(options)}", attention_call(dtype, head_dim, options, 4096, queries=2)
    yield "fp16 d64 causal", attention_call(torch.float16, 64, ("causal",), 4096)
    for head_dim in (32, 64, 128):
        for options in FP32_OPTIONS:
            yield f"fp32 d{head_dim} " + "+".join(options), attention_call(fp32, head_dim, options, 4096)
        for options in (("causal",), ("window", "additive", "dropout", "seqlens_k", "gqa")):
            title = f"fp32 d{head_dim} " + "+".join(options)
            yield title, attention_call(fp32, head_dim, options, 4096)
            yield title + " deterministic", attention_call(fp32, head_dim, options, 4096, deterministic=True)
