"""Chooses the ptxas that turns PTX into machine code.

Triton 3.6 and 3.7 contain the ptxas of CUDA 12.8. In kernels of other projects, its code overwrote registers that
products in flight still used (Triton's issue 11781). `benchmarks/machine_code/hazards.py` finds no such place in
fastformer's kernels. Nevertheless, the GPU plan uses the machine's ptxas if it is newer.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path


def newer_assembler() -> str | None:
    """Returns the path of the newest ptxas of the machine's CUDA if it is newer than Triton's, else None."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin", *Path("/usr/local").glob("cuda*/bin")]
    versions = {str(f / "ptxas"): version_of(f / "ptxas") for f in folders if (f / "ptxas").is_file()}
    newest = max(versions, key=lambda path: versions[path], default=None)
    return newest if newest is not None and versions[newest] > version_of(bundled) else None


def version_of(ptxas: Path) -> tuple[int, ...]:
    """Returns the version of an assembler, such as (13, 0, 88); () if it is unknown."""
    output = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"V(\d+(?:\.\d+)+)", output)
    return tuple(map(int, version[1].split("."))) if version is not None else ()
