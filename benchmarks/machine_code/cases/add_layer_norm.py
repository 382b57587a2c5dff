"""Calls of the add_layer_norm launchers that the compile report records: widths, dtypes, every option."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.machine_code.cases import dropout_of


def add_layer_norm_call(
    dtype: torch.dtype, dim: int, options: tuple[str, ...] = ("residual", "affine"), rows: int = 16384
) -> Callable[[], object]:
    """Makes a forward and a backward call. Options: "residual" or "fp32 residual", "affine", "dropout", "rms norm".

    Wider rows than 8192 have a forward call only.
    """
    from fastformer.kernels import add_layer_norm as kernels

    def call() -> None:
        new = functools.partial(torch.empty, dtype=dtype, device="cuda")
        x, affine, rms_norm = new(rows, dim), "affine" in options, "rms norm" in options
        has_bias = affine and not rms_norm
        stream = torch.float32 if "fp32 residual" in options else dtype
        residual = new(rows, dim, dtype=stream) if {"residual", "fp32 residual"} & set(options) else None
        weight = new(dim, dtype=stream) if affine else None
        bias = new(dim, dtype=stream) if has_bias else None
        dropout = dropout_of(options)
        y, s, mean, rstd = kernels.add_layer_norm_fwd(x, residual, weight, bias, 1e-5, *dropout, rms_norm)
        if dim > 8192:
            return
        has_residual_out = s.numel() > 0
        rest = (s if has_residual_out else x, weight, mean, rstd, *dropout, rms_norm, has_bias, dtype)
        kernels.add_layer_norm_bwd(y, s if has_residual_out else None, *rest)
        if has_residual_out:
            kernels.add_layer_norm_bwd(y, None, *rest)  # post-norm: the stream has no gradient of its own

    return call


ALL = ("residual", "affine", "dropout")
OPTIONS: tuple[tuple[str, ...], ...] = (
    (), ("affine",), ("residual", "affine"), ALL, ("residual", "affine", "rms norm"), ("fp32 residual", "affine"),
    ("fp32 residual", "affine", "dropout"), ("residual", "dropout", "rms norm"),
)  # fmt: skip


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16 = torch.bfloat16
    yield "bf16 d512 " + "+".join(ALL), add_layer_norm_call(bf16, 512, ALL)
    if quick:
        yield "bf16 d16384 affine", add_layer_norm_call(bf16, 16384, ("affine",))
        return
    for options in OPTIONS:
        yield "bf16 d512 " + "+".join(options or ("plain",)), add_layer_norm_call(bf16, 512, options)
    for dim in (17, 256, 768, 1024, 2048, 4096, 5120, 8192, 16384):
        yield f"bf16 d{dim} " + "+".join(ALL), add_layer_norm_call(bf16, dim, ALL)
    for dim in (1024, 4096):
        yield f"bf16 d{dim} fp32 residual", add_layer_norm_call(bf16, dim, ("fp32 residual", "affine", "dropout"))
        yield f"fp32 d{dim} " + "+".join(ALL), add_layer_norm_call(torch.float32, dim, ALL)
    yield "fp16 d512 " + "+".join(ALL), add_layer_norm_call(torch.float16, 512, ALL)
    yield "bf16 d512 n3 " + "+".join(ALL), add_layer_norm_call(bf16, 512, ALL, 3)
