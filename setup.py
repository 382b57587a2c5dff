"""Packages and the C++ extension of fastformer; everything static lives in pyproject.toml.

`kernels/` stays at the root of the repository and is installed as `fastformer.kernels`. It has no __init__.py: with
one, a checkout on sys.path would shadow Hugging Face's `kernels` package, which transformers probes by importing it.

The sources in `csrc/` are compiled once per instruction set, into `fastformer._C_<isa>`; the import picks what the CPU
can run. No -march=native: a wheel built here runs elsewhere. A broken compiler fails the build with its own message; no
compiler, another architecture, or FASTFORMER_BUILD_CPP=0 leaves the extension out.
"""

import os
import platform
import shutil
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
INSTRUCTION_SETS = {
    "avx2": [*AVX2, "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"],
    "avx512": [
        *AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512",
        "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512",
    ],
}  # fmt: skip


def cpp_extensions() -> dict:
    """ext_modules and cmdclass for setup(), empty where there is nothing to build."""
    wanted = os.environ.get("FASTFORMER_BUILD_CPP", "1") != "0" and platform.machine() in ("x86_64", "AMD64")
    compiler = os.environ.get("CXX", "c++")
    if wanted and shutil.which(compiler) is None:
        print(f"no C++ compiler ({compiler}): installing without the CPU kernels, so the ops run on plain PyTorch")
        return {}
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
    if not wanted or not sources:
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class BuildPerInstructionSet(BuildExtension):
        def build_extension(self, ext):  # type: ignore[no-untyped-def]
            # The same sources are compiled once per instruction set: each needs object files of its own.
            shared = self.build_temp
            self.build_temp = os.path.join(shared, ext.name.rpartition(".")[2])
            super().build_extension(ext)
            self.build_temp = shared

    common = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall"]
    # GCC 12 warns of its own AVX-512 headers, whose "undefined" vectors are meant.
    common += ["-Wno-unknown-pragmas", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    common += os.environ.get("FASTFORMER_CXXFLAGS", "").split()
    modules = [
        CppExtension(
            f"fastformer._C_{isa}",
            sources,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=[*common, f'-DFASTFORMER_ISA="{isa}"', *flags],
            extra_link_args=["-fopenmp", *os.environ.get("FASTFORMER_LDFLAGS", "").split()],
        )
        for isa, flags in INSTRUCTION_SETS.items()
    ]
    return {"ext_modules": modules, "cmdclass": {"build_ext": BuildPerInstructionSet.with_options(use_ninja=True)}}


setup(
    packages=[*find_packages(include=["fastformer*"]), "fastformer.kernels"],
    package_dir={"fastformer.kernels": "kernels"},
    **cpp_extensions(),
)
