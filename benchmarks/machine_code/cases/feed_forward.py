"""Calls of the feed_forward launchers that the compile report records: activations, widths, dtypes, both paths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from benchmarks.machine_code.cases import dropout_of


def feed_forward_call(
    dtype: torch.dtype, dim: int, activation: str, options: tuple[str, ...] = (), rows: int = 16384
) -> Callable[[], object]:
    """Makes a forward and a backward call.

    Options: "dropout", "no bias", and "inference", and "cublas" where the architecture would fuse.
    """
    from fastformer.kernels import feed_forward as kernels

    def call() -> None:
        new = functools.partial(torch.empty, dtype=dtype, device="cuda")
        hidden_dim = 4 * dim
        columns = 2 * hidden_dim if activation == "swiglu" else hidden_dim
        bias = "no bias" not in options
        weights = (new(columns, dim), new(columns) if bias else None, new(dim, hidden_dim))
        dropout = dropout_of(options)
        x = new(rows, dim)
        with mock.patch.object(kernels, "fuses", (lambda *_: False) if "cublas" in options else kernels.fuses):
            learns = "inference" not in options
            out, saved = kernels.feed_forward_fwd(x, *weights, new(dim) if bias else None, activation, *dropout, learns)
            if learns:
                kernels.feed_forward_bwd(out, x, *weights, saved, activation, *dropout, bias)

    return call


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "swiglu")


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16 = torch.bfloat16
    if quick:
        yield "bf16 d512 relu", feed_forward_call(bf16, 512, "relu", ("dropout",))
        yield "bf16 d512 gelu cublas", feed_forward_call(bf16, 512, "gelu", ("dropout", "cublas"))
        return
    yield "bf16 d512 relu", feed_forward_call(bf16, 512, "relu", ("dropout",))
    yield "bf16 d512 relu no dropout", feed_forward_call(bf16, 512, "relu", ())
    yield "bf16 d512 relu inference", feed_forward_call(bf16, 512, "relu", ("inference",))
    yield "bf16 d512 n1024 relu", feed_forward_call(bf16, 512, "relu", ("dropout",), 1024)
    for activation in ACTIVATIONS:
        yield f"bf16 d512 {activation} cublas", feed_forward_call(bf16, 512, activation, ("dropout", "cublas"))
        yield f"fp32 d512 {activation} cublas", feed_forward_call(torch.float32, 512, activation, ("dropout", "cublas"))
    yield "fp16 d512 relu", feed_forward_call(torch.float16, 512, "relu", ("dropout",))
    yield "bf16 d512 relu no bias", feed_forward_call(bf16, 512, "relu", ("no bias",))
