"""Shared by all tests: strict fallbacks, the Triton interpreter where there is no GPU, and the backend parameter."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator

import torch

HAS_GPU = torch.cuda.is_available()

# All are read when kernels are imported or first compiled, so they are set before anything else.
os.environ.setdefault("FASTFORMER_STRICT", "1")
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Inductor caches in a folder of this process: two that share one have found each other's half-written files. (Triton
# renames what it has written into its cache, so that one is shared, from run to run too.)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastformer-tests-")
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import importlib.util  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch.utils.deterministic  # noqa: E402

from tests.quick_interpreter import quicken  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"

if not HAS_GPU and importlib.util.find_spec("triton"):
    quicken()

if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    # Inductor looks at the CPU and not at this variable, and on one with AVX-512 mixes 16 lanes with ATen's 8.
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 256


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU all tests of ops and kernels run on it, so that `pytest -m gpu` covers each of them.

    FASTFORMER_TEST_SHARD="1/8" keeps every eighth test from the second on, for processes that share the work.
    """
    if HAS_GPU:
        for item in items:
            if item.path.parent.name in ("ops", "kernels") and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
    index, _, count = os.environ.get("FASTFORMER_TEST_SHARD", "0/1").partition("/")
    items[:] = items[int(index) :: int(count)]


@pytest.fixture(autouse=True)
def _surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A seed, memory that shows when it was never written, and settings that a test has to leave as it found them."""
    torch.manual_seed(0)
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if HAS_GPU or backend == "triton" or request.node.path.parent.name == "kernels":
        _poison_empty(monkeypatch)
    else:
        # Under Triton it would choose other kernels than people run.
        torch.use_deterministic_algorithms(True, warn_only=True)
        _poison_extension()
    settings = _settings()
    yield
    left = _settings()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["default dtype"])
    torch.set_grad_enabled(settings["gradients"])
    assert left == settings, "the test left torch with other settings"


@functools.cache
def _poison_extension() -> None:
    """The same for what the C++ ops return."""
    from fastformer.ops import _extension

    if _extension.instruction_set() is not None:
        torch.ops.fastformer_checks.fill_new_tensors(True)


def _poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and its like give NaN where Python calls them: an output that a kernel forgets to write shows.

    Fresh memory is often zeros, which many a wrong result can pass for.
    """
    empties: list[tuple[Any, str]] = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    for owner, name in empties:
        original = getattr(owner, name)

        def poisoned(*args: Any, original: Any = original, **options: Any) -> torch.Tensor:
            tensor: torch.Tensor = original(*args, **options)
            if type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.device.type != "meta":
                with torch.no_grad():
                    tensor.fill_(torch.nan)
            return tensor

        monkeypatch.setattr(owner, name, poisoned)


def _settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=["reference", "cpp", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per backend that exists here, with every op forced onto it."""
    yield from on_backend(request, request.node.path.stem.removeprefix("test_"))


def on_backend(request: pytest.FixtureRequest, stem: str) -> Iterator[str]:
    """What a fixture `backend` yields from; "fallback" is whatever runs where there is no extension."""
    from fastformer.ops import use_backend

    name: str = request.param
    if name == "fallback":
        if HAS_GPU:
            pytest.skip("the fallback is that of CPUs")
        request.getfixturevalue("no_extension")
        yield name
        return
    if (reason := missing_backend(name, stem)) is not None:
        pytest.skip(reason)
    with use_backend(name):
        yield name


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that the C++ extension is not written for (ARM, macOS) or where it was not built."""
    leave_out_extension(monkeypatch)


def leave_out_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `no_extension` does, for a part of a test."""
    from fastformer.ops import _eager, _extension

    monkeypatch.setattr(_extension, "load", lambda: None)
    monkeypatch.setattr(_extension, "module", lambda: None)
    monkeypatch.setattr(_extension, "function", lambda op_name: None)
    monkeypatch.setattr(_extension, "host_function", lambda name: None)
    for name, value in [*vars(_eager).items()]:  # what was asked of the extension is asked again
        if hasattr(value, "cache_info"):
            monkeypatch.setattr(_eager, name, functools.cache(value.__wrapped__))
    monkeypatch.setenv("FASTFORMER_STRICT", "0")


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
