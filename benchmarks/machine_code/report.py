"""Reports each kernel's machine code, without a GPU: registers, spills, programs per SM, and the work of its loops.

    python -m benchmarks.compile_report [--arch 90 ...] [--only attention ...] [--once | --quick | --usual] [--jobs N]
        [--out FILE]

It calls the real launchers on fake CUDA tensors, with Triton's launch replaced by a recorder, and compiles the recorded
launches for each architecture. So the report covers the tiles, types and specialisation of a release.
The exit status is 1 after a violation: a compile error, spilled registers, more shared memory than the architecture
has, fewer matrix instructions than the kernel has products, or missing synchronisation (see `hazards.py`).

The inner loops of a launch are listed below it, from the machine code (see `sass.py`).

`--usual --out benchmarks/results/machine_code.jsonl` writes `benchmarks/results/machine_code.jsonl`, if you run it once
with each compiler: put a second one (`pip install --target DIR triton==3.6.0`) first on PYTHONPATH. --out preserves the
rows of other compilers, architectures and ops.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.machine_code import hazards, sass
from benchmarks.machine_code.cases import USUAL
from benchmarks.machine_code.rows import LoopLine, MachineCodeRow, merge, show
from benchmarks.measure.commands import count, parser_of, refuse_interpreter

ARCHITECTURES = tuple(sass.SM_LIMITS)
STEMS = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[a-z]*.py"))
# The matrix instruction of a product whose result has 64 rows or more; smaller ones are mma.sync everywhere.
WIDE = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}

Result = TypeVar("Result")


class RecordedLaunch(NamedTuple):
    """A recorded launch.

    Attributes:
        kernel: a jitted function.
        signature: the properties for which it is compiled.
        options: the compiler's options.
        num_args: the number of parameters that aren't constexprs.
        arguments: the arguments by name.
    """

    kernel: Any
    signature: Any
    options: Mapping[str, Any]
    num_args: int
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> RecordedLaunch:
        """Makes the record of what an interceptor of launches gets."""
        from fastformer.kernels._signature import arguments_of, signature_of

        arguments, compiler_options = arguments_of(kernel, args, options)
        return cls(kernel, signature_of(kernel, arguments), compiler_options, len(args), arguments)

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def key(self) -> str:
        """Returns a digest of everything on which the binary depends; see `key_of`."""
        from fastformer.kernels._signature import key_of

        return key_of(self.kernel, self.signature, self.options)

    def compiled(self, arch: int) -> Any:
        """Compiles the launch for an architecture."""
        from fastformer.kernels._binaries import compile_kernel

        return compile_kernel(self.kernel, self.signature, self.options, arch)

    def binary(self, arch: int) -> Any:
        """Compiles the launch into what a file of kernels stores, or None if it needs more than a plain launch."""
        from fastformer.kernels._binaries import binary_of

        return binary_of(self.compiled(arch), self.signature, self.num_args)


@contextlib.contextmanager
def recorded(arch: int) -> Iterator[list[RecordedLaunch]]:
    """Records launches instead of making them, as if there were a GPU of this compute capability."""
    from fastformer.kernels import _launch

    launches: list[RecordedLaunch] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        launches.append(RecordedLaunch.of(kernel, args, options))

    capability = (arch // 10, arch % 10)
    with (
        mock.patch.object(_launch, "interceptor", record),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: mock.Mock(multi_processor_count=132)),
        mock.patch.object(FakeTensor, "data_ptr", lambda _: 0, create=True),
    ):
        yield launches


def compile_launch(work: LaunchReport) -> MachineCodeRow:
    """Compiles a recorded launch and analyses the result."""
    import triton

    from fastformer.kernels._launch import multiplies_wrongly

    launch, op, arch, titles = work
    blocks = launch.arguments
    tile = "x".join(str(blocks[name]) for name in ("BLOCK_M", "BLOCK_N") if name in blocks)
    tile += f" w{launch.options.get('num_warps', 4)} s{launch.options.get('num_stages', 3)}"
    if (cap := launch.options.get("maxnreg")) is not None:
        tile += f" r{cap}"
    row = MachineCodeRow(op, launch.name, arch, triton.__version__, tuple(titles), tile.strip())
    try:
        compiled = launch.compiled(arch)
    except Exception as error:  # every compiler failure becomes a row of the report
        return row._replace(problems=(f"does not compile: {str(error)[:200]}",))
    metadata = compiled.metadata
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    usage, instructions = usage_of(cubin), sass.parse(_tool("nvdisasm", "-c", cubin=cubin))
    ctas, limit = sass.ctas_an_sm(
        arch, metadata.num_warps, int(usage["REG"]), metadata.shared, getattr(metadata, "tmem_size", 0) or 0
    )
    scores = scores_of(launch, metadata.num_warps)
    loops = sass.loops(instructions)
    row = row._replace(
        registers=int(usage["REG"]),
        spilled=int(usage["STACK"]),
        shared=metadata.shared,
        ctas=ctas,
        limit=limit,
        wide=ptx.count(WIDE[arch]),
        narrow=ptx.count("mma.sync"),
        loops=tuple(
            _loop_line(sass.count(loop), scores) | ({} if loops else {"whole_kernel": True})
            for loop in loops or [instructions]
        ),
    )
    # If the kernels refuse to multiply with this Triton (sm_100 with Triton 3.6), their synchronisation doesn't matter.
    unordered: tuple[str, ...] = ()
    if not multiplies_wrongly(arch):
        unordered = (*hazards.orders(ptx), *itertools.islice(hazards.in_flight(instructions), 3))
    return row._replace(problems=(*problems_of(row, products_of(launch)), *unordered))


def usage_of(cubin: bytes) -> dict[str, str]:
    """Returns REG and STACK of a compiled kernel as text."""
    return dict(re.findall(r"(REG|STACK):(\d+)", _tool("cuobjdump", "--dump-resource-usage", cubin=cubin)))


def _tool(name: str, option: str, cubin: bytes) -> str:
    """Returns what one of the binary utilities that come with Triton says about a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def problems_of(row: MachineCodeRow, products: list[int]) -> Iterator[str]:
    """Returns the violations of a row. products: see `products_of`."""
    expected_wide = sum(rows >= 64 for rows in products) if row.arch in (90, 100) else 0
    if row.spilled > 0:
        yield f"spills {row.spilled} bytes"
    if row.shared > (most := sass.SM_LIMITS[row.arch].shared - sass.RESERVED):
        yield f"shared memory {row.shared} > {most}"
    if row.wide < expected_wide:
        yield f"{row.wide} {WIDE[row.arch]}, expected {expected_wide} or more"
    if row.wide + row.narrow < len(products):
        yield f"{row.wide + row.narrow} matrix instructions, expected {len(products)} or more"


def _loop_line(counts: sass.Counts, scores: float | None) -> LoopLine:
    """Returns the line of a loop: counts that are not 0."""
    line: LoopLine = {name: value for name, value in counts._asdict().items() if value}
    if scores and counts.exp2:
        line["exp2_a_score"] = round(counts.exp2 / scores, 2)
    return line


def scores_of(launch: RecordedLaunch, warps: int) -> float | None:
    """Returns the number of elements of the score tile per thread, or as declared by the kernel's module."""
    declared = getattr(sys.modules[launch.kernel.fn.__module__], "SCORES", {}).get(launch.name)
    if declared is not None:
        return declared(launch.arguments)
    block_m, block_n = (launch.arguments.get(name) for name in ("BLOCK_M", "BLOCK_N"))
    return None if block_m is None or block_n is None else block_m * block_n / (32 * warps)


def products_of(launch: RecordedLaunch) -> list[int]:
    """Returns the rows of each matrix product in a launch's source, as declared in PRODUCTS of its module, or []."""
    if launch.arguments.get("PRECISION") == "ieee":
        return []  # fp32 by FMA
    module = sys.modules[launch.kernel.fn.__module__]
    declared = getattr(module, "PRODUCTS", {}).get(launch.name)
    return declared(launch.arguments) if declared else []


class LaunchReport(NamedTuple):
    """A distinct launch, and the cases with this launch."""

    launch: RecordedLaunch
    op: str
    arch: int
    titles: list[str]


def distinct_launches(archs: list[int], stems: list[str], size: str) -> list[LaunchReport]:
    """Returns the distinct launches of all cases for each architecture.

    Args:
        archs: the architectures.
        stems: the stems of the ops.
        size: "once" (each kernel's first launch among the quick cases), "quick", "usual" or "all".
    """
    works: list[LaunchReport] = []
    kernels: set[tuple[int, str]] = set()
    for arch, stem in itertools.product(archs, stems):
        module = importlib.import_module(f"benchmarks.machine_code.cases.{stem}")
        if arch not in getattr(module, "ARCHITECTURES", ARCHITECTURES):
            continue
        seen: dict[tuple[str, ...], LaunchReport] = {}
        pattern = re.compile(USUAL.get(stem, "") if size == "usual" else "")
        for title, call in module.cases(size in ("once", "quick")):
            if not pattern.search(title):
                continue
            times: Counter[str] = Counter()
            with FakeTensorMode(allow_non_fake_inputs=True), recorded(arch) as launches:
                call()
            for launch in launches:
                name = launch.name
                times[name] += 1
                key = (name, repr(launch.signature), repr(launch.options))
                if size == "once" and key not in seen and (arch, name) in kernels:
                    continue
                kernels.add((arch, name))
                if key not in seen:
                    seen[key] = LaunchReport(launch, stem, arch, [])
                    works.append(seen[key])
                numbered = title if times[name] == 1 else f"{title} #{times[name]}"
                if numbered not in seen[key].titles:
                    seen[key].titles.append(numbered)
    return works


_todo: list[LaunchReport] = []  # the input of the processes that `in_forks` forks


def _do(function: Callable[[LaunchReport], Result], index: int) -> Result:
    return function(_todo[index])


def in_forks(function: Callable[[LaunchReport], Result], works: list[LaunchReport], jobs: int) -> Iterator[Result]:
    """Calls a function of a module for each launch in parallel processes, and yields the results in the same order."""
    if jobs == 1:
        yield from map(function, works)
        return
    _todo[:] = works
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(functools.partial(_do, function), range(len(works)))


def parser_of_cases(name: str, about: str | None, archs: Sequence[int], size: str) -> argparse.ArgumentParser:
    """Makes the parser of a command that compiles cases, with these architectures and this size as the default."""
    parser = parser_of(name, about)
    parser.add_argument("--arch", type=int, nargs="+", default=list(archs), choices=ARCHITECTURES)
    parser.add_argument("--only", nargs="+", default=STEMS, choices=STEMS, help="some of the stems")
    parser.add_argument("--jobs", **count(1, "processes that compile side by side"))
    sizes = parser.add_mutually_exclusive_group()
    parser.set_defaults(size=size)
    for option, what in (
        ("once", "each kernel once"), ("quick", "the cases that the tests ask for"),
        ("usual", "the cases of the committed file"), ("all", "all cases"),
    ):  # fmt: skip
        sizes.add_argument(f"--{option}", action="store_const", dest="size", const=option, help=what)
    return parser


def main() -> int:
    parser = parser_of_cases("compile_report", __doc__, ARCHITECTURES, "all")
    parser.add_argument("--out", type=Path, help="JSON lines, one a row, merged into what the file has")
    args = parser.parse_args()
    refuse_interpreter(parser)
    import triton

    print(f"triton {triton.__version__}, torch {torch.__version__}")
    print(f"arch {'kernel':24} {'tile':16} {'reg':>4} {'spill':>5} {'shared':>7} ctas {'wide':>5} {'sync':>5}  case")
    rows: list[MachineCodeRow] = []
    compiled = in_forks(compile_launch, distinct_launches(args.arch, args.only, args.size), args.jobs)
    for (arch, op), group in itertools.groupby(compiled, lambda row: (row.arch, row.op)):
        rows_of_op = []
        for row in group:
            print(show(row), flush=True)
            rows_of_op.append(row)
        if args.out is not None:  # after each op, so that an interruption doesn't lose an hour of compiling
            merge(args.out, rows_of_op, [arch], [op])
        rows += rows_of_op
    if args.out is not None:
        merge(args.out, rows, args.arch, args.only)  # even if an op has no launches any more
    bad = sum(bool(row.problems) for row in rows)
    print(f"{len(rows)} kernels, {bad} with problems")
    return 1 if bad or not rows else 0
