"""Packages and the C++ libraries of fastformer; everything static lives in pyproject.toml.

`kernels/` stays at the root of the repository and is installed as `fastformer.kernels`. It has no __init__.py: with
one, a checkout on sys.path would shadow Hugging Face's `kernels` package, which transformers probes by importing it.

The libraries are listed in `libraries()`. Some are compiled once per instruction set, and the import picks what the CPU
can run. No -march=native: a wheel built here runs elsewhere. A broken compiler fails the build with its own message; no
compiler, another architecture, or FASTFORMER_BUILD_CPP=0 leaves the libraries out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
INSTRUCTION_SETS = {
    "avx2": [*AVX2, "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"],
    "avx512": [
        *AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512",
        "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512",
    ],
}  # fmt: skip
FLAGS = ["-O3", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall"]
# GCC 12 warns of its own AVX-512 headers, whose "undefined" vectors are meant.
FLAGS += ["-Wno-unknown-pragmas", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
FLAGS += os.environ.get("FASTFORMER_CXXFLAGS", "").split()
LINK_FLAGS = ["-shared", "'-Wl,-rpath,$$ORIGIN'", "-Wl,--as-needed"]
LINK_FLAGS += os.environ.get("FASTFORMER_LDFLAGS", "-Wl,-s").split()


@dataclass
class Library:
    """A shared library in fastformer/.

    Attributes:
        name: that of its module, or of its file without ".so".
        sources: patterns below csrc/.
        once: those of them without vectors: compiled for AVX2 alone, and linked into the library of each
            instruction set.
        shares: patterns of sources that other libraries are made of, too, and that are compiled without `flags`.
        isa: the instruction set that it is compiled for; None: any x86-64.
        flags: what its own sources are compiled with in addition.
        links: what it is linked with in addition.
        python: "none": it is no module of Python; "limited": one for every Python from 3.10 on; "this": for this one.
    """

    name: str
    sources: tuple[str, ...]
    once: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    isa: str | None = None
    flags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    python: str = "none"

    def extension(self) -> Extension:
        found = Extension(
            f"fastformer.{self.name}",
            [str(path) for path in _paths(self.sources) + _paths(self.shares)],
            py_limited_api=self.python == "limited",
        )
        found.library = self
        return found

    def compiled(self) -> Iterator[tuple[str, Path, list[str]]]:
        """The folder of its object, the source and the flags of each file that it is made of."""
        own = INSTRUCTION_SETS.get(self.isa or "", [])
        once = _paths(self.once)
        for path in _paths(self.sources):
            if path in once:
                yield "once", path, [*self.flags, *INSTRUCTION_SETS["avx2"]]
            else:
                yield self.name, path, [*self.flags, *own]
        for path in _paths(self.shares):
            yield self.isa or "", path, own


def _paths(patterns: Iterable[str]) -> list[Path]:
    return [path.relative_to(ROOT) for each in patterns for path in sorted((ROOT / "csrc").glob(each))]


def _package(name: str) -> Path:
    """The folder of an installed package, without the seconds that an import of PyTorch takes."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        sys.exit(f"building the C++ libraries needs {name}; FASTFORMER_BUILD_CPP=0 leaves them out")
    return Path(found.origin).parent


def libraries() -> list[Library]:
    """All of them; the first is what the others are linked with."""
    python = f"-I{sysconfig.get_paths()['include']}"
    torch_libs = [f"-L{_package('torch') / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    names = ("thread_team", "buffer_pool", "cpu_features", "brgemm", "memory_report")
    found = [Library("libfastformer_common", tuple(f"common/{name}.cpp" for name in names), links=("-ldl", "-pthread"))]
    products = ("common/gemm*.cpp",)
    for isa in INSTRUCTION_SETS:
        # PyTorch's stable C functions and no others, of the oldest version that is supported: 2.11.
        flags = ("-fopenmp", "-DTORCH_TARGET_VERSION=0x020b000000000000")
        once = ("common/share_out.cpp",)
        sources = ("ops/*.cpp", "common/tensor.cpp", *once)
        links = ("-fopenmp", f"-L{_package('torch') / 'lib'}", "-ltorch_cpu")
        found.append(Library(f"_ops_{isa}", sources, once, products, isa, flags, links))
    for isa in INSTRUCTION_SETS:
        flags = (python, f"-isystem{_package('numpy') / '_core/include'}", f"-DFASTFORMER_ISA={isa}")
        stepwise = ("decoder", "encoder", "search", "token_cache", "prefix_table")
        once = (*(f"engine/{name}.cpp" for name in stepwise), "bindings/[!m]*.cpp")  # all but module.cpp
        sources = ("engine/*.cpp", "bindings/*.cpp")
        found.append(Library(f"_engine_{isa}", sources, once, products, isa, flags, python="limited"))
    # Bound to this PyTorch and this Python by its name; see `_extension.host_function`.
    host = "_host_torch{}_{}".format(*importlib.metadata.version("torch").split(".")[:2])
    flags = (python, f"-DFASTFORMER_MODULE={host}", "-DFASTFORMER_BOUND")
    sources = ("host/*.cpp", "bindings/python.cpp")
    found.append(Library(host, sources, flags=flags, links=tuple(torch_libs), python="this"))
    return found


class BuildLibraries(build_ext):
    """Compiles each source once for each instruction set that it is needed for, by ninja."""

    def get_ext_filename(self, fullname: str) -> str:
        stem = fullname.rpartition(".")[2]
        if any(each.library.name == stem and each.library.python == "none" for each in self.extensions):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        folder = Path(self.build_temp).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "build.ninja"
        file.write_text("\n".join(self._ninja_file(folder)) + "\n")
        options = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        options += [] if self.verbose else ["--quiet"]
        subprocess.run([_ninja(), *options, "-f", str(file)], cwd=ROOT, check=True)

    def _ninja_file(self, folder: Path) -> Iterator[str]:
        torch = _package("torch") / "include"
        includes = ["-Icsrc", f"-isystem{torch}", f"-isystem{torch / 'torch/csrc/api/include'}"]
        yield f"builddir = {_escaped(folder)}"
        yield f"cxx = {os.environ.get('CXX', 'c++')}"
        yield f"flags = {shlex.join([*FLAGS, *includes])}"
        yield f"links = {' '.join(LINK_FLAGS)}"
        yield "rule compile\n command = $cxx -MMD -MF $out.d $flags $more -c $in -o $out"
        yield " depfile = $out.d\n deps = gcc\n description = compiling $out"
        yield "rule link\n command = $cxx $in $links $more -o $out\n description = linking $out"
        made: set[Path] = set()
        common: list[Path] = []
        for extension in self.extensions:
            library: Library = extension.library
            output = Path(self.get_ext_fullpath(extension.name)).absolute()
            output.parent.mkdir(parents=True, exist_ok=True)
            objects = []
            for prefix, source, flags in library.compiled():
                objects.append(folder / f"{prefix}/{source.parent.name}/{source.stem}.o")
                if objects[-1] not in made:
                    yield f"build {_escaped(objects[-1])}: compile {source}\n more = {' '.join(flags)}"
                made.add(objects[-1])
            more = " ".join([*library.links, *([] if common else [f"-Wl,-soname,{output.name}"])])
            yield f"build {_escaped(output)}: link {' '.join(map(_escaped, [*objects, *common]))}\n more = {more}"
            common = common or [output]


def _escaped(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    return str(beside) if beside.exists() else "ninja"


def cpp_extensions() -> dict[str, Any]:
    """ext_modules and cmdclass for setup(), empty where there is nothing to build."""
    wanted = os.environ.get("FASTFORMER_BUILD_CPP", "1") != "0" and platform.machine() in ("x86_64", "AMD64")
    compiler = os.environ.get("CXX", "c++")
    if wanted and shutil.which(shlex.split(compiler)[0]) is None:
        print(f"no C++ compiler ({compiler}): installing without the CPU kernels, so the ops run on plain PyTorch")
        return {}
    if not wanted or not (ROOT / "csrc").is_dir():
        return {}
    return {
        "ext_modules": [each.extension() for each in libraries()],
        "cmdclass": {"build_ext": BuildLibraries},
        # A wheel serves every CPython from 3.10 on: what is bound to one is optional, and has its name.
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(
    packages=[*find_packages(include=["fastformer*"]), "fastformer.kernels"],
    package_dir={"fastformer.kernels": "kernels"},
    **cpp_extensions(),
)
