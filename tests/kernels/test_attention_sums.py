"""If blocks of keys add to dQ, the sum starts at zero, whatever the memory held, and is rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fastformer.kernels import attention as kernels  # noqa: E402
from tests.covering import by_turns  # noqa: E402
from tests.kernels.attention_cases import Case, case_of, check, cumulative  # noqa: E402


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new memory with NaN."""

    def full_of_nan(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def new(*args: object, **options: object) -> Tensor:
            memory = make(*args, **options)
            return memory.fill_(float("nan")) if memory.is_floating_point() else memory

        return new

    monkeypatch.setattr(torch, "empty_like", full_of_nan(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan(torch.Tensor.new_empty))


# Elements that fill no block of the rounding kernel, and columns that fill no block of a row.
@pytest.mark.parametrize(
    "dtype, case",
    by_turns(
        [torch.float32, torch.float16],
        [
            Case(batch=2, head_dim=40, seqlen_q=70, seqlen_k=70, window=(None, 0)),
            case_of("packed", "causal"),
            case_of("gqa", "seqlens_k", "dropout"),
            Case(batch=1, head_dim=8, seqlen_q=3, seqlen_k=70),
        ],
    ),
)
def test_sums_in_memory_with_arbitrary_contents(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, dtype, device)


def test_rows_outside_of_all_sequences(device: str) -> None:
    q, k, dout = (torch.randn(90, 2, 16, device=device).half() for _ in range(3))
    cu = cumulative([40, 33], device)
    rest = (cu, cu, 40, 40, 0.25, None, 0, 0.0, None)
    out, lse = kernels.varlen_attention_fwd(q, k, k, *rest)
    for gradient in kernels.varlen_attention_bwd(dout, q, k, k, out, lse, *rest):
        assert gradient[:73].isfinite().all() and torch.equal(gradient[73:], torch.zeros_like(gradient[73:]))
