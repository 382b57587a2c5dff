"""Shared by all tests: strict fallbacks, the Triton interpreter where there is no GPU, and the backend parameter."""

from __future__ import annotations

import os

import torch

HAS_GPU = torch.cuda.is_available()

# Both are read when kernels are imported, so they are set before anything else.
os.environ.setdefault("FASTFORMER_STRICT", "1")
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"

if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    # Inductor looks at the CPU and not at this variable, and on one with AVX-512 mixes 16 lanes with ATen's 8.
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 256


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=["reference", "cpp", "triton"])
def backend(request: pytest.FixtureRequest):
    """Runs the test once per backend that exists here, with every op forced onto it."""
    name = request.param
    stem = request.node.path.stem.removeprefix("test_")
    reason = missing_backend(name, stem)
    if reason is not None:
        pytest.skip(reason)
    from fastformer.ops import use_backend

    with use_backend(name):
        yield name


def missing_backend(name: str, stem: str) -> str | None:
    """Why a backend can't be tested for the op `stem` on this machine, or None."""
    from fastformer.ops import _extension, _library

    # The packed form shares attention's kernels.
    if name == "triton" and _library.triton_kernel(stem.removeprefix("varlen_")) is None:
        return f"no Triton kernel for {stem} (or no triton)"
    if name == "cpp" and (HAS_GPU or _extension.load() is None):
        return "the C++ extension is not built" if not HAS_GPU else "the C++ ops are tested on a CPU"
    if name == "cpp" and not any(_extension.function(f"{stem}{suffix}") for suffix in ("_fwd", "")):
        return f"no C++ function for {stem}"
    return None
