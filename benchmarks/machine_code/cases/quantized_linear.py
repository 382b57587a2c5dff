"""Calls of the launcher of quantised products that the compile report records: formats, rows, dtypes, odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def quantized_linear_call(
    dtype: torch.dtype, rows: int, columns: int, depth: int, bits: int, zeros: bool = False, wide: bool = False
) -> Callable[[], object]:
    """Makes a call."""
    from fastformer.kernels import quantized_linear as kernels

    def call() -> None:
        with torch.device("cuda"):
            x = torch.empty(rows, depth, dtype=dtype)
            groups = -(-depth // 32)
            q = torch.empty(
                columns, depth if bits == 8 else 16 * groups, dtype=torch.int8 if bits == 8 else torch.uint8
            )
            scale = torch.empty(columns) if bits == 8 else torch.empty(columns, groups, dtype=torch.float16)
            zero = torch.empty(columns, groups, dtype=torch.uint8) if zeros else None
            bias = None if wide else torch.empty(columns, dtype=dtype)
        kernels.quantized_linear(x, q, scale, zero, bias, wide)

    return call


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for bits in (8, 4):
        yield f"bf16 int{bits} m16", quantized_linear_call(bf16, 1, 4096, 4096, bits)
        if quick:
            continue
        yield f"bf16 int{bits} m16 wide n64", quantized_linear_call(bf16, 4, 32000, 512, bits, wide=True)
        for rows in (32, 64):
            yield f"bf16 int{bits} m{rows}", quantized_linear_call(bf16, rows, 4096, 4096, bits)
            yield f"bf16 int{bits} m{rows} wide n64", quantized_linear_call(bf16, rows, 32000, 512, bits, wide=True)
        yield f"fp16 int{bits} m16", quantized_linear_call(fp16, 8, 512, 2048, bits)
        yield f"bf16 int{bits} m16 odd", quantized_linear_call(bf16, 5, 1000, 520, bits)
    yield "bf16 int4 m16 zeros", quantized_linear_call(bf16, 1, 4096, 4096, 4, zeros=True)
    yield "bf16 int4 m64 zeros", quantized_linear_call(bf16, 64, 4096, 4096, 4, zeros=True)
