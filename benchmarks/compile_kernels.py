"""Compiles kernels ahead of time into a file: `python -m benchmarks.compile_kernels [--arch 90 ...] [--out FOLDER]`.

The launches are those of the compile report's cases (`machine_code/cases`), by default the usual ones. A launch that
finds its binary in the file needs no compiler, on this machine or another. No GPU is needed. Files are written to
kernels/binaries, where a launch looks for them. A wheel that is built afterwards includes them; Git ignores them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine_code import report
from benchmarks.measure import record
from benchmarks.measure.commands import refuse_interpreter


def _compiled(work: report.LaunchReport) -> tuple[str, Any]:
    return work.launch.key(), work.launch.binary(work.arch)


def main() -> int:
    parser = report.parser_of_cases("compile_kernels", __doc__, archs=[90], size="usual")
    folder = record.ROOT / "kernels" / "binaries"
    parser.add_argument("--out", type=Path, default=folder, help="folder of the files (default: %(default)s)")
    args = parser.parse_args()
    refuse_interpreter(parser)
    import triton

    from fastformer.kernels import _binaries

    triton.knobs.compilation.disable_line_info = True
    for arch in args.arch:
        began = time.perf_counter()
        works = report.distinct_launches([arch], args.only, args.size)
        compiled = report.in_forks(_compiled, works, args.jobs)
        binaries = {key: binary for key, binary in compiled if binary is not None}  # omits what a file can't store
        path = args.out / _binaries.file_name(arch)
        _binaries.write(path, arch, binaries)
        raw = sum({binary.cubin: len(binary.cubin) for binary in binaries.values()}.values())
        print(
            f"{path}: {len(binaries)} of {len(works)} launches, {path.stat().st_size / 1e6:.2f} MB "
            f"({raw / 1e6:.2f} MB of machine code), triton {triton.__version__}, {time.perf_counter() - began:.0f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
