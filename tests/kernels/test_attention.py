"""The Triton attention kernels: every option and every pair of options, in fp32 and fp16, forward and backward."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_cases import OPTIONS, Case, case_of, check  # noqa: E402

DTYPES = [torch.float32, torch.float16]
PAIRS = [case for names in combinations(OPTIONS, 2) if (case := case_of(*names)) is not None]


def name(case: Case) -> str:
    return "-".join(case.options) or "plain"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case_of(), *(case_of(option) for option in OPTIONS)], ids=name)
def test_option(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_pair(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, dtype, device)
