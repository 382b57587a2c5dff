"""Compiles the kernels of the GPU plan on a machine without a GPU, so that no GPU time is spent on compiling.

    python -m benchmarks.gpu_run_plan compile --out FOLDER [--only PATTERN] [--arch 90] [--jobs 2]

Each step runs on the stand-in (`stand_in.py`), which records its launches. Timed cases run at their own shapes.
Kernels that are missing from FOLDER/sm_90.kernels are compiled and added. With FASTFORMER_KERNELS=FOLDER, launches take
their binaries from this file; other launches are compiled as usual. The file is only valid for the version of Triton
and the sources from which it was made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import stand_in
from benchmarks.gpu.warm import PlanStep, forked


def compile_ahead(out: Path, todo: Sequence[PlanStep], only: str, arch: int, jobs: int) -> int:
    """Compiles the kernels of each step that matches the pattern. Returns 1 if a step or a compilation fails."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a fork doesn't inherit threads
    chosen = [step for step in todo if re.search(only, step.key)]
    running: dict[int, tuple[PlanStep, float]] = {}
    are_ok = True
    while chosen or running:
        while chosen and len(running) < jobs:
            step = chosen.pop(0)
            if step.commands[0][0][2] != "pip":
                running[_fork(step, out, arch)] = step, time.monotonic()
        pid, status = os.wait()
        step, began = running.pop(pid)
        are_ok = are_ok and status == 0
        print(f"{time.monotonic() - began:6.1f} s  {step.key}: {'ok' if status == 0 else 'FAILED'}", flush=True)
    return 0 if are_ok else 1


def _fork(step: PlanStep, out: Path, arch: int) -> int:
    """Returns the process that runs a step."""
    command, variables = step.commands[0]
    module, *rest = command[command.index("-m") + 1 :]

    def work() -> int:
        os.environ.update({**variables, "FASTFORMER_TEST_SHARD": "0/1"})
        stand_in._ALL = True
        _without_products()
        with contextlib.suppress(SystemExit):
            if module == "pytest":
                stand_in.run(module, rest)
            else:
                stand_in.stand_in()
                _run_ours(rest)
        return 1 if _compile(out, arch) else 0

    return forked(work, out / f"{step.key.replace(' ', '_')}.log")


def _without_products() -> None:
    """Makes PyTorch's matrix products return zeros, because they would take most of the time on a CPU."""
    import torch
    from torch import Tensor

    def replaced(product: Any) -> Any:
        @functools.wraps(product)
        def wrapper(*args: Any, **options: Any) -> Any:
            factors = [x for x in args if isinstance(x, Tensor)]
            if torch.is_grad_enabled() and any(x.requires_grad for x in factors):
                return product(*args, **options)
            with torch.no_grad():
                on_meta = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
                out = options.get("out")
                if out is not None:
                    return out
                shape = product(*on_meta, **options).shape
                return torch.zeros(shape, dtype=options.get("out_dtype") or factors[-1].dtype)

        return wrapper

    owners: list[tuple[Any, str]] = [
        *((torch, name) for name in ("mm", "addmm", "bmm", "matmul", "baddbmm")),
        *((Tensor, name) for name in ("mm", "addmm", "bmm", "matmul", "__matmul__")),
        (torch.nn.functional, "linear"),
    ]
    for owner, name in owners:
        setattr(owner, name, replaced(getattr(owner, name)))
    Tensor.addmm_ = lambda self, *_, **__: self  # type: ignore[method-assign]


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
    """Compiles the launches that are missing from the file. Returns the number of failures."""
    import fcntl

    import triton

    from fastformer.kernels import _binaries

    triton.knobs.compilation.disable_line_info = True
    path = out / _binaries.file_name(arch)
    existing = set(_binaries.BinaryFile(path).keys()) if path.is_file() else set()
    print(f"{len(stand_in.launches)} launches", flush=True)
    new_binaries, failures = {}, 0
    for key, launch in stand_in.launches.items():
        if key in existing:
            continue
        began = time.monotonic()
        try:
            compiled = _binaries.compile_kernel(launch.kernel, launch.signature, launch.options, arch)
        except Exception as error:
            print(f"FAILED {launch.kernel.fn.__name__}: {error!r}"[-400:], flush=True)
            failures += 1
            continue
        binary = _binaries.binary_of(compiled, launch.signature, launch.num_args)
        if binary is None:
            print(f"not plain: {launch.kernel.fn.__name__}", flush=True)
            continue
        print(f"{time.monotonic() - began:5.1f} s {launch.kernel.fn.__name__} {launch.options}", flush=True)
        new_binaries[key] = binary
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _binaries.add(path, arch, new_binaries)
    print(f"{len(new_binaries)} compiled", flush=True)
    return failures
