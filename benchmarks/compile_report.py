"""What each shipped kernel compiles to, without a GPU: registers, spills, shared memory, matrix instructions.

    python -m benchmarks.compile_report [--arch 90 ...] [--only attention] [--quick] [--out FILE]

The launchers themselves are called, on fake CUDA tensors, with Triton's launch replaced by a recorder; what they would
have launched is compiled for each architecture. So the report sees the tiles, types and specialisation that ship.
Exit status 1 on a violation: a compile error, spilled registers, more shared memory than the architecture has, or fewer
matrix instructions than the kernel has products.
"""

from __future__ import annotations

import argparse
import contextlib
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


def _signature(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list]]:
    """What Triton's own launch would specialise on: types, constants, which arguments are multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list] = {}
    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        free = param.do_not_specialize
        if param.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(launch: Launch, arch: int, case: str) -> Row:
    """Compiles one recorded launch and reads what came out."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = _signature(launch)
    names = [param.name for param in launch.kernel.params]
    blocks = {names[index]: value for (index,), value in constants.items() if names[index].startswith("BLOCK_")}
    tile = "x".join(str(blocks[name]) for name in ("BLOCK_M", "BLOCK_N") if name in blocks)
    tile += f" w{launch.options.get('num_warps', 4)} s{launch.options.get('num_stages', 3)}"
    kernel_name = launch.kernel.fn.__name__
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
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
    """The rows of each matrix product in a launch's source, as its module declares in PRODUCTS, or []."""
    module = sys.modules[launch.kernel.fn.__module__]
    declared = getattr(module, "PRODUCTS", {}).get(launch.kernel.fn.__name__)
    return declared(launch.arguments) if declared else []


def attention_call(
    dtype: torch.dtype, head_dim: int, options: tuple[str, ...], seqlen: int, deterministic: bool = False
) -> Callable[[], object]:
    """A forward and a backward call of the attention launchers with these options."""
    from fastformer.kernels import attention as kernels

    def call() -> None:
        batch, heads, kv_heads = 2, 8, 4 if "gqa" in options else 8

        def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        window = (100 if "window" in options else None, 0 if {"causal", "window"} & set(options) else None)
        dropout = (0.1, new(2, dtype=torch.int64)) if "dropout" in options else (0.0, None)
        was = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(deterministic)
        try:
            if "packed" in options:
                q, k = new(batch * seqlen, heads, head_dim), new(batch * seqlen, kv_heads, head_dim)
                cu = new(batch + 1, dtype=torch.int32)
                rest: tuple = (cu, cu, seqlen, seqlen, head_dim**-0.5, *window, *dropout)
                out, lse = kernels.varlen_attention_fwd(q, k, k, *rest)
                kernels.varlen_attention_bwd(out, q, k, k, out, lse, *rest)
                return
            q, k = new(batch, seqlen, heads, head_dim), new(batch, seqlen, kv_heads, head_dim)
            mask = None
            if "additive" in options:
                mask = new(1, heads, seqlen, seqlen)
            elif "bool" in options:
                mask = new(batch, 1, 1, seqlen, dtype=torch.bool)
            lengths = new(batch, dtype=torch.int32) if "seqlens_k" in options else None
            rest = (mask, lengths, head_dim**-0.5, *window, *dropout)
            out, lse = kernels.attention_fwd(q, k, k, *rest)
            kernels.attention_bwd(out, q, k, k, out, lse, *rest, "additive" in options)
        finally:
            torch.use_deterministic_algorithms(was)

    return call


ATTENTION_OPTIONS: tuple[tuple[str, ...], ...] = (
    (), ("causal",), ("causal", "seqlens_k", "gqa"), ("causal", "packed"), ("causal", "dropout"), ("window",),
    ("packed", "dropout"), ("bool",), ("additive",), ("causal", "bool", "dropout"),
    ("window", "additive", "dropout", "seqlens_k", "gqa"),
)  # fmt: skip


def cases(quick: bool) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(stem, case, call) of everything to compile. Quick: what `make test` has time for."""
    bf16, fp32 = torch.bfloat16, torch.float32
    dims = (64, 128) if quick else (16, 32, 40, 64, 80, 128, 256)
    option_sets = (("causal",), ("causal", "dropout")) if quick else ATTENTION_OPTIONS
    for head_dim in dims:
        for options in option_sets:
            title = f"bf16 d{head_dim} " + "+".join(options or ("full",))
            yield "attention", title, attention_call(bf16, head_dim, options, 4096)
    if quick:
        return
    for head_dim in (32, 64, 128, 256):
        for seqlen in (128, 512):
            for options in ((), ("causal", "dropout")):
                title = f"bf16 d{head_dim} n{seqlen} " + "+".join(options or ("full",))
                yield "attention", title, attention_call(bf16, head_dim, options, seqlen)
        for options in (("causal",), ("window", "additive", "dropout", "seqlens_k", "gqa")):
            title = f"bf16 d{head_dim} deterministic " + "+".join(options)
            yield "attention", title, attention_call(bf16, head_dim, options, 4096, deterministic=True)
    yield "attention", "fp16 d64 causal", attention_call(torch.float16, 64, ("causal",), 4096)
    for head_dim in (32, 64, 128):
        for options in (("causal",), ("window", "additive", "dropout", "seqlens_k", "gqa")):
            title = f"fp32 d{head_dim} " + "+".join(options)
            yield "attention", title, attention_call(fp32, head_dim, options, 4096)
            yield (
                "attention",
                title + " deterministic",
                attention_call(fp32, head_dim, options, 4096, deterministic=True),
            )


def report(archs: list[int], only: str | None, quick: bool) -> Iterator[Row]:
    """Compiles every distinct launch of every case once an architecture."""
    for arch in archs:
        seen = set()
        for stem, title, call in cases(quick):
            if only is not None and stem != only:
                continue
            for launch in launches_of(call, arch):
                key = (launch.kernel.fn.__name__, repr(_signature(launch)), repr(launch.options))
                if key not in seen:
                    seen.add(key)
                    yield compile_launch(launch, arch, title)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--only", help="one stem, such as attention")
    parser.add_argument("--quick", action="store_true", help="head_dim 64 and 128 with the usual options alone")
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
