"""Which ptxas turns PTX into machine code.

Triton 3.6 and 3.7 bring that of CUDA 12.8, which in kernels of other projects overwrote registers of products in flight
(Triton's issue 11781). `benchmarks/machine_code/hazards.py` finds no such place in ours; all the same a newer one of
the machine takes its place in the plan for a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path


def newer_assembler() -> str | None:
    """The newest ptxas of the machine's CUDA, if it is newer than Triton's; None: there is none."""
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin", *Path("/usr/local").glob("cuda*/bin")]
    found = {str(place / "ptxas"): version_of(place / "ptxas") for place in places if (place / "ptxas").is_file()}
    newest = max(found, key=lambda path: found[path], default=None)
    return newest if newest is not None and found[newest] > version_of(own) else None


def version_of(ptxas: Path) -> tuple[int, ...]:
    """Of an assembler, such as (13, 0, 88); () where it doesn't say."""
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"V(\d+(?:\.\d+)+)", said)
    return tuple(map(int, version[1].split("."))) if version is not None else ()
