"""Compiles the kernels of the GPU plan on a machine without a GPU, so that no GPU time is spent on compiling.

    python -m benchmarks.gpu_run_plan compile --out FOLDER [--only PATTERN] [--arch 90] [--jobs 2]

Each step runs on the stand-in (`stand_in.py`), which records its launches. Timed cases run at their own shapes.
Kernels that are missing from FOLDER/sm_90.kernels are compiled and added. With FASTFORMER_KERNELS=FOLDER, launches take
their binaries from this file; other launches are compiled as usual. The file is only valid for the version of Triton
and the sources from which it was made.
"""

from __future__ import annotations

import contextlib
import fcntl
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import stand_in
from benchmarks.gpu.rehearsal import in_forks
from benchmarks.gpu.warm import PlanStep


def compile_ahead(out: Path, todo: Sequence[PlanStep], only: str, arch: int, jobs: int) -> int:
    """Compiles the kernels of each step that matches the pattern. Returns 1 if a step or a compilation fails."""

    def work(module: str, arguments: list[str]) -> int:
        stand_in._ALL = True
        stand_in.without_products()
        with contextlib.suppress(SystemExit):
            if module == "pytest":
                stand_in.run(module, arguments)
            else:
                stand_in.stand_in()
                _run_ours(arguments)
        return _compile(out, arch)

    are_ok = True
    for step, status, _, seconds in in_forks(out, todo, only, work, jobs):
        are_ok = are_ok and status == 0
        print(f"{seconds:6.1f} s  {step.key}: {'ok' if status == 0 else 'FAILED'}", flush=True)
    return 0 if are_ok else 1


def _run_ours(arguments: list[str]) -> None:
    """Calls fastformer's provider for each case that the runner would time, at the shape of the case."""
    import torch

    from benchmarks.measure.case import cast, timed_call
    from benchmarks.measure.suites import benchmarks, chosen_cases
    from benchmarks.run import _parser
    from fastformer.ops import feed_forward

    cases = benchmarks()
    parsed = _parser(sorted(cases)).parse_args(arguments)
    for case in chosen_cases(cases, parsed):
        print(case, flush=True)
        benchmark, dtype = case.benchmark, getattr(torch, case.dtype)
        checked = benchmark.checked(case.shape)
        shapes = [case.shape, checked]
        if checked.get("dropout_p") and (plain := benchmark.without_dropout(checked)) is not None:
            shapes.append(plain)
        for shape in shapes:
            try:
                inputs = cast(benchmark.make_inputs(shape, "cuda"), dtype)
                for name in (benchmark.ours, *benchmark.also_ours):
                    timed_call(benchmark.providers[name], inputs, shape, case.mode)()
            except Exception:
                traceback.print_exc()  # for example due to values that no kernel computed; launches are recorded
    a = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)  # the product that measures the machine
    with torch.no_grad():
        feed_forward(a, a, None, a, None)


def _compile(out: Path, arch: int) -> int:
    """Compiles the launches that are missing from the file. Returns 1 if one can't be compiled."""
    import triton

    from fastformer.kernels import _binaries

    triton.knobs.compilation.disable_line_info = True
    path = out / _binaries.file_name(arch)
    is_there = path.is_file() and (file := _binaries.BinaryFile(path)).is_valid(arch)
    existing = set(file.keys() if is_there else ())
    binaries: dict[str, Any] = {}
    status = 0
    for key, launch in stand_in.launches.items():
        if key not in existing:
            print(launch.name, launch.options, flush=True)
            try:
                binaries[key] = launch.binary(arch)
            except Exception:
                traceback.print_exc()
                status = 1
    storable = {key: binary for key, binary in binaries.items() if binary is not None}
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _binaries.add(path, arch, storable)
    print(f"{len(storable)} compiled", flush=True)
    return status
