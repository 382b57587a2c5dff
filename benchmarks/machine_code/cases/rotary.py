"""Calls of the rotary launcher that the compile report records: layouts, head sizes, dtypes, positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def rotary_call(
    dtype: torch.dtype, head_dim: int, interleaved: bool, rotary_dim: int | None = None, positions: bool = False
) -> Callable[[], object]:
    """Makes a forward and a backward call."""
    from fastformer.kernels import rotary as kernels

    def call() -> None:
        x = torch.empty(8, 1024, 8, head_dim, dtype=dtype, device="cuda")
        table = torch.empty(1024, (rotary_dim or head_dim) // 2, device="cuda")
        where = torch.empty(8, 1024, dtype=torch.int64, device="cuda") if positions else None
        for inverse in (False, True):
            kernels.rotary_fwd(x, table, table, where, interleaved, inverse)

    return call


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16 = torch.bfloat16
    for interleaved, layout in ((False, "half"), (True, "interleaved")):
        yield f"bf16 d64 {layout}", rotary_call(bf16, 64, interleaved)
        if quick:
            continue
        for head_dim in (40, 128, 256):
            yield f"bf16 d{head_dim} {layout}", rotary_call(bf16, head_dim, interleaved)
        yield f"bf16 d64 of 32 {layout} positions", rotary_call(bf16, 64, interleaved, 32, positions=True)
        yield f"fp32 d64 {layout}", rotary_call(torch.float32, 64, interleaved)
        yield f"fp16 d128 {layout} positions", rotary_call(torch.float16, 128, interleaved, positions=True)
