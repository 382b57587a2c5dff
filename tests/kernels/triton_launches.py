"""Compares fastformer's launches with Triton's own, on a stub of CUDA's driver: `compare` needs a process of its own.

The launches are those of the compile report's cases. Their binaries come from the file in FASTFORMER_KERNELS.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.machine_code import report
from benchmarks.machine_code.stub_driver import STREAM, library
from fastformer import ops as ops  # registers the extension's launcher for launches
from fastformer.kernels import _binaries, _host, _launch


@contextlib.contextmanager
def logged(stub: ctypes.CDLL) -> Iterator[list[dict[str, Any]]]:
    """Yields a list that, after the block, contains a record of each launch and tensor map of the block."""
    lines: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        stub.stub_open(file.name.encode())
        try:
            yield lines
        finally:
            stub.stub_open(None)
            lines += [json.loads(line) for line in file.read().splitlines()]


@contextlib.contextmanager
def triton_on_stub(arch: int) -> Iterator[ctypes.CDLL]:
    """Sends Triton's launches to the stub, which is yielded, as if there were a device of this architecture."""
    stub = library()
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):  # type: ignore[misc] # triton has no types
        def __init__(self) -> None:
            super().__init__()
            self.get_current_stream = lambda device: STREAM
            self.get_current_device = lambda: 0
            self.get_device_capability = lambda *_: (arch // 10, arch % 10)

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    with mock.patch.object(triton.runtime.driver, "_active", Driver()):
        yield stub


class FakePointer:
    """A substitute for a tensor in a launch on the stub: an address."""

    _addresses = itertools.count(0x7F0000000000, 0x1000)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._address = dtype, next(self._addresses)

    def data_ptr(self) -> int:
        return self._address


def real(value: Any) -> Any:
    """Converts an argument of a recorded launch into one for the stub."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(real, value))
    if isinstance(value, torch.Tensor):
        return FakePointer(value.dtype)
    if hasattr(value, "block_shape"):
        return dataclasses.replace(value, base=FakePointer(value.base.dtype))
    return value


def differences(launch: report.RecordedLaunch, arch: int, stub: ctypes.CDLL) -> list[str]:
    """Compares the driver calls of fastformer's launch from a file with those of Triton's own launch."""
    arguments = {name: real(value) for name, value in launch.arguments.items()}
    args = tuple(arguments.values())[: launch.num_args]
    constants = dict(list(arguments.items())[launch.num_args :])
    binary = _binaries.find(arch, launch.key())
    if binary is None:
        return ["there is no binary in the file"]
    make = _host.extension_function("make_kernel")
    if make is None:
        return ["the C++ extension has no launcher"]
    by_extension = make((binary.cubin, binary.name), binary.threads, binary.shared, 0, binary.layout, binary.maps)
    options = constants | dict(launch.options)
    from_file = _binaries.compiled_of(binary, launch.kernel, launch.signature, arch)
    by_triton, without_extension = (
        _launch._start_by_triton(launch.kernel, compiled, launch.num_args, options)
        for compiled in (launch.compiled(arch), from_file)
    )
    seen = []
    for start in (by_triton, by_extension, by_extension, without_extension):
        with logged(stub) as lines:
            start(3, 5, 2, STREAM, *args)
        (line,) = (line for line in lines if "kernel" in line)
        seen.append(line)
    return [
        f"{name}: {value} is {seen[0][name]} by Triton"
        for line in seen[1:]
        for name, value in line.items()
        if value != seen[0][name] or (name == "bad" and value)
    ]


def compare(size: str, arch: int) -> int:
    """Prints the differences of each launch, and returns the number of launches."""
    triton.knobs.compilation.disable_line_info = True
    works = report.distinct_launches([arch], report.STEMS, size)
    with triton_on_stub(arch) as stub:
        for work in works:
            for problem in differences(work.launch, arch, stub):
                print(f"{work.launch.name} of {work.titles[0]}: {problem}")
    return len(works)
