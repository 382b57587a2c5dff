"""Kernels compiled ahead of time, in one file per architecture: a launch that finds its binary compiles nothing.

A file (`sm_90.kernels`) consists of an index in JSON and the compressed binaries. It stores the digest of the sources
(`source_digest`) from which it was made, and is ignored if they change. `python -m benchmarks.compile_kernels` writes a
file of the usual launches, and `fastformer warmup --out` a file of the kernels that a model launches.

FASTFORMER_KERNELS names the folder with the files; if it is empty, no file is used. By default, files are looked for in
the folder `binaries` next to this module, which a wheel may contain, and then in ~/.cache/fastformer/kernels.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import lzma
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from fastformer.kernels._fences import inserted
from fastformer.kernels._signature import Signature, layout_of

logger = logging.getLogger("fastformer")

MAGIC = b"fastformer kernels 1\n"


class Binary(NamedTuple):
    """A compiled kernel, with the facts that a launch needs.

    Attributes:
        name: the name of its function.
        threads: the number of threads of a program.
        shared: the bytes of dynamic shared memory of a program.
        layout: the layout of its parameters; see csrc/bindings/launcher.cpp.
        maps: for each tensor descriptor (swizzle, bytes per element, the driver's type, block).
        cubin: the machine code.
    """

    name: str
    threads: int
    shared: int
    layout: str
    maps: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    cubin: bytes


@functools.cache
def source_digest() -> str:
    """Returns a digest of the sources of all kernels. Any change to them makes all files obsolete."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


# A product and a sum may be rounded once. Without the option, Triton 3.9 warns, and 3.10 will round each.
FUSION = {"enable_fp_fusion": True}
# The element types of tensor maps: the compiler's number -> the driver's number.
_MAP_TYPES = {8: 10, 9: 8, 10: 9}


def _source_of(kernel: Any, signature: Signature) -> Any:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        Source = ASTSource
    return Source(fn=kernel, signature=signature.types, constexprs=signature.constants, attrs=signature.attributes)


def compile_kernel(kernel: Any, signature: Signature, options: Mapping[str, Any], capability: int) -> CompiledKernel:
    """Compiles a launch for an architecture (90 for sm_90), or takes it from Triton's cache."""
    source = _source_of(kernel, signature)
    with inserted(kernel) as more:
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**options, **more, **FUSION})


def compiled_of(binary: Binary, kernel: Any, signature: Signature, capability: int) -> CompiledKernel:
    """Returns a binary as Triton's compiler would, for Triton's own launcher. Nothing is compiled."""
    of_compiler = {number: own for own, number in _MAP_TYPES.items()}
    maps = [
        {"swizzle": m[0], "elem_size": m[1], "elem_type": of_compiler.get(m[2], m[2]), "block_size": m[3],
         "fp4_padded": False}
        for m in binary.maps
    ]  # fmt: skip
    facts = {
        "name": binary.name, "num_warps": binary.threads // 32, "shared": binary.shared, "tensordesc_meta": maps,
        "target": GPUTarget("cuda", capability, 32).__dict__, "warp_size": 32, "num_ctas": 1, "cluster_dims": (1, 1, 1),
        "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0, "global_scratch_align": 1,
        "profile_scratch_size": 0, "profile_scratch_align": 1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("kernel.json", "kernel.cubin")}
        paths["kernel.json"].write_text(json.dumps(facts))
        paths["kernel.cubin"].write_bytes(binary.cubin)
        return CompiledKernel(_source_of(kernel, signature), paths, binary.name)


def binary_of(compiled: CompiledKernel, signature: Signature, num_args: int) -> Binary | None:
    """Returns a compiled kernel's binary, or None if its launch needs more, such as clusters or scratch memory.

    Args:
        num_args: the number of the kernel's parameters that a launch passes; the others are constexprs.
    """
    metadata = compiled.metadata
    is_plain = (
        getattr(metadata, "num_ctas", 1) == 1
        and not getattr(metadata, "launch_cooperative_grid", False)
        and not getattr(metadata, "launch_pdl", False)
        and not getattr(metadata, "global_scratch_size", 0)
        and not getattr(metadata, "profile_scratch_size", 0)
    )
    layout = layout_of(signature, num_args)
    described = getattr(metadata, "tensordesc_meta", None) or ()
    if not is_plain or layout.count("T") != len(described) or any(m is None or m["fp4_padded"] for m in described):
        return None
    maps = tuple(
        (m["swizzle"], m["elem_size"], _MAP_TYPES.get(m["elem_type"], m["elem_type"]), tuple(m["block_size"]))
        for m in described
    )
    return Binary(metadata.name, 32 * metadata.num_warps, metadata.shared, layout, maps, compiled.asm["cubin"])


class BinaryFile:
    """A file of kernels. The index is read immediately, and a binary when a launch needs it.

    Raises:
        ValueError: the file is not a file of kernels.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"expected a file of kernels, {path} is none")
            size = int.from_bytes(file.read(8), "little")
            self._index: dict[str, Any] = json.loads(file.read(size))
        self._start = len(MAGIC) + 8 + size

    @property
    def about(self) -> dict[str, Any]:
        """The properties of the file: "sources" (see `source_digest`), "arch", "triton"."""
        return self._index["about"]

    def is_valid(self, arch: int) -> bool:
        """Returns whether the file was made for this architecture from these sources."""
        return self.about["sources"] == source_digest() and self.about["arch"] == arch

    def keys(self) -> Iterable[str]:
        """Returns the keys of all binaries; see `_signature.key_of`."""
        return self._index["kernels"].keys()

    def get(self, key: str) -> Binary | None:
        """Returns the binary of a launch, or None."""
        entry = self._index["kernels"].get(key)
        if entry is None:
            return None
        name, threads, shared, layout, maps, offset, size = entry
        with self.path.open("rb") as file:
            file.seek(self._start + offset)
            cubin = lzma.decompress(file.read(size))
        return Binary(name, threads, shared, layout, tuple((*m[:3], tuple(m[3])) for m in maps), cubin)


def write(path: Path, arch: int, binaries: Mapping[str, Binary]) -> None:
    """Writes a file of binaries by key. A concurrent reader sees the old file or the new one."""
    compressed: dict[bytes, tuple[int, int]] = {}
    blobs: list[bytes] = []
    offset = 0
    index: dict[str, Any] = {}
    for key, binary in binaries.items():
        if binary.cubin not in compressed:  # two keys may share a binary
            blob = lzma.compress(binary.cubin, preset=9)
            blobs.append(blob)
            compressed[binary.cubin] = offset, len(blob)
            offset += len(blob)
        index[key] = [*binary[:-1], *compressed[binary.cubin]]
    about = {"sources": source_digest(), "arch": arch, "triton": triton.__version__}
    head = json.dumps({"about": about, "kernels": index}, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(b"".join([MAGIC, len(head).to_bytes(8, "little"), head, *blobs]))
    temporary.replace(path)


def add(path: Path, arch: int, binaries: Mapping[str, Binary]) -> None:
    """Adds binaries to a file if it was made from the same sources; otherwise replaces it."""
    existing: dict[str, Binary] = {}
    if path.is_file() and (file := BinaryFile(path)).is_valid(arch):
        existing = {key: binary for key in file.keys() if (binary := file.get(key)) is not None}  # noqa: SIM118
    write(path, arch, existing | dict(binaries))


def describe(arch: int) -> str:
    """Returns a line for `fastformer doctor` that says where an architecture's kernels come from."""
    matching = files(arch)
    if not matching:
        return f"no file of kernels for sm_{arch}: Triton compiles each at its first call; see `fastformer warmup`"
    counts = ", ".join(
        f"{len(list(file.keys()))} in {file.path} (by Triton {file.about['triton']})" for file in matching
    )
    return f"kernels for sm_{arch} that need no compiler: {counts}"


def folders() -> list[Path]:
    """Returns the folders in which files are looked for."""
    named = os.environ.get("FASTFORMER_KERNELS")
    if named is not None:
        return [Path(named)] if named else []
    return [Path(__file__).parent / "binaries", Path.home() / ".cache" / "fastformer" / "kernels"]


def file_name(arch: int) -> str:
    """Returns the name of an architecture's file."""
    return f"sm_{arch}.kernels"


@functools.cache
def files(arch: int) -> tuple[BinaryFile, ...]:
    """Returns the files of an architecture that were made from these sources."""
    matching = []
    for folder in folders():
        path = folder / file_name(arch)
        if not path.is_file():
            continue
        try:
            file = BinaryFile(path)
        except (OSError, ValueError) as error:
            logger.warning("kernels are compiled at their first call: %s", error)
            continue
        if file.is_valid(arch):
            matching.append(file)
        else:
            logger.warning("kernels are compiled at their first call: %s was made of other sources than these", path)
    return tuple(matching)


def find(arch: int, key: str) -> Binary | None:
    """Returns the binary of a launch from any file, or None if no file has it."""
    return next((binary for file in files(arch) if (binary := file.get(key)) is not None), None)
