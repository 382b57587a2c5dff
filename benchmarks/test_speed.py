"""The ops' quick cases under pytest-benchmark: `pytest benchmarks --benchmark-only`.

Each provider is checked once; a wrong one fails instead of being timed. The tests run one after another, so a machine
that slows down in between favours one of them: `python -m benchmarks.run` interleaves.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

import pytest

os.environ.setdefault("FASTFORMER_STRICT", "1")

import torch  # noqa: E402

from benchmarks.measure.case import cast, timed_call  # noqa: E402
from benchmarks.measure.checking import Verdicts, verdicts_of  # noqa: E402
from benchmarks.measure.suites import benchmarks, chosen_cases, chosen_providers  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


OPTIONS = argparse.Namespace(suite=["ops"], op=None, mode=None, dtype=None, shape=[], device=DEVICE, quick=True)
CASES = list(chosen_cases(benchmarks(), OPTIONS))


@functools.cache
def checked(number: int) -> Verdicts:
    """Returns the results of checking a case's providers."""
    benchmark, shape, mode, dtype = CASES[number]
    chosen = {name: benchmark.providers[name] for name in chosen_providers(benchmark, DEVICE, ())}
    torch._dynamo.reset()  # torch.compile gives up on a function after eight shapes and runs it eagerly
    return verdicts_of(benchmark, chosen, shape, mode, getattr(torch, dtype), DEVICE)


@pytest.mark.parametrize(
    "number, provider",
    [
        pytest.param(number, provider, id=f"{case} {provider}")
        for number, case in enumerate(CASES)
        for provider in chosen_providers(case.benchmark, DEVICE, ())
    ],
)
def test_speed(number: int, provider: str, benchmark: Any) -> None:
    """Times a provider of a case."""
    case, verdicts = CASES[number], checked(number)
    if (reason := case.benchmark.left_out(provider, case.shape) or verdicts.refused.get(provider)) is not None:
        pytest.skip(reason)
    assert provider not in verdicts.wrong, verdicts.wrong[provider]
    torch.manual_seed(0)
    inputs = cast(case.benchmark.make_inputs(case.shape, DEVICE), getattr(torch, case.dtype))
    call = timed_call(case.benchmark.providers[provider], inputs, case.shape, case.mode)

    def finished() -> None:
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = str(case)
    benchmark.pedantic(finished, rounds=5, warmup_rounds=2)
