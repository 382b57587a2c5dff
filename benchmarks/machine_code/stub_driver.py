"""A stub of the CUDA driver without a device: it loads, checks and logs launches of kernels, but computes nothing.

Both Triton's launcher and fastformer's run on it, so that their driver calls can be compared and timed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

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
