"""Tests kernels that were compiled ahead of time: their files, and the C++ launcher on a stub of CUDA's driver."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from benchmarks.host_time import HopperStubDriver  # noqa: E402
from benchmarks.machine_code.stub_driver import StubDevice, library  # noqa: E402
from fastformer.kernels import _binaries, _host, _launch  # noqa: E402
from fastformer.kernels._binaries import Binary, BinaryFile  # noqa: E402
from fastformer.kernels._signature import arguments_of, key_of, layout_of, signature_of  # noqa: E402
from fastformer.ops import _extension  # noqa: E402
from tests.kernels.triton_launches import logged  # noqa: E402

ROOT = Path(__file__).parents[2]
Start = Callable[..., object]


def _kernel(x_ptr, count, scale, strides, FLAG: tl.constexpr, BLOCK: tl.constexpr = 16):
    pass


@pytest.fixture(scope="module")
def stub() -> ctypes.CDLL:
    if torch.cuda.is_available():
        pytest.skip("there is NVIDIA's own driver")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("there is no C compiler to build a stub of the driver")
    return library()


@pytest.fixture
def make(stub: ctypes.CDLL) -> Start:
    function = _extension.host_function("make_kernel")
    if function is None:
        pytest.skip("the C++ extension is not built")
    return function


def started(stub: ctypes.CDLL, start: Start, *args: object) -> list[bytes]:
    """Records the bytes of each parameter that a launch passes."""
    with logged(stub) as lines:
        start(3, 5, 2, 77, *args)
    (line,) = (line for line in lines if "kernel" in line)
    assert line["grid"] == [3, 5, 2] and line["stream"] == 77 and not line["attributes"] and not line["bad"]
    return [bytes.fromhex(text) for text in line["parameters"]]


def function_of(stub: ctypes.CDLL, *sizes: int) -> int:
    return stub.stub_function((ctypes.c_int * len(sizes))(*sizes), len(sizes))


def test_parameters_are_packed_by_the_layout(stub: ctypes.CDLL, make: Start) -> None:
    x = torch.zeros(4)
    start = make(function_of(stub, 8, 1, 2, 4, 8, 8, 4, 8, 8, 4, 8, 8), 128, 0, 0, "pbhiqQfd(p(in)n)n00", ())
    arguments = (x, True, -2, 2**31 - 1, -(2**40), 2**63 + 1, 0.1, 0.1, (None, (7, None), 3), "compiled in")
    assert started(stub, start, *arguments) == [
        struct.pack("<Q", x.data_ptr()), b"\x01", struct.pack("<h", -2), struct.pack("<i", 2**31 - 1),
        struct.pack("<q", -(2**40)), struct.pack("<Q", 2**63 + 1), struct.pack("<f", 0.1), struct.pack("<d", 0.1),
        bytes(8), struct.pack("<i", 7), bytes(8), bytes(8),
    ]  # fmt: skip


def test_wrong_arguments_are_errors_and_launch_nothing(stub: ctypes.CDLL, make: Start) -> None:
    x = torch.zeros(4)
    start = make(function_of(stub, 8, 4, 4), 128, 0, 0, "pi(f)", ())
    before = stub.stub_launches()
    for kind, args in (
        (TypeError, (x, 1)),
        (TypeError, (x, 1, (0.5,), 2)),
        (TypeError, (x, 1, (0.5, 0.5))),
        (TypeError, (x, 1, 0.5)),
        (TypeError, (x, "1", (0.5,))),
        (OverflowError, (x, 2**32, (0.5,))),
        (AttributeError, (object(), 1, (0.5,))),
    ):
        with pytest.raises(kind):
            start(1, 1, 1, 0, *args)
    stub.stub_host_memory(x.data_ptr())
    with pytest.raises(ValueError):  # as Triton: a tensor in the CPU's memory would take the GPU's context down
        start(1, 1, 1, 0, x, 1, (0.5,))
    stub.stub_host_memory(None)
    with pytest.raises(RuntimeError):  # more shared memory than there is
        make(function_of(stub), 128, 2**20, 0, "", ())(1, 1, 1, 0)
    assert stub.stub_launches() == before + 1  # the driver refused the last one
    start(0, 1, 1, 0, x, 1, (0.5,))
    assert stub.stub_launches() == before + 1
    for layout in ("x", "(p", "p)", "T"):
        with pytest.raises(ValueError):
            make(function_of(stub), 128, 0, 0, layout, ())
    with pytest.raises(RuntimeError):
        make((b"no machine code" * 10, "kernel"), 128, 0, 0, "", ())


def test_a_descriptors_tensor_map_is_made_once(stub: ctypes.CDLL, make: Start) -> None:
    def descriptor(address: int, **more: Any) -> SimpleNamespace:
        base = SimpleNamespace(data_ptr=lambda: address)
        return SimpleNamespace(base=base, shape=[48, 64], strides=[128, 1], padding="zero", **more)

    recipe = (3, 2, 9, (16, 64))  # the widest swizzle, of bf16
    start = make(function_of(stub, 128, 4, 4, 8, 8), 128, 0, 0, "T", (recipe,))
    cached, other, fresh = descriptor(0x1000, encoded={}), descriptor(0x2000, encoded={}), descriptor(0x3000)
    for argument, times in ((cached, [1, 0, 0]), (other, [1, 0]), (fresh, [1, 1])):
        for expected in times:
            with logged(stub) as lines:
                start(1, 1, 1, 0, argument)
            maps = [line for line in lines if "tensor_map" in line]
            assert len(maps) == expected and not any(line["bad"] for line in maps)
            (line,) = (line for line in lines if "kernel" in line)
            words = struct.unpack("<16Q", bytes.fromhex(line["parameters"][0]))
            assert words[0] == argument.base.data_ptr() and words[2:4] == (64, 48) and words[7] == 256
            assert words[11] == 64 | 16 << 32
            assert line["parameters"][1:] == [struct.pack(*x).hex() for x in
                                              (("<i", 48), ("<i", 64), ("<q", 128), ("<q", 1))]  # fmt: skip
    with pytest.raises(RuntimeError):  # an address that no map can have
        start(1, 1, 1, 0, descriptor(0x1008))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FASTFORMER_KERNELS", str(tmp_path))
    _binaries.files.cache_clear()
    yield tmp_path
    _binaries.files.cache_clear()


BINARY = Binary("kernel", 128, 1024, "pif(iip)00", ((3, 2, 9, (1, 64)),), b"\x7fELF machine code")


def test_a_file_returns_its_contents(folder: Path) -> None:
    path = folder / _binaries.file_name(90)
    _binaries.write(path, 90, {"one": BINARY, "two": BINARY._replace(cubin=b"other"), "same": BINARY})
    file = BinaryFile(path)
    assert list(file.keys()) == ["one", "two", "same"] and file.about["arch"] == 90
    assert file.get("one") == file.get("same") == BINARY and file.get("two").cubin == b"other"
    assert _binaries.find(90, "one") == BINARY
    assert _binaries.find(90, "three") is None is _binaries.find(80, "one")


def test_a_file_for_other_sources_is_ignored(folder, monkeypatch, caplog) -> None:
    path = folder / _binaries.file_name(90)
    _binaries.write(path, 90, {"one": BINARY})
    with monkeypatch.context() as patched:
        patched.setattr(_binaries, "source_digest", lambda: "of later sources")
        assert _binaries.find(90, "one") is None
    for text in (b"no file of kernels", _binaries.MAGIC + bytes(4)):
        _binaries.files.cache_clear()
        path.write_bytes(text)
        assert _binaries.find(90, "one") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    monkeypatch.setenv("FASTFORMER_KERNELS", "")
    assert _binaries.folders() == []


def key(*args: object, kernel: Any = None, **options: object) -> str:
    kernel = kernel or JITFunction(_kernel)
    arguments, compiler = arguments_of(kernel, args, options)
    return key_of(kernel, signature_of(kernel, arguments), compiler)


def test_a_key_holds_all_that_a_binary_was_specialised_on() -> None:
    x = torch.zeros(64)
    base: tuple[tuple[object, ...], dict[str, object]] = ((x, 32, 0.5, (7, 16, x)), {"FLAG": True, "num_warps": 4})
    changed = [
        ((x[1:], 32, 0.5, (7, 16, x)), {}), ((x.half(), 32, 0.5, (7, 16, x)), {}), ((None, 32, 0.5, (7, 16, x)), {}),
        ((x, 33, 0.5, (7, 16, x)), {}), ((x, 1, 0.5, (7, 16, x)), {}), ((x, 2**31, 0.5, (7, 16, x)), {}),
        ((x, 32, 1, (7, 16, x)), {}), ((x, 32, 0.5, (1, 16, x)), {}), ((x, 32, 0.5, (7, 16, None)), {}),
        ((x, 32, 0.5, (7, 16)), {}), (base[0], {"FLAG": False}), (base[0], {"FLAG": 1}), (base[0], {"BLOCK": 32}),
        (base[0], {"num_warps": 8}), (base[0], {"num_stages": 2}), (base[0], {"maxnreg": 128}),
    ]  # fmt: skip
    keys = [key(*base[0], **base[1]), *(key(*args, **base[1] | options) for args, options in changed)]
    assert len(set(keys)) == len(keys)
    same: list[tuple[Any, Any]] = [((torch.ones(16), 48, 2.0, (9, 0, x)), {})]
    same += [(base[0], {"BLOCK": 16}), (base[0], {"maxnreg": None})]
    assert {key(*args, **base[1] | options) for args, options in same} == {keys[0]}

    def _other(x_ptr, count, scale, strides, FLAG: tl.constexpr, BLOCK: tl.constexpr = 16):
        pass

    assert key(*base[0], kernel=JITFunction(_other), **base[1]) != keys[0]


ARGS: tuple[Any, ...] = (torch.zeros(64), 32, 0.5, (7, 16, torch.zeros(64)))
OPTIONS: dict[str, Any] = {"FLAG": True, "num_warps": 4}


@pytest.fixture
def in_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel whose binary is in a file, on a device of sm_90 without a compiler."""

    def no_compiler(*_: object) -> None:
        raise RuntimeError("the compiler was asked")

    for name in ("_compiled", "_ready"):
        monkeypatch.setattr(_launch, name, {})
    monkeypatch.setattr(_host, "active", StubDevice(90))
    monkeypatch.setattr(_binaries, "compile_kernel", no_compiler)
    _binaries.write(folder / _binaries.file_name(90), 90, {key(*ARGS, **OPTIONS): BINARY})
    return JITFunction(_kernel)


def test_a_launch_takes_its_binary_from_a_file(in_a_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file lacks the binary, the launch compiles it; watchers are called for both."""
    recipes: list[tuple[Any, ...]] = []
    launched: list[tuple[object, ...]] = []

    def make(*recipe: Any) -> Start:
        recipes.append(recipe)
        return lambda *args: launched.append(args)

    seen: list[Any] = []
    monkeypatch.setattr(_launch, "watchers", [seen.append])
    monkeypatch.setattr(_host, "extension_function", lambda name: make)
    run, x = _launch.Launch(in_a_file, (3,), **OPTIONS), ARGS[0]
    for _ in range(3):
        run(*ARGS)
        _launch.launch(in_a_file, (3,), *ARGS, **OPTIONS)
    _launch.launch(in_a_file, (3,), x, 64, 0.5, (7, 32, x), **OPTIONS)  # specialised alike
    assert recipes == [((BINARY.cubin, "kernel"), 128, 1024, 0, BINARY.layout, BINARY.maps)]
    assert launched[:6] == [(3, 1, 1, 77, *ARGS)] * 6
    ((name, arch, _, origin, seconds, binary),) = seen
    assert (name, arch, origin, binary) == ("_kernel", 90, "file", BINARY) and seconds > 0
    with pytest.raises(RuntimeError, match="compiler"):
        _launch.launch(in_a_file, (3,), x[1:], *ARGS[1:], **OPTIONS)


def test_a_launch_without_the_extension_takes_its_binary_from_a_file(in_a_file: Any, monkeypatch: pytest.MonkeyPatch):
    """Triton's own launcher gets the binary."""
    loaded: list[tuple[object, ...]] = []
    launched: list[tuple[object, ...]] = []

    class Driver(HopperStubDriver):
        def __init__(self) -> None:
            super().__init__()
            self.utils = SimpleNamespace(
                get_device_properties=lambda device: {"max_shared_mem": 2**20},
                load_binary=self.load_binary,
                unload_module=lambda module: None,
            )

        def load_binary(self, *binary: object) -> tuple[int, ...]:
            loaded.append(binary)
            return 1, 2, 0, 0, 1024

        def launcher_cls(self, source: Any, metadata: Any) -> Start:
            assert source.signature["strides"] == ("i32", "i32", "*fp32") and source.fn is in_a_file
            assert metadata.tensordesc_meta == [
                {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}
            ]
            return lambda *args: launched.append(args)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(_host, "extension_function", lambda name: None)
    for _ in range(2):
        _launch.launch(in_a_file, (3,), *ARGS, **OPTIONS)
    assert loaded == [(BINARY.name, BINARY.cubin, BINARY.shared, 0)]
    assert launched == [(3, 1, 1, 77, 2, (4, 1, 1024), None, None, None, *ARGS, True, 16)] * 2
    for store in (_launch._compiled, _launch._ready):
        store.clear()  # from Triton 3.8 on, the driver unloads what nothing refers to


def test_a_layout_follows_from_the_types() -> None:
    kernel, x = JITFunction(_kernel), torch.zeros(64)
    arguments, _ = arguments_of(kernel, (x, 2**40, 0.5, (1, None, (x, True), 3)), {"FLAG": True})
    assert layout_of(signature_of(kernel, arguments), 4) == "pqf(nn(pb)i)00"


COMPARISON = (
    "import sys, fastformer.ops; from tests.kernels.triton_launches import compare; print(compare(sys.argv[1], 90))"
)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["once", "quick"])
def test_every_launch_equals_tritons_byte_for_byte(size: str, tmp_path: Path) -> None:
    """Each kernel is compiled into a file, and launched from the file and by Triton's own launcher, on a stub."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["FASTFORMER_KERNELS"] = str(tmp_path)
    command = ["-m", "benchmarks.compile_kernels", f"--{size}", "--out", str(tmp_path)]
    for arguments in (command, ["-c", COMPARISON, size]):
        proc = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert proc.returncode == 0, proc.stdout + proc.stderr
    *unlike, count = proc.stdout.splitlines()
    keys = set(BinaryFile(tmp_path / "sm_90.kernels").keys())
    assert not unlike and int(count) >= len(keys) > 15  # two ops may share a launch
