"""Calls of attention that the kernels for sm_90 support, forward or backward: each option and each tile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.machine_code.cases.attention import attention_call

ARCHITECTURES = (90,)
hopper_call = functools.partial(attention_call, generic=False)
OPTIONS: tuple[tuple[str, ...], ...] = (
    (), ("causal",), ("dropout",), ("causal", "dropout"), ("causal", "packed"), ("packed", "dropout", "gqa"),
    ("causal", "seqlens_k"), ("window",), ("window", "dropout", "seqlens_k"),
)  # fmt: skip


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields (title, call) for everything to compile. quick: only the cases of the fast tests."""
    if quick:
        for options in OPTIONS[3], OPTIONS[1]:
            yield "bf16 d64 hopper " + "+".join(options), hopper_call(torch.bfloat16, 64, options, 4096)
        yield "bf16 d128 hopper causal+dropout", hopper_call(torch.bfloat16, 128, OPTIONS[3], 4096)
        return
    for head_dim in (64, 72, 128):
        for options in OPTIONS if head_dim != 72 else ((), ("causal", "packed", "dropout")):
            title = f"bf16 d{head_dim} hopper " + "+".join(options or ("full",))
            yield title, hopper_call(torch.bfloat16, head_dim, options, 4096)
    yield "fp16 d64 hopper causal", hopper_call(torch.float16, 64, ("causal",), 4096)
