"""Compiles kernels ahead of time into a file: `python -m benchmarks.compile_kernels [--arch 90 ...] [--out FOLDER]`.

The launches are those of the compile report's cases (`machine_code/cases`), by default the usual ones. A launch that
finds its binary in the file needs no compiler, on this machine or another. No GPU is needed. Files are written to
kernels/binaries, where a launch looks for them. A wheel that is built afterwards includes them; Git ignores them. With
--check, each launch is then made from the file on a stub of CUDA's driver, and all of its arguments are compared, byte
by byte, with those of Triton's own launcher.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine_code import report
from benchmarks.machine_code.stub_driver import logged, stub_driver
from benchmarks.measure import record
from benchmarks.measure.commands import parser_of

FOLDER = record.ROOT / "kernels" / "binaries"

Compiled = tuple[str, Any]  # the key, and the binary or None


def _compile_one(work: report.LaunchReport) -> Compiled:
    from fastformer.kernels._binaries import binary_of, compile_kernel
    from fastformer.kernels._signature import key_of

    launch, _, arch, _ = work
    compiled = compile_kernel(launch.kernel, launch.signature, launch.options, arch)
    return key_of(launch.kernel, launch.signature, launch.options), binary_of(
        compiled, launch.signature, launch.num_args
    )


def compile_all(works: list[report.LaunchReport], jobs: int) -> dict[str, Any]:
    """Compiles each launch and returns the binaries by key; omits those that need more than a plain launch."""
    compiled = report.in_forks(_compile_one, works, jobs)
    return {key: binary for key, binary in compiled if binary is not None}


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


def differences(launch: report.RecordedLaunch, arch: int, stub: Any) -> list[str]:
    """Compares the driver calls of fastformer's launch from a file with those of Triton's own launch."""
    from fastformer.kernels import _host, _launch
    from fastformer.kernels._binaries import compile_kernel, find
    from fastformer.kernels._signature import key_of

    arguments = {name: real(value) for name, value in launch.arguments.items()}
    args = tuple(arguments.values())[: launch.num_args]
    constants = dict(list(arguments.items())[launch.num_args :])
    compiled = compile_kernel(launch.kernel, launch.signature, launch.options, arch)
    binary = find(arch, key_of(launch.kernel, launch.signature, launch.options))
    if binary is None:
        return ["there is no binary in the file"]
    make = _host.extension_function("make_kernel")
    if make is None:
        return ["the C++ extension has no launcher"]
    by_extension = make((binary.cubin, binary.name), binary.threads, binary.shared, 0, binary.layout, binary.maps)
    by_triton = _launch._start_by_triton(launch.kernel, compiled, launch.num_args, constants | launch.options)
    seen = []
    for start in (by_triton, by_extension, by_extension):
        with logged(stub) as lines:
            start(3, 5, 2, 77, *args)
        seen.append(lines)
    (triton_launch,) = (line for line in seen[0] if "kernel" in line)
    problems = []
    for lines in seen[1:]:
        (our_launch,) = (line for line in lines if "kernel" in line)
        problems += [
            f"{name}: {value} is {triton_launch[name]} by Triton"
            for name, value in our_launch.items()
            if value != triton_launch[name] or (name == "bad" and value)
        ]
    return problems


def main() -> int:
    parser = parser_of("compile_kernels", __doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=report.ARCHITECTURES)
    parser.add_argument("--only", nargs="+", default=report.STEMS, choices=report.STEMS, help="some of the stems")
    parser.add_argument("--size", default="usual", choices=("once", "quick", "usual", "all"), help="which cases")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the files (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare each launch with Triton's, on a stub")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("expected TRITON_INTERPRET unset: interpreted functions can't be compiled")
    os.environ["FASTFORMER_KERNELS"] = str(args.out)
    import triton

    from fastformer import ops as ops  # registers the extension's launcher for launches
    from fastformer.kernels import _binaries

    triton.knobs.compilation.disable_line_info = True
    bad = 0
    for arch in args.arch:
        began = time.perf_counter()
        works = report.distinct_launches([arch], args.only, args.size)
        binaries = compile_all(works, args.jobs)
        path = args.out / _binaries.file_name(arch)
        _binaries.write(path, arch, binaries)
        _binaries.files.cache_clear()
        raw = sum({binary.cubin: len(binary.cubin) for binary in binaries.values()}.values())
        print(
            f"{path}: {len(binaries)} of {len(works)} launches, {path.stat().st_size / 1e6:.2f} MB "
            f"({raw / 1e6:.2f} MB of machine code), triton {triton.__version__}, {time.perf_counter() - began:.0f} s"
        )
        if not args.check:
            continue
        with stub_driver(arch) as stub:
            for work in works:
                problems = differences(work.launch, arch, stub)
                bad += bool(problems)
                for problem in problems:
                    print(f"{work.launch.kernel.fn.__name__} of {work.titles[0]}: {problem}")
        print(f"sm_{arch}: {len(works)} launches on the stub, {bad} unlike Triton's")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
