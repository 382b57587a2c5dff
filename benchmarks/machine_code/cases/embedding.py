"""Calls of the embedding launchers that the compile report records: widths, dtypes, positions, dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.machine_code.cases import dropout_of

ALL = ("positions", "dropout")


def embedding_call(dtype: torch.dtype, dim: int, options: tuple[str, ...] = ALL) -> Callable[[], object]:
    """Makes a forward and a backward call. Options: "positions" (consecutive) or "given" (explicit ones), "dropout"."""
    from fastformer.kernels import embedding as kernels

    def call() -> None:
        vocab_size, batch, seqlen = 32000, 64, 256
        ids = torch.empty(batch, seqlen, dtype=torch.int64, device="cuda")
        weight = torch.empty(vocab_size, dim, dtype=dtype, device="cuda")
        positions = ids if "given" in options else None
        table = torch.empty(1024, dim, device="cuda") if set(options) - {"dropout"} else None
        dropout = dropout_of(options)
        out = kernels.embedding_fwd(ids, weight, table, positions, dim**0.5, 0, *dropout, False)
        num_positions = 0 if table is None else 1024
        for atomics in (False, True):
            kernels.embedding_bwd(out, ids, positions, vocab_size, num_positions, dim**0.5, 0, *dropout, dtype, atomics)

    return call


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    bf16 = torch.bfloat16
    yield "bf16 d512 " + "+".join(ALL), embedding_call(bf16, 512)
    if quick:
        return
    for options in ((), ("positions",), ("given", "dropout")):
        yield "bf16 d512 " + "+".join(options or ("plain",)), embedding_call(bf16, 512, options)
    for dim in (17, 64, 768, 1000, 4096):
        yield f"bf16 d{dim} " + "+".join(ALL), embedding_call(bf16, dim)
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        yield f"{name} d512 " + "+".join(ALL), embedding_call(dtype, 512)
