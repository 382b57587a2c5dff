"""Calls of the decode_attention launcher that the compile report records: steps, beams, tables, splits, head sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch


def decode_call(
    dtype: torch.dtype, head_dim: int, *, batch: int = 4, heads: int = 8, kv_heads: int = 8, seqlen_q: int = 1,
    seqlen_new: int = 0, max_seqlen: int = 2048, table: bool = True, beams: int = 0, window_left: int | None = None,
    rotary: str | None = None, softcap: float = 0.0,
) -> Callable[[], object]:  # fmt: skip
    """Makes a call of the launcher.

    Args:
        beams: the number of rows that read one source through cache_batch_idx; 0: no cache_batch_idx.
        rotary: "half" or "interleaved"; None: no rotation.
    """
    from fastformer.kernels import decode_attention as kernels

    def call() -> None:
        new = functools.partial(torch.empty, dtype=dtype, device="cuda")
        rows = batch // beams if beams else batch
        cache = (rows * max_seqlen // 16, 16) if table else (rows, max_seqlen)
        k_cache, v_cache = new(*cache, kv_heads, head_dim), new(*cache, kv_heads, head_dim)
        k, v = (new(batch, seqlen_new, kv_heads, head_dim) if seqlen_new else None for _ in range(2))
        index = new(batch, dtype=torch.int32) if beams else None
        slots = new(rows, max_seqlen, dtype=torch.int32) if table else None
        tables = None if rotary is None else new(1024, head_dim // 2, dtype=torch.float32)
        kernels.decode_attention(
            new(batch, seqlen_q, heads, head_dim), k_cache, v_cache, new(rows, dtype=torch.int32), k, v, index, slots,
            head_dim**-0.5, seqlen_new > 0, window_left, tables, tables, rotary == "interleaved", softcap,
        )  # fmt: skip

    return call


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16 = torch.bfloat16
    yield "bf16 d64 step table splits", decode_call(bf16, 64, seqlen_new=1)
    yield "bf16 d64 beams table n128", decode_call(bf16, 64, batch=256, beams=4, max_seqlen=128)
    yield "bf16 d128 step of one long row", decode_call(bf16, 128, batch=1, heads=32, seqlen_new=1, max_seqlen=4096)
    for head_dim in (64, 256):
        step = decode_call(bf16, head_dim, heads=32, seqlen_new=1, rotary="half")
        yield f"bf16 d{head_dim} step table gqa rotary half", step
    if quick:
        return
    fp32 = torch.float32
    for head_dim, dtype in ((16, bf16), (40, bf16), (64, bf16), (128, bf16), (256, bf16), (64, fp32), (128, fp32)):
        title = f"{'bf16' if dtype == bf16 else 'fp32'} d{head_dim}"
        yield f"{title} step", decode_call(dtype, head_dim, seqlen_new=1, table=False)
        yield f"{title} step table gqa", decode_call(dtype, head_dim, heads=32, seqlen_new=1)
        for layout in ("half", "interleaved"):
            step = decode_call(dtype, head_dim, heads=32, seqlen_new=1, rotary=layout)
            if (dtype, layout) != (bf16, "half") or head_dim not in (64, 256):
                yield f"{title} step table gqa rotary {layout}", step
        yield f"{title} step table gqa softcap", decode_call(dtype, head_dim, heads=32, seqlen_new=1, softcap=50.0)
        yield f"{title} beams table", decode_call(dtype, head_dim, batch=64, beams=4)
        yield f"{title} prompt table gqa", decode_call(dtype, head_dim, heads=32, seqlen_q=100, seqlen_new=100)
        prompt = decode_call(dtype, head_dim, heads=32, seqlen_q=100, seqlen_new=100, rotary="half")
        yield f"{title} prompt table gqa rotary half", prompt
        title = f"{title} beams 3 tokens gqa window"
        yield title, decode_call(dtype, head_dim, batch=64, heads=32, seqlen_q=3, beams=4, window_left=99)
    yield "fp16 d64 step table", decode_call(torch.float16, 64, seqlen_new=1)
