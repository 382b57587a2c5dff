"""Set-up for all tests: strict fallbacks, the Triton interpreter without a GPU, and the backend parameter."""

from __future__ import annotations

import asyncio
import atexit
import collections
import copy
import dataclasses
import faulthandler
import functools
import gc
import inspect
import logging
import math
import os
import shutil
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

HAS_GPU = torch.cuda.is_available()
gc.disable()  # until all tests are collected: nearly all that is made until then stays

# These are read when kernels are imported or first compiled, so they are set before anything else.
os.environ.setdefault("FASTFORMER_STRICT", "1")
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Inductor caches in a folder for this process: two processes with one folder have read each other's incomplete files.
# (Triton renames complete files into its cache, so that one is shared, also between runs.)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastformer-tests-")
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import importlib.util  # noqa: E402

import pytest  # noqa: E402
import torch.utils.deterministic  # noqa: E402
from _pytest.faulthandler import fault_handler_stderr_fd_key  # noqa: E402
from _pytest.logging import catching_logs  # noqa: E402

from tests.quick_interpreter import fuse, quicken, sort_at_once  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"

if not HAS_GPU and importlib.util.find_spec("triton"):
    quicken()
    fuse()
    sort_at_once()
if not HAS_GPU:
    # For devices that are missing, torch.manual_seed keeps the seed and the stack of each call.
    absent: Any
    for absent in (torch.cuda, torch.xpu, torch.mtia):
        absent.manual_seed_all = lambda seed: None

if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    # Inductor checks the CPU and not this variable, and on a CPU with AVX-512 mixes 16 lanes with ATen's 8.
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 256


# No test outlives a failure of power, and none connects by TLS, for which each client would read all certificates.
os.fsync = lambda descriptor: None  # type: ignore[assignment]
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]


def _copy_quickly(kind: type) -> None:
    """Makes copy.deepcopy copy an empty container of a kind without its pickled form: a module has a dozen of them."""
    by_kind: dict[type, Callable[..., Any]] = vars(copy)["_deepcopy_dispatch"]
    reconstruct = vars(copy)["_reconstruct"]

    def copied(value: Any, memo: dict[int, Any]) -> Any:
        if value or getattr(value, "__dict__", None):
            return reconstruct(value, memo, *value.__reduce_ex__(4))
        return kind()

    by_kind[kind] = copied


_copy_quickly(collections.OrderedDict)
_copy_quickly(set)


@pytest.hookimpl(tryfirst=True)  # before -m selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, marks all tests of ops and kernels, so that `pytest -m gpu` runs each of them.

    FASTFORMER_TEST_SHARD="1/8" keeps every eighth test from the second on, for processes that share the work.
    """
    if HAS_GPU:
        for item in items:
            if item.path.parent.name in ("ops", "kernels") and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
    index, _, count = os.environ.get("FASTFORMER_TEST_SHARD", "0/1").partition("/")
    items[:] = items[int(index) :: int(count)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the garbage collector begin, which needn't look at millions of objects of modules and tests each time."""
    gc.freeze()
    gc.enable()
    if not session.config.option.durations:
        _send_results_alone(session.config)
    scheduler: Any = sys.modules.get("fastformer.generation.scheduler")
    if scheduler is not None:
        scheduler._CPU_BYTES = 2**24  # the default memory of a batch, which is filled with NaN in every test with one
    parsing: Any = sys.modules.get("fastformer.commands._parsing")
    if parsing is not None:
        parsing.make_parser = functools.cache(parsing.make_parser)  # a process makes the parser of one command


@dataclasses.dataclass
class _Watch:
    """The test that runs and its file, the garbage collector's full passes until the latest freeze, and when the
    watchdog was started.
    """

    item: pytest.Item | None = None
    file: str = ""
    passes: int = 0
    began: float = -math.inf


_watch = _Watch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Takes what has survived the tests of a file from the garbage collector: modules, caches and compiled code.

    Each full pass would look at all of it, which takes a third of a second. What the next tests make is collected as
    ever.
    """
    _watch.item = item
    _watch_for_a_test_that_hangs(item.config)
    if item.location[0] == _watch.file:
        return
    _watch.file = item.location[0]
    if gc.get_stats()[2]["collections"] > _watch.passes:
        gc.collect()
        gc.freeze()
        _watch.passes = gc.get_stats()[2]["collections"]


def _watch_for_a_test_that_hangs(config: pytest.Config) -> None:
    """Starts the thread that says where all threads are after five minutes, unless it began a moment ago.

    pytest would start one for each test, and wait for its end, which takes as long as many a test.
    """
    if time.monotonic() > _watch.began + 10:
        faulthandler.dump_traceback_later(300, file=config.stash.get(fault_handler_stderr_fd_key, 2))
        _watch.began = time.monotonic()


def pytest_exception_interact() -> None:
    _watch.began = -math.inf  # pytest has ended the thread


def pytest_sessionfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def _send_results_alone(config: pytest.Config) -> None:
    """Lets a process of xdist send what a test has shown, and not that its parts began or passed: four of six messages.

    Each message takes half a millisecond of both processes, as long as many a test.
    """
    for plugin in config.pluginmanager.get_plugins():
        send = getattr(plugin, "sendevent", None)
        if send is not None:
            plugin.sendevent = functools.partial(_send, send)


def _send(send: Callable[..., None], name: str, **values: Any) -> None:
    report = values.get("data", {})
    has_passed = report.get("outcome") == "passed" and not report["sections"]
    if name not in ("logstart", "logfinish") and not (has_passed and report["when"] != "call"):
        send(name, **values)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in an event loop of its own, for up to 30 seconds."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 30))
    return True


def _catch_logs_of_root(self: Any) -> Any:
    """Catches what reaches the root logger, as pytest before 9.1.

    Later ones look through all loggers, which are thousands with transformers, six times a test.
    """
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(self.orig_level, self.level))
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


if hasattr(catching_logs, "attached_loggers"):
    catching_logs.__enter__ = _catch_logs_of_root


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    """Seeds, fills fresh memory with NaN, and checks that a test restores the settings that it found."""
    item: Any = _watch.item  # a fixture that asks for the request takes longer than many a test
    torch.manual_seed(0)
    backend = hasattr(item, "callspec") and item.callspec.params.get("backend")
    has_kernels = HAS_GPU or backend == "triton" or item.path.parent.name == "kernels"
    if torch.get_deterministic_debug_mode() != (0 if has_kernels else 1):  # to set it takes long
        # Fresh memory is NaN then. Under Triton it would choose other kernels than users run.
        torch.use_deterministic_algorithms(not has_kernels, warn_only=True)
    patch = pytest.MonkeyPatch()
    if has_kernels:
        _poison_empty(patch)
    else:
        _poison_extension()
    settings = _settings()
    yield
    patch.undo()
    left = _settings()
    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["default dtype"])
    torch.set_grad_enabled(settings["gradients"])
    assert left == settings, "the test left torch with other settings"


@functools.cache
def _poison_extension() -> None:
    """Makes the C++ ops fill new tensors with NaN."""
    from fastformer.ops import _extension

    if _extension.instruction_set() is not None:
        torch.ops.fastformer_checks.fill_new_tensors(True)


def _poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch.empty and similar functions return NaN: an output that a kernel doesn't write is noticed.

    Fresh memory is often zeros, which many wrong results resemble.
    """
    empties: list[tuple[Any, str]] = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    for owner, name in empties:
        original = getattr(owner, name)

        def poisoned(*args: Any, original: Any = original, **options: Any) -> torch.Tensor:
            tensor: torch.Tensor = original(*args, **options)
            if type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.device.type != "meta":
                with torch.no_grad():
                    tensor.fill_(torch.nan)
            return tensor

        monkeypatch.setattr(owner, name, poisoned)


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """Restores PyTorch's number of threads and default dtype after a test that sets them."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


def _settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


@pytest.fixture
def device() -> str:
    return DEVICE


class Printed(NamedTuple):
    """What a command has printed."""

    out: str
    err: str


Ran = Callable[..., Printed]


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs a command line in this process, expects its exit code, and returns what was printed since the last look."""
    from fastformer.cli import main

    def run(*words: str, code: int = 0) -> Printed:
        try:
            status = main([*words])
        except SystemExit as end:  # of the help
            status = int(end.code or 0)
        assert status == code, words
        return Printed(*capsys.readouterr())

    return run


@dataclasses.dataclass
class Call:
    """A call of a function that a test watches."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any = None


CallsOf = Callable[[Any, str], list[Call]]


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> CallsOf:
    """Records the calls of an owner's function from now on."""

    def watch(owner: Any, name: str) -> list[Call]:
        calls: list[Call] = []
        function = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            calls.append(call := Call(args, options))  # before it ends, if it ends
            call.result = function(*args, **options)
            return call.result

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


@pytest.fixture(params=["reference", "cpp", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once for each available backend, with every op forced onto it."""
    yield from on_backend(request, request.node.path.stem.removeprefix("test_"))


def on_backend(request: pytest.FixtureRequest, stem: str) -> Iterator[str]:
    """Yields the backend for a fixture `backend`; "fallback" is the one that runs without the extension."""
    from fastformer.ops import use_backend

    name: str = request.param
    if name == "fallback":
        if HAS_GPU:
            pytest.skip("the fallback is that of CPUs")
        request.getfixturevalue("no_extension")
        yield name
        return
    skip_without(name, stem)
    with use_backend(name):
        yield name


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a CPU that the C++ extension doesn't support (ARM, macOS), or a machine without the extension."""
    leave_out_extension(monkeypatch)


def leave_out_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does the same as `no_extension`, for a part of a test."""
    from fastformer.ops import _dispatch, _extension

    monkeypatch.setattr(_extension, "load", lambda: None)
    monkeypatch.setattr(_extension, "module", lambda: None)
    monkeypatch.setattr(_extension, "function", lambda op_name: None)
    monkeypatch.setattr(_extension, "host_function", lambda name: None)
    for name, value in [*vars(_dispatch).items()]:  # clears cached answers about the extension
        if hasattr(value, "cache_info"):
            monkeypatch.setattr(_dispatch, name, functools.cache(value.__wrapped__))
    monkeypatch.setenv("FASTFORMER_STRICT", "0")


def skip_without(name: str, stem: str) -> None:
    """Skips a test of the op `stem` on a backend that is missing here."""
    if (reason := missing_backend(name, stem)) is not None:
        pytest.skip(reason)


def missing_backend(name: str, stem: str) -> str | None:
    """Returns why a backend can't be tested for the op `stem` on this machine, or None."""
    from fastformer.ops import _backends, _extension

    # Packed attention uses the kernels of `attention`.
    if name == "triton" and _backends.triton_kernel(stem.removeprefix("varlen_")) is None:
        return f"no Triton kernel for {stem} (or no triton)"
    if name == "cpp" and (HAS_GPU or _extension.load() is None):
        return "the C++ extension is not built" if not HAS_GPU else "the C++ ops are tested on a CPU"
    if name == "cpp" and not any(_extension.function(f"{stem}{suffix}") for suffix in ("_fwd", "")):
        return f"no C++ function for {stem}"
    return None
