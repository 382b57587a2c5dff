"""A stand-in for a GPU, on which GPU tests and timed cases run to their end, so that mistakes are found beforehand.

    python -m benchmarks.gpu.stand_in pytest -m gpu tests/kernels
    python -m benchmarks.gpu.stand_in benchmarks.run --device cuda ...

CUDA tensors are CPU tensors, streams and events do nothing, and the function of a graph runs once while replays are
empty. Launches of kernels bind the arguments and find out which binary they need, but compute nothing. So values mean
nothing: comparisons pass, and a test with a failed assertion counts as run. Any other exception is a mistake in the
test or the benchmark, and the exit status is 1. One small shape runs per op and mode, and the first set of parameters
of each test function. With FASTFORMER_REHEARSE=all, everything runs, so that all binaries are counted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # before PyTorch is patched
from torch.utils import _device

from benchmarks.machine_code.report import RecordedLaunch

_SMALL = {"batch": 2, "seqlen": 128, "rows": 256, "heads": 2, "kv_heads": 2, "vocab_size": 500, "dim": 128, "beams": 2,
          "hidden_dim": 256, "new_tokens": 4, "source": 8}  # fmt: skip

_ALL = os.environ.get("FASTFORMER_REHEARSE") == "all"

# Errors of the library that are due to values that no kernel has computed, or to empty replays of graphs.
_OF_VALUES = re.compile(r"on the device too|infinite logits|the loss became")

_ATEN = torch.library.Library("aten", "IMPL")

grids: list[tuple[str, tuple[int, ...]]] = []  # (kernel, its grid) of each launch
launches: dict[str, RecordedLaunch] = {}  # one for each binary, by its key, without arguments


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str):
        return "cpu" if value.startswith("cuda") else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _to_the_cpu(function: Any) -> Any:
    """Wraps a function of PyTorch so that it uses the CPU if it is asked for a GPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        options = {name: _on_cpu(value) for name, value in options.items() if name != "pin_memory"}
        return function(*map(_on_cpu, args), **options)

    return wrapper


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        new: Any = super().__new__
        return new(cls, _on_cpu(device))


def _zeroed(function: Any) -> Any:
    """Wraps a function that makes a tensor, so that the tensor is filled with zeros."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        with torch.no_grad():
            tensor = function(*args, **options)
            return tensor.zero_().requires_grad_(bool(options.get("requires_grad")))

    return wrapper


def _widened(product: Any) -> Any:
    """Wraps a matrix product so that it accepts `out_dtype`."""

    @functools.wraps(product)
    def wrapper(*factors: Any, out_dtype: Any = None, **options: Any) -> Any:
        return product(*(x if out_dtype is None else x.to(out_dtype) for x in factors), **options)

    return wrapper


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    """Replaces PyTorch's attention kernels for CUDA; returns zeros of the right shapes."""
    none = torch.zeros(0)
    return torch.zeros_like(q), torch.zeros(q.shape[:-1]), none, none, q.shape[2], k.shape[2], none, none, none


def _attention_backward(dout: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _take_the_cpu() -> None:
    """Redirects tensors from the GPU to the CPU. A mode wouldn't suffice, because it is off inside of its handlers."""
    tensor: Any = torch.Tensor
    constructors = _device._device_constructors()
    for name in ("empty", "empty_like", "empty_strided"):  # no kernel fills these
        setattr(torch, name, _zeroed(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        setattr(tensor, name, _zeroed(getattr(tensor, name)))
    for function in constructors:
        for owner in (torch, torch.fft, torch.signal.windows, torch._VF):
            if hasattr(owner, function.__name__):
                setattr(owner, function.__name__, _to_the_cpu(getattr(owner, function.__name__)))
    for name in ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"):
        setattr(tensor, name, _to_the_cpu(getattr(tensor, name)))
    kinds: list[Any] = [_device.DeviceContext, torch.autocast, torch.amp.GradScaler]
    for kind in kinds:
        kind.__init__ = _to_the_cpu(kind.__init__)
    for name in ("load", "is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, _to_the_cpu(getattr(torch, name)))
    tensor.cuda = tensor.pin_memory = lambda self, *_, **__: self
    # Only CUDA's products have `out_dtype`.
    for name in ("mm", "addmm"):
        setattr(torch, name, _widened(getattr(torch, name)))
    for name in ("flash", "cudnn"):
        _ATEN.impl(f"_scaled_dot_product_{name}_attention", _attention, "CPU")
        _ATEN.impl(f"_scaled_dot_product_{name}_attention_backward", _attention_backward, "CPU")
    torch.Generator = _Generator  # type: ignore[misc]


def without_products() -> None:
    """Makes PyTorch's matrix products return zeros, because they would take most of the time on a CPU."""

    def product(a: Any, b: Any) -> Any:
        return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)

    for name in ("mm", "bmm"):
        _ATEN.impl(name, product, "CPU")
        _ATEN.impl(f"{name}.out", lambda *_, out, **__: out, "CPU")
    for name in ("addmm", "baddbmm"):
        _ATEN.impl(name, lambda _, a, b, **__: product(a, b), "CPU")
        _ATEN.impl(f"{name}.out", lambda *_, out, **__: out, "CPU")
        _ATEN.impl(f"{name}_", lambda x, *_, **__: x, "CPU")


class _Event:
    """An event, which records a time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return max(1e-3, 1e3 * (end.at - self.at))

    def synchronize(self) -> None:
        pass

    wait = query = synchronize


class _Stream(_Event):
    """A stream on which all work is finished immediately."""

    device_index = 0
    cuda_stream = 0

    def wait_stream(self, _: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Graph:
    """An empty graph."""

    def replay(self) -> None:
        pass

    capture_begin = capture_end = reset = replay


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _bound(kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], options: dict[str, object]) -> None:
    """Replaces a launch: binds the arguments as a launch would."""
    launch = RecordedLaunch.of(kernel, args, options)
    grids.append((launch.name, grid))
    launches.setdefault(launch.key(), launch._replace(arguments={}))


def stand_in() -> None:
    """Makes this process behave as if it had an H100, from now on."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("FASTFORMER_STRICT", "1")
    properties = SimpleNamespace(multi_processor_count=132, name="stand-in", total_memory=80 * 2**30, major=9, minor=0,
                                 L2_cache_size=50 * 2**20)  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": properties, "get_device_name": "stand-in", "synchronize": None, "empty_cache": None,
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "reset_peak_memory_stats": None,
        "mem_get_info": (80 * 2**30, 80 * 2**30), "current_stream": _Stream(), "default_stream": _Stream(),
        "set_stream": None, "graph_pool_handle": (0, 1), "set_sync_debug_mode": None, "manual_seed": None,
        "is_current_stream_capturing": False, "_sleep": None, "_lazy_init": None, "is_bf16_supported": True,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    classes: dict[str, Any] = {
        "Stream": _Stream, "Event": _Event, "CUDAGraph": _Graph, "stream": _nothing, "graph": _nothing,
        "device": _nothing, "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }  # fmt: skip
    for name, value in classes.items():
        setattr(torch.cuda, name, value)
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: True)
    device = torch.device("cuda", 0)
    tensor.device = property(lambda self: device)
    tensor.record_stream = lambda self, stream: None
    torch.compile = lambda function=None, **_: function or (lambda wrapped: wrapped)  # type: ignore[assignment]
    torch.equal = lambda *_: True
    torch.library.opcheck = lambda *_, **__: {}  # it would find the real device of the tensors
    torch.testing.assert_close = lambda *_, **__: None
    _take_the_cpu()

    from fastformer.kernels import _launch
    from fastformer.ops import _dispatch

    _launch.interceptor = _bound
    _dispatch.PREFERRED["cpu"] = "triton"


class Rehearsal:
    """A pytest plugin that runs each test function once and ignores its assertions."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.ran = self.by_assertion = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Selects the first set of parameters of each function."""
        if _ALL:
            return
        first: dict[tuple[object, str], pytest.Item] = {}
        for item in items:
            first.setdefault((item.path, getattr(item, "originalname", None) or item.name), item)
        items[:] = first.values()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Counts a failed assertion as the end of a run, and names any other exception."""
        outcome: Any = yield
        report = outcome.get_result()
        self.ran += call.when == "call"
        if report.failed and call.excinfo is not None:
            if call.excinfo.errisinstance(AssertionError) or _OF_VALUES.search(str(call.excinfo.value)):
                self.by_assertion += 1
                report.outcome = "passed"
            else:
                self.wrong.append(f"{item.nodeid}: {call.excinfo.typename}: {str(call.excinfo.value)[:200]}")


def _rehearse_tests(arguments: list[str]) -> int:
    from tests import checks, conftest
    from tests.kernels import attention_cases

    def called(ours: Any, plain: Any, inputs: Any, **_: Any) -> None:
        outputs, leaves = checks._call(ours, inputs)
        torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs])

    def checked(case: Any, dtype: Any, device: str = "cpu", inputs: Any = None) -> None:
        attention_cases.run_triton(case, inputs or attention_cases.make_inputs(case, dtype, device))

    # The plain computation with which a kernel is compared would take most of the time on a CPU.
    conftest._poison_empty = lambda *_: None
    checks.assert_accurate = lambda *_, **__: None
    checks.assert_op_accurate = called
    attention_cases.check = checked
    plugin = Rehearsal()
    status = int(pytest.main([*arguments, "-p", "no:cacheprovider"], plugins=[plugin]))
    print(f"{plugin.ran} tests ran, {plugin.by_assertion} to an assertion; {len(launches)} binaries")
    print("\n".join(f"WRONG {line}" for line in plugin.wrong))
    return 1 if plugin.wrong or status not in (0, 1, 5) else 0


def _rehearse_run() -> None:
    """Makes the runner use small shapes and accept every provider."""
    from benchmarks.measure import checking, suites
    from benchmarks.measure.roofline import Peaks

    chosen = suites.chosen_cases

    def small(available: Any, options: Any) -> Any:
        options.rounds, options.seconds = 3, 0.5
        seen = set()
        for case in chosen(available, options):
            shape = {name: min(value, _SMALL.get(name, value)) if type(value) is int else value
                     for name, value in case.shape.items()}  # fmt: skip
            if "lengths" in shape:
                shape["sentences"] = 2
            if (kind := (case.benchmark.name, case.mode)) not in seen or _ALL:
                seen.add(kind)
                yield case._replace(shape=shape)

    suites.chosen_cases = small
    execute: Any = importlib.import_module("benchmarks.measure.execute")
    checking.difference = lambda *_, **__: None
    # Measuring the CPU's roofline would take minutes.
    execute.measure_machine = lambda *_: Peaks(1e15, 4e12)


def run(module: str, arguments: list[str]) -> int:
    """Runs a module on the stand-in, and prints a line WRONG for each mistake. Returns the exit status."""
    stand_in()
    if module == "pytest":
        return _rehearse_tests(arguments)
    _rehearse_run()
    try:
        return int(importlib.import_module(module).main(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    except (RuntimeError, ValueError) as error:
        if not _OF_VALUES.search(str(error)):
            raise
        print(f"stopped by values: {error}")
    finally:
        print(f"{len(launches)} binaries")
    return 0


if __name__ == "__main__":
    # Import the module by its name, so that the plugin and the tests share one instance of it.
    from benchmarks.gpu.stand_in import run as _run

    sys.exit(_run(sys.argv[1], sys.argv[2:]))
