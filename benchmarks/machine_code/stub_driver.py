"""A stub of the CUDA driver without a device: it loads, checks and logs launches of kernels, but computes nothing.

Both Triton's launcher and fastformer's run on it, so that their driver calls can be compared and timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_name("libcuda.c")
STREAM = 77


@functools.cache
def library() -> ctypes.CDLL:
    """Builds the stub with the system's C compiler, and loads it under the name of NVIDIA's library.

    Raises:
        RuntimeError: there is no C compiler.
    """
    import triton

    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("expected a C compiler to build a stub of CUDA's driver")
    folder = Path(tempfile.mkdtemp(prefix="libcuda"))
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    built = folder / "libcuda.so.1"
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(built)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)  # for Triton's own extension, which is linked against it
    stub = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
    stub.stub_function.restype = ctypes.c_void_p
    stub.stub_host_memory.argtypes = (ctypes.c_void_p,)
    return stub


class StubDevice:
    """A replacement for `_host.active`."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_capability(self, device: int) -> int:
        return self.arch


@contextlib.contextmanager
def stub_driver(arch: int = 90) -> Iterator[ctypes.CDLL]:
    """Sends launches to the stub, which is yielded, as if there were a device of this architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    from fastformer.kernels import _host

    stub = library()
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):  # type: ignore[misc] # triton has no types
        def __init__(self) -> None:
            super().__init__()
            self.get_current_stream = lambda device: STREAM
            self.get_current_device = lambda: 0
            self.get_device_capability = lambda *_: (arch // 10, arch % 10)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

    with (
        mock.patch.object(triton.runtime.driver, "_active", Driver()),
        mock.patch.object(_host, "active", StubDevice(arch)),
    ):
        yield stub


def uncompiled(signature: Any, num_args: int) -> Any:
    """Returns a binary for any signature, with the right parameters and without code."""
    from fastformer.kernels._binaries import Binary
    from fastformer.kernels._signature import layout_of

    blocks = (re.findall(r"tensordesc<bf16\[([\d, ]+)\]", kind) for kind in map(str, signature.types.values()))
    maps = tuple((3, 2, 9, tuple(map(int, block.split(",")))) for matches in blocks for block in matches)
    return Binary("any", 128, 0, layout_of(signature, num_args), maps, b"")


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
