"""Calls of attention that the kernels for sm_90 take when they are switched on: each option and each tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch

from benchmarks.machine_code.cases.attention import attention_call

ARCHITECTURES = (90,)
OPTIONS: tuple[tuple[str, ...], ...] = (
    (), ("causal",), ("dropout",), ("causal", "dropout"), ("causal", "packed"), ("packed", "dropout", "gqa"),
    ("causal", "seqlens_k"), ("window",), ("window", "dropout", "seqlens_k"),
)  # fmt: skip


def hopper_call(dtype: torch.dtype, head_dim: int, options: tuple[str, ...], seqlen: int) -> Callable[[], object]:
    """A forward and a backward call with the kernels for sm_90 switched on: of the backward what they take."""
    call = attention_call(dtype, head_dim, options, seqlen)

    def switched_on() -> None:
        from fastformer.kernels import _attention_hopper

        with mock.patch.object(_attention_hopper, "ENABLED", True):
            call()

    return switched_on


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """(title, call) of everything to compile. Quick: what the tests ask for."""
    if quick:
        for options in OPTIONS[3], OPTIONS[1]:
            yield "bf16 d64 hopper " + "+".join(options), hopper_call(torch.bfloat16, 64, options, 4096)
        return
    for head_dim in (64, 72, 128):
        for options in OPTIONS if head_dim != 72 else ((), ("causal", "packed", "dropout")):
            title = f"bf16 d{head_dim} hopper " + "+".join(options or ("full",))
            yield title, hopper_call(torch.bfloat16, head_dim, options, 4096)
    yield "fp16 d64 hopper causal", hopper_call(torch.float16, 64, ("causal",), 4096)
