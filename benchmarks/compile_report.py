"""What each shipped kernel compiles to, without a GPU: registers, spills, shared memory, matrix instructions.

    python -m benchmarks.compile_report [--arch 90 ...] [--only attention ...] [--quick] [--out FILE]

The launchers themselves are called, on fake CUDA tensors, with Triton's launch replaced by a recorder; what they would
have launched is compiled for each architecture. So the report sees the tiles, types and specialisation that ship.
Exit status 1 on a violation: a compile error, spilled registers, more shared memory than the architecture has, or fewer
matrix instructions than the kernel has products.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# Shared memory that one program may have, in bytes.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
ARCHITECTURES = tuple(SHARED_LIMIT)
STEMS = sorted(path.stem for path in (Path(__file__).parent / "compile_cases").glob("[a-z]*.py"))
# The matrix instruction of a product whose result has 64 rows or more; smaller ones are mma.sync everywhere.
WIDE = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}

_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Launch(NamedTuple):
    """One recorded launch: a jitted function, its arguments by name, the compiler's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


class Row(NamedTuple):
    """One line of the report."""

    case: str
    kernel: str
    arch: int
    tile: str
    registers: int
    spilled: int  # bytes of stack a thread
    shared: int  # bytes a program
    wide: int  # wgmma or tcgen05.mma instructions in the PTX
    narrow: int  # mma.sync instructions
    problems: tuple[str, ...]


@contextlib.contextmanager
def recorded(arch: int) -> Iterator[list[Launch]]:
    """Collects launches instead of making them; the launchers believe in a GPU of this compute capability."""
    import triton

    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [param.name for param in self.params]
        arguments = dict(zip(names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in names}
        options = {name: value for name, value in kwargs.items() if name not in names}
        launches.append(Launch(self, arguments, options))

    capability = (arch // 10, arch % 10)
    with (
        mock.patch.object(triton.runtime.JITFunction, "run", record),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
    ):
        yield launches


# A parameter by its index; an element of a tuple by the indices on the way to it.
Place = tuple[int, ...]


class Signature(NamedTuple):
    """What Triton's own launch would specialise on."""

    types: dict[str, Any]  # of each parameter; of a tuple the types of its elements
    constants: dict[Place, Any]
    attributes: dict[Place, list[list[Any]]]  # which arguments are multiples of 16


def _signature(launch: Launch) -> Signature:
    signature = Signature({}, {}, {})

    def describe(value: Any, path: Place, is_constexpr: bool, free: bool) -> Any:
        if isinstance(value, tuple) and not is_constexpr:
            return tuple(describe(each, (*path, i), False, free) for i, each in enumerate(value))
        if is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature.constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            if not free:
                signature.attributes[path] = [["tt.divisibility", 16]]
            return "*" + _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if value % 16 == 0 and not free:
            signature.attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        signature.types[param.name] = describe(value, (index,), param.is_constexpr, param.do_not_specialize)
    return signature


def compile_launch(launch: Launch, arch: int, case: str) -> Row:
    """Compiles one recorded launch and reads what came out."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = _signature(launch)
    blocks = launch.arguments
    tile = "x".join(str(blocks[name]) for name in ("BLOCK_M", "BLOCK_N") if name in blocks)
    tile += f" w{launch.options.get('num_warps', 4)} s{launch.options.get('num_stages', 3)}"
    kernel_name = launch.kernel.fn.__name__
    source = ASTSource(
        fn=launch.kernel, signature=signature.types, constexprs=signature.constants, attrs=signature.attributes
    )
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    except Exception as error:  # any failure of any pass is a row of the report
        return Row(case, kernel_name, arch, tile, 0, 0, 0, 0, 0, (f"does not compile: {str(error)[:200]}",))
    usage = _resource_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    wide, narrow = ptx.count(WIDE[arch]), ptx.count("mma.sync")
    products = products_of(launch)
    expected_wide = sum(rows >= 64 for rows in products) if arch in (90, 100) else 0
    problems = []
    if usage["STACK"] > 0:
        problems.append(f"spills {usage['STACK']} bytes")
    if compiled.metadata.shared > SHARED_LIMIT[arch]:
        problems.append(f"shared memory {compiled.metadata.shared} > {SHARED_LIMIT[arch]}")
    if wide < expected_wide:
        problems.append(f"{wide} {WIDE[arch]}, expected {expected_wide} or more")
    if wide + narrow < len(products):
        problems.append(f"{wide + narrow} matrix instructions, expected {len(products)} or more")
    return Row(
        case,
        kernel_name,
        arch,
        tile,
        usage["REG"],
        usage["STACK"],
        compiled.metadata.shared,
        wide,
        narrow,
        tuple(problems),
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def launches_of(call: Callable[[], object], arch: int) -> list[Launch]:
    """What `call` would launch on a GPU of this compute capability. `call` makes its own tensors, on "cuda"."""
    with FakeTensorMode(allow_non_fake_inputs=True), recorded(arch) as launches:
        call()
    return launches


def products_of(launch: Launch) -> list[int]:
    """The rows of each product in a launch's source for the matrix units, as its module declares in PRODUCTS, or []."""
    if launch.arguments.get("PRECISION") == "ieee":
        return []  # fp32 by FMA
    module = sys.modules[launch.kernel.fn.__module__]
    declared = getattr(module, "PRODUCTS", {}).get(launch.kernel.fn.__name__)
    return declared(launch.arguments) if declared else []


def cases(stem: str, quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """(title, call) of a stem's launches; quick: what `make test` has time for."""
    return importlib.import_module(f"benchmarks.compile_cases.{stem}").cases(quick)


def report(archs: list[int], stems: list[str], quick: bool) -> Iterator[Row]:
    """Compiles every distinct launch of every case once an architecture."""
    for arch, stem in itertools.product(archs, stems):
        seen = set()
        for title, call in cases(stem, quick):
            for launch in launches_of(call, arch):
                key = (launch.kernel.fn.__name__, repr(_signature(launch)), repr(launch.options))
                if key not in seen:
                    seen.add(key)
                    yield compile_launch(launch, arch, title)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--only", nargs="+", default=STEMS, choices=STEMS, help="some of the stems")
    parser.add_argument("--quick", action="store_true", help="the usual options and sizes alone")
    parser.add_argument("--out", type=Path, help="JSON lines, one a row")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("expected TRITON_INTERPRET unset: interpreted functions can't be compiled")
    import triton

    print(f"triton {triton.__version__}, torch {torch.__version__}")
    print(f"{'arch':>4} {'kernel':24} {'tile':16} {'reg':>4} {'spill':>5} {'shared':>7} {'wide':>5} {'sync':>5}  case")
    bad = 0
    lines = []
    for row in report(args.arch, args.only, args.quick):
        print(
            f"{row.arch:>4} {row.kernel:24} {row.tile:16} {row.registers:>4} {row.spilled:>5} {row.shared:>7} "
            f"{row.wide:>5} {row.narrow:>5}  {row.case}" + "".join(f"  !! {problem}" for problem in row.problems),
            flush=True,
        )
        bad += bool(row.problems)
        lines.append(json.dumps(row._asdict()))
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} kernels, {bad} with problems")
    return 1 if bad or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
