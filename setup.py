"""Packages and the C++ libraries of fastformer; everything static lives in pyproject.toml.

`kernels/` stays at the root of the repository and is installed as `fastformer.kernels`. It has no __init__.py: with
one, a checkout on sys.path would shadow Hugging Face's `kernels` package, which transformers probes by importing it.

The libraries are listed in `libraries()`. Some are compiled once per instruction set, and the import picks what the CPU
can run. No -march=native: a wheel built here runs elsewhere. A broken compiler fails the build with its own message; no
compiler, another architecture or system, or FASTFORMER_BUILD_CPP=0 leaves the libraries out.
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
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
OLDEST = {"setuptools": (77,), "torch": (2, 11), "numpy": (2,)}  # [build-system] in pyproject.toml
WITHOUT = "or set FASTFORMER_BUILD_CPP=0 to install without them"
# PyTorch's stable C functions and no others, of the oldest that is supported.
STABLE = "-DTORCH_TARGET_VERSION=0x020b000000000000"
INSTRUCTION_SETS = {
    "avx2": [STABLE, *AVX2, "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"],
    "avx512": [
        STABLE, *AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512",
        "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512",
    ],
}  # fmt: skip
FLAGS = ["-O3", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall"]
# GCC 12 warns of its own AVX-512 headers, whose "undefined" vectors are meant.
FLAGS += ["-Wno-unknown-pragmas", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
FLAGS += os.environ.get("FASTFORMER_CXXFLAGS", "").split()
HEADER = "common/precompiled.h"  # of csrc/
# The folders by the time that a source of theirs takes: a long one that comes last leaves the other cores idle.
LONGEST_FIRST = ["host", "ops", "engine", "common", "bindings"]
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
        once_flags: what those are compiled with in addition.
        shares: patterns of sources that other libraries are made of, too, and that are compiled without `flags`.
        isa: the instruction set that it is compiled for; None: any x86-64.
        flags: what its own sources are compiled with in addition.
        links: what it is linked with in addition.
        python: "none": it is no module of Python; "limited": one for every Python from 3.10 on; "this": for this one.
    """

    name: str
    sources: tuple[str, ...]
    once: tuple[str, ...] = ()
    once_flags: tuple[str, ...] = ()
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
                yield "once", path, [*self.flags, *self.once_flags, *INSTRUCTION_SETS["avx2"]]
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
        sys.exit(f"compiling the C++ libraries needs {name}: run `pip install {name}` first, {WITHOUT}")
    _check_version(name)
    return Path(found.origin).parent


def _check_version(name: str) -> list[str]:
    """Returns the numbers of an installed package's version, as texts; exits if it is too old.

    `pip --no-build-isolation` doesn't check versions, and the errors of packages that are too old don't mention theirs.
    """
    version = importlib.metadata.version(name)
    found = version.split(".")
    if tuple(int(number) for number in found[: len(OLDEST[name])]) < OLDEST[name]:
        oldest = ".".join(map(str, OLDEST[name]))
        sys.exit(
            f"building fastformer needs {name} {oldest} or newer, and {name} {version} is installed: "
            f"run `pip install '{name}>={oldest}'` first"
        )
    return found


def libraries() -> list[Library]:
    """All of them; the first is what the others are linked with."""
    python = f"-I{sysconfig.get_paths()['include']}"
    torch_libs = [f"-L{_package('torch') / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    names = ("thread_team", "buffer_pool", "cpu_features", "brgemm", "memory_report")
    found = [Library("libfastformer_common", tuple(f"common/{name}.cpp" for name in names), links=("-ldl", "-pthread"))]
    products = ("common/gemm*.cpp",)
    for isa in INSTRUCTION_SETS:
        once = ("common/share_out.cpp",)
        sources = ("ops/*.cpp", "common/tensor.cpp", *once)
        links = ("-fopenmp", f"-L{_package('torch') / 'lib'}", "-ltorch_cpu")
        found.append(Library(f"_ops_{isa}", sources, once, ("-fopenmp",), products, isa, links=links))
    for isa in INSTRUCTION_SETS:
        flags = (python, f"-isystem{_package('numpy') / '_core/include'}", f"-DFASTFORMER_ISA={isa}")
        stepwise = ("decoder", "encoder", "search", "token_cache", "prefix_table")
        once = (*(f"engine/{name}.cpp" for name in stepwise), "bindings/[!m]*.cpp")  # all but module.cpp
        sources = ("engine/*.cpp", "bindings/*.cpp")
        found.append(Library(f"_engine_{isa}", sources, once, (), products, isa, flags, python="limited"))
    # Bound to this PyTorch and this Python by its name; see `_extension.host_function`.
    host = "_host_torch{}_{}".format(*_check_version("torch")[:2])
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
        try:
            subprocess.run([_ninja(), *options, "-f", str(file)], cwd=ROOT, check=True)
        except FileNotFoundError:
            sys.exit(f"compiling the C++ libraries needs ninja: run `pip install ninja` first, {WITHOUT}")
        except subprocess.CalledProcessError:
            compiler = os.environ.get("CXX", "c++")
            sys.exit(
                f"{compiler} can't compile the C++ libraries, for the reasons above. They need C++20, such as that of "
                f"g++ 11. Set CXX to another compiler, {WITHOUT}"
            )

    def _ninja_file(self, folder: Path) -> Iterator[str]:
        torch = _package("torch") / "include"
        includes = ["-Icsrc", f"-isystem{torch}", f"-isystem{torch / 'torch/csrc/api/include'}"]
        # Headers put their own paths into messages of errors; those get none of this machine's folders.
        paths = [f"-fmacro-prefix-map={folder}/=" for folder in (torch, sysconfig.get_paths()["include"])]
        yield f"builddir = {_escaped(folder)}"
        yield f"cxx = {os.environ.get('CXX', 'c++')}"
        yield f"flags = {shlex.join([*FLAGS, *includes, *paths])}"
        yield f"links = {' '.join(LINK_FLAGS)}"
        yield "rule compile\n command = $cxx -MMD -MF $out.d $header $flags $more -c $in -o $out"
        yield " depfile = $out.d\n deps = gcc\n description = compiling $out"
        yield "rule link\n command = $cxx $in $links $more -o $out\n description = linking $out"
        made: dict[Path, tuple[Path, list[str]]] = {}
        links: list[str] = []
        common: list[Path] = []
        for extension in self.extensions:
            library: Library = extension.library
            output = Path(self.get_ext_fullpath(extension.name)).absolute()
            output.parent.mkdir(parents=True, exist_ok=True)
            objects = []
            for prefix, source, flags in library.compiled():
                objects.append(folder / f"{prefix}/{source.parent.name}/{source.stem}.o")
                made.setdefault(objects[-1], (source, flags))
            more = " ".join([*library.links, *([] if common else [f"-Wl,-soname,{output.name}"])])
            links.append(
                f"build {_escaped(output)}: link {' '.join(map(_escaped, [*objects, *common]))}\n more = {more}"
            )
            common = common or [output]
        steps = sorted(made.items(), key=lambda step: LONGEST_FIRST.index(step[1][0].parent.name))
        yield from _compile_steps(folder, steps)
        yield from links


def _compile_steps(folder: Path, steps: list[tuple[Path, tuple[Path, list[str]]]]) -> Iterator[str]:
    """Yields the part of ninja's file that compiles `steps`: for each object, its source and flags.

    Before sources with vector instructions, the headers of the standard library and of PyTorch are compiled, once for
    each set of flags. GCC finds the result in a folder that it searches before csrc/. If the compiler can't make or use
    the result, an empty file replaces it, and GCC reads the header itself.
    """
    beforehand = _precompiles_headers()
    if beforehand:
        make = "$cxx -MD -MF $out.d $flags $more -x c++-header -c $in -o $out"
        use = "$cxx $header $flags $more -Werror=invalid-pch -fsyntax-only -x c++ /dev/null"
        yield f"rule precompile\n command = {make} && {use} || : > $out"
        yield " depfile = $out.d\n deps = gcc\n description = precompiling $out"
    made: dict[str, tuple[Path, str]] = {}
    sources_with = Counter(_common(flags) for _, (_, flags) in steps)
    for target, (source, flags) in steps:
        before, header, common = None, "", _common(flags)
        if beforehand and common and sources_with[common] > 1:
            if common not in made:
                place = folder / f"header{len(made)}"
                header = f"-I{_escaped(place)} -include {HEADER}"
                made[common] = place / f"{HEADER}.gch", header
                yield f"build {_escaped(made[common][0])}: precompile csrc/{HEADER}"
                yield f" more = {common}\n header = {header}"
            before, header = made[common]
        yield f"build {_escaped(target)}: compile {source}" + (f" | {_escaped(before)}" if before else "")
        yield f" more = {' '.join(flags)}\n header = {header}"


def _common(flags: list[str]) -> str:
    """The flags without folders and names of a library, which change nothing in the headers of others."""
    return " ".join(flag for flag in flags if not flag.startswith(("-I", "-isystem", "-DFASTFORMER")))


def _precompiles_headers() -> bool:
    """Whether the compiler is GCC, and runs without a cache: ccache needs its user to allow precompiled headers."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve().name
    wrapped = len(compiler) > 1 and not compiler[1].startswith("-")
    if wrapped or (program == "ccache" and "CCACHE_DISABLE" not in os.environ):
        return False
    macros = subprocess.run([*compiler, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True)
    return macros.returncode == 0 and "__GNUC__" in macros.stdout and "__clang__" not in macros.stdout


def _escaped(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    return str(beside) if beside.exists() else "ninja"


def cpp_extensions() -> dict[str, Any]:
    """ext_modules and cmdclass for setup(), empty where there is nothing to build."""
    is_known = sys.platform == "linux" and platform.machine() == "x86_64"
    wanted = os.environ.get("FASTFORMER_BUILD_CPP", "1") != "0" and is_known
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


_check_version("setuptools")
setup(
    packages=[*find_packages(include=["fastformer*"]), "fastformer.kernels"],
    package_dir={"fastformer.kernels": "kernels"},
    **cpp_extensions(),
)
