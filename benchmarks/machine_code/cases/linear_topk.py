"""Calls of the launchers of `linear_topk` that the compile report records: rows, choices, dtypes, formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def topk_call(dtype: torch.dtype, rows: int, k: int, bits: int = 16, softcap: float = 0.0) -> Callable[[], object]:
    """Makes a call with a vocabulary of 32000 and a width of 512. bits: those of a number of the weight."""
    from fastformer.kernels import linear_topk as kernels

    def call() -> None:
        with torch.device("cuda"):
            x = torch.empty(rows, 512, dtype=dtype)
            if bits >= 16:
                kernels.linear_topk(x, torch.empty(32000, 512, dtype=dtype), k, True, softcap)
            elif bits == 8:
                q = torch.empty(32000, 512, dtype=torch.int8)
                kernels.quantized_topk(x, q, torch.empty(32000), None, k, True, softcap)
            else:
                q, scale = torch.empty(32000, 256, dtype=torch.uint8), torch.empty(32000, 16, dtype=torch.float16)
                kernels.quantized_topk(x, q, scale, None, k, True, softcap)

    return call


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16 = torch.bfloat16
    yield "bf16 m16 k1", topk_call(bf16, 1, 1)
    if quick:
        return
    for rows in (16, 64):
        for k in (1, 8, 64):
            for bits in (16, 8, 4):
                yield f"bf16 int{bits} m{rows} k{k}".replace(" int16", ""), topk_call(bf16, rows, k, bits)
            yield f"fp32 m{rows} k{k}", topk_call(torch.float32, rows, k)
    yield "bf16 m64 k8 softcap", topk_call(bf16, 64, 8, softcap=30.0)
