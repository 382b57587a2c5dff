"""Calls of the linear_cross_entropy launchers that the compile report records: options, vocabularies, dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch


def linear_cross_entropy_call(
    dtype: torch.dtype, vocab_size: int, options: tuple[str, ...], rows: int = 2048, dim: int = 512
) -> Callable[[], object]:
    """Makes calls for the loss alone, the loss with gradients, and the backward pass of reduction "none"."""
    from fastformer.kernels import linear_cross_entropy as kernels

    def call() -> None:
        new = functools.partial(torch.empty, dtype=dtype, device="cuda")
        x, weight, target = new(rows, dim), new(vocab_size, dim), new(rows, dtype=torch.int64)
        bias = new(vocab_size) if "bias" in options else None
        smoothing = (0.1 if "smooth" in options else 0.0, False)
        rest = (x, weight, bias, target, -100, *smoothing, 1e-4 if "z_loss" in options else 0.0)
        softcap = 30.0 if "softcap" in options else 0.0
        losses, lse = kernels.linear_cross_entropy_fwd(*rest, softcap)
        kernels.linear_cross_entropy_bwd(losses, *rest[:4], lse, *rest[4:], (True, True, True), softcap)
        for mean in (True, False):
            kernels.linear_cross_entropy_fwd_bwd(*rest, mean, (True, True, True), softcap)

    return call


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16 = torch.bfloat16
    option_sets: tuple[tuple[str, ...], ...] = (
        (("smooth",),) if quick else ((), ("smooth",), ("z_loss",), ("bias", "smooth", "z_loss"))
    )
    options: tuple[str, ...]
    for options in option_sets:
        yield "bf16 v32000 " + "+".join(options or ("plain",)), linear_cross_entropy_call(bf16, 32000, options)
    if quick:
        return
    yield "bf16 v256000 softcap", linear_cross_entropy_call(bf16, 256000, ("softcap",))
    for vocab_size in (7, 256, 1000, 4096, 50257, 256000):
        yield f"bf16 v{vocab_size} smooth", linear_cross_entropy_call(bf16, vocab_size, ("smooth",))
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        for options in (("smooth",), ("bias", "smooth", "z_loss"), ("smooth", "softcap")):
            yield f"{name} v32000 " + "+".join(options), linear_cross_entropy_call(dtype, 32000, options)
