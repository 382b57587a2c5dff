"""`launch` runs the binary for its arguments' signature, with this call's arguments; compilation is a stub."""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from benchmarks.host_time import HopperStubDriver, StubKernel, stub_compile  # noqa: E402
from fastformer.kernels import (  # noqa: E402
    _binaries,
    _fences,
    _host,
    _launch,
    add_layer_norm,
    attention,
    attention_backward,
    embedding,
    feed_forward,
    linear_cross_entropy,
    rotary,
)
from fastformer.kernels._launch import Launch, launch  # noqa: E402
from tests.conftest import CallsOf  # noqa: E402

Ran = tuple[StubKernel, tuple[Any, ...]]


def _kernel(x_ptr, y_ptr, count, size, scale, strides, FLAG: tl.constexpr, BLOCK: tl.constexpr = 16):
    pass


class TwoDevices(HopperStubDriver):
    """Two devices, one of which is the current device."""

    current = 0

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 100 + device


@pytest.fixture
def device_driver(monkeypatch: pytest.MonkeyPatch) -> TwoDevices:
    active = TwoDevices()
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(_host, "active", active)
    monkeypatch.setattr(_host, "extension_function", lambda name: None)  # Triton's own launcher
    monkeypatch.setattr(JITFunction, "_do_compile", stub_compile)
    monkeypatch.setattr(_binaries, "compile_kernel", lambda *_: StubKernel())
    monkeypatch.setattr(_binaries, "binary_of", lambda *_: None)
    monkeypatch.setattr(_launch, "_compiled", {})  # stubs stay in here
    monkeypatch.setattr(_launch, "_ready", {})
    return active


@pytest.fixture
def ran(device_driver: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    """Records launches: the stub of the binary, and all its arguments."""
    launches: list[Ran] = []
    monkeypatch.setattr(StubKernel, "run", property(lambda self: lambda *args: launches.append((self, args))))
    return launches


@pytest.fixture
def kernel() -> Any:
    return JITFunction(_kernel, do_not_specialize=["count"])


def by_triton(kernel: Any, *args: Any, **options: Any) -> Any:
    """Returns the binary of Triton's own launch; before 3.7.1, an option compiles it with fences."""
    with _fences.inserted(kernel) as more:
        return kernel.run(*args, grid=(1,), warmup=True, **options, **more, **_binaries.FUSION)


def variants() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Returns calls that differ in one thing each."""
    x = torch.zeros(64)
    base: tuple[Any, ...] = (x, x, 32, 32, 0.5, (32, 7, (16, x)))
    options: dict[str, Any] = {"FLAG": True, "num_warps": 4}
    yield base, options
    pointers = [None, x[1:], x[4:], x.bfloat16(), x.long(), x.to(torch.uint8), x.to(torch.uint8)[8:]]
    matrix = torch.zeros(64, 64)
    descriptors = [TensorDescriptor.from_tensor(matrix, block) for block in ([16, 16], [32, 16], [16, 16])]
    descriptors.append(TensorDescriptor.from_tensor(matrix.bfloat16(), [16, 16]))
    numbers = [0, 1, -1, 8, 16, 17, -16, 48, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, True, False, 1.0, 16.0, None]
    tuples: list[tuple[Any, ...]] = [
        (1, 7, (16, x)),
        (32, 7, (17, x)),
        (32, 7, (16, None)),
        (32, 7, (16, x[1:])),
        (32, 2**31, (16, x)),
        (32,),
    ]
    tuples += [(32, 7.0, (16, x)), (32, 7, (16, x, 1)), (32, 7, (x, 16))]
    for place, values in (
        (0, [*pointers, *descriptors]),
        (1, pointers),
        (2, numbers),
        (3, numbers),
        (4, [1, 16.0]),
        (5, tuples),
    ):
        for value in values:
            yield (*base[:place], value, *base[place + 1 :]), options
    for changed in ({"FLAG": False}, {"FLAG": None}, {"FLAG": "a"}, {"BLOCK": 16}, {"BLOCK": 32}, {"num_warps": 8}):
        yield base, {**options, **changed}
    for added in ({"num_stages": 2}, {"num_stages": 3}, {"maxnreg": 128}, {"maxnreg": 2}):
        yield base, {**options, **added}


def plain(values: Any) -> Any:
    """Returns arguments in a comparable form."""
    if isinstance(values, tuple | list):
        return [plain(value) for value in values]
    return id(values) if isinstance(values, torch.Tensor | TensorDescriptor) else (type(values), values)


def test_each_call_runs_the_binary_of_its_arguments(kernel: Any, ran: list[Ran]) -> None:
    """Triton distinguishes the same calls, after any earlier launches: the sweep runs three times, once in reverse."""
    calls = list(variants())
    picked = [by_triton(kernel, *args, **options) for args, options in calls]
    assert len(set(picked)) > 30  # the sweep tells binaries apart
    binaries: dict[int, StubKernel] = {}
    order = [*range(len(calls)), *range(len(calls))[::-1], *range(len(calls))]
    for index in order:
        args, options = calls[index]
        launch(kernel, (3, 5), *args, **options)
        compiled, (x, y, z, stream, function, metadata, *_) = ran[-1]
        assert binaries.setdefault(index, compiled) is compiled, (args, options)
        assert plain(ran[-1][1][9:]) == plain([*args, options["FLAG"], options.get("BLOCK", 16)])
        assert (x, y, z, stream, function, metadata) == (3, 5, 1, 100, compiled.function, compiled.packed_metadata)
    assert len(ran) == len(order)
    for i, j in itertools.combinations(range(len(calls)), 2):
        told_apart = picked[i] is not picked[j]
        if told_apart or calls[i][1].keys() == calls[j][1].keys():  # an option's default may be told apart
            assert (binaries[i] is not binaries[j]) == told_apart, (calls[i], calls[j])


def test_unspecialised_arguments_make_no_new_binary(ran: list[Ran]) -> None:
    """This includes elements of tuples, which Triton's own launch specialises, and only alignment if requested."""
    x = torch.zeros(64)
    counted = JITFunction(_kernel, do_not_specialize=["strides", "count"])
    for strides in ((1, 16, (0, x)), (7, 1, (16, x)), (32, 32, (1, x[1:]))):
        launch(counted, (1,), x, x, strides[0], 3, 0.5, strides, FLAG=True)
    assert len({compiled for compiled, _ in ran}) == 1
    launch(counted, (1,), x, x, 7, 3, 0.5, (2**31, 1, (1, x)), FLAG=True)  # another type
    launch(counted, (1,), x, x, 7, 3, 0.5, (7, None, (1, x)), FLAG=True)
    assert len({compiled for compiled, _ in ran}) == 3
    aligned = JITFunction(_kernel, do_not_specialize_on_alignment=["y_ptr", "size"])
    del ran[:]
    for y, size in ((x, 16), (x[1:], 17)):
        launch(aligned, (1,), x, y, 2, size, 0.5, (), FLAG=True)
    assert len({compiled for compiled, _ in ran}) == 1
    launch(aligned, (1,), x, x, 2, 1, 0.5, (), FLAG=True)
    assert len({compiled for compiled, _ in ran}) == 2


@pytest.mark.parametrize("repeated", [False, True], ids=["launch", "Launch"])
def test_each_device_has_a_binary_of_its_own(repeated, kernel, ran, device_driver) -> None:
    """A stored launch passes the arguments of each call."""
    (args, options), *_ = variants()
    run = Launch(kernel, (3, 5), **options) if repeated else partial(launch, kernel, (3, 5), **options)
    binaries: dict[int, StubKernel] = {}
    for current in (0, 0, 1, 0, 1, 1):
        device_driver.current = current
        call_args = (torch.zeros(64), *args[1:])
        run(*call_args)
        compiled, (*grid, stream) = ran[-1][0], ran[-1][1][:4]
        assert binaries.setdefault(current, compiled) is compiled and (*grid, stream) == (3, 5, 1, 100 + current)
        assert plain(ran[-1][1][9:]) == plain([*call_args, True, 16])
    assert binaries[0] is not binaries[1]


@pytest.mark.parametrize("repeated", [False, True], ids=["launch", "Launch"])
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_every_launch(name: str, repeated: bool, kernel: Any, ran: list[Ran]) -> None:
    (args, options), *_ = variants()
    run = Launch(kernel, (1,), **options) if repeated else partial(launch, kernel, (1,), **options)
    run(*args)
    run(*args)
    chain = getattr(knobs.runtime, name)
    chain.add(print)
    try:
        run(*args)
    finally:
        chain.remove(print)
    call = ran[-1][1]
    assert call[6] is not None and call[7:9] == (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    seen = []
    kernel.add_pre_run_hook(lambda *args, **options: seen.append(args))
    run(*args)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "fpsan"),
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash")),
    ],
)
def test_settings_make_other_binaries(owner, name, value, kernel, ran, monkeypatch) -> None:
    if name == "add_stages_inspection_hook" and triton.__version__.startswith("3.6."):
        pytest.skip("Triton 3.6 asks for it while it compiles alone")
    (args, options), *_ = variants()
    launch(kernel, (1,), *args, **options)
    monkeypatch.setattr(owner, name, value)
    launch(kernel, (1,), *args, **options)
    if owner is knobs.runtime or name == "instrumentation_mode":
        assert ran[1][0] is by_triton(kernel, *args, **options) is not ran[0][0]
    monkeypatch.undo()


def test_a_kernel_that_can_be_launched_stays_loaded(kernel, ran, monkeypatch: pytest.MonkeyPatch) -> None:
    references: list[weakref.ref[StubKernel]] = []

    def compiled(*_: object) -> StubKernel:
        stub = StubKernel()
        references.append(weakref.ref(stub))
        return stub

    monkeypatch.setattr(_binaries, "compile_kernel", compiled)
    (args, options), *_ = variants()
    launch(kernel, (1,), *args, **options)
    ran.clear()
    gc.collect()
    assert [reference() is not None for reference in references] == [True]


def test_calls_of_another_form_get_their_own_binary(ran: list[Ran]) -> None:
    """Constexprs may be passed by position, and other arguments by name."""
    x = torch.zeros(8)
    kernel = JITFunction(_kernel)
    for flag, block in ((True, 16), (True, 32), (False, 32), (True, 16)):
        launch(kernel, (1,), x, x, 2, 3, 0.5, (), flag, block)
        assert ran[-1][1][-2:] == (flag, block)
        assert ran[-1][0] is by_triton(kernel, x, x, 2, 3, 0.5, (), flag, block)
    for size in (17, 18):
        launch(kernel, (1,), x, x, 2, size=size, scale=0.5, strides=(), FLAG=True)
        assert ran[-1][1][12] == size


@triton.jit(do_not_specialize=["count"])
def _scale_kernel(x_ptr, y_ptr, count, scale, strides, TWICE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * strides[0], mask=at < count, other=0.0)
    if TWICE:
        x += x
    tl.store(y_ptr + at * strides[1], x * scale, mask=at < count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches on a device")
def test_a_device_runs_the_cached_binary(calls_of: CallsOf) -> None:
    """This includes a side stream, a graph, and unaligned addresses, for which 16-byte loads would fault."""
    runs = calls_of(_launch, "_resolve")

    def check(offset: int, stride: int, count: int, scale: float, twice: bool) -> None:
        x, y = torch.randn(4096, device="cuda"), torch.zeros(4096, device="cuda")
        into = y[offset:]
        launch(_scale_kernel, (1,), x[offset:], into, count, scale, (stride, 1), TWICE=twice, BLOCK=256, num_warps=4)
        assert torch.equal(into[:count], x[offset:][: count * stride : stride] * (2 * scale if twice else scale))
        assert not into[count:].any() and not y[:offset].any()

    kinds = [(offset, stride, twice) for offset in (0, 1, 4) for stride in (1, 3, 16) for twice in (True, False)]
    for count, scale in ((200, 0.5), (100, 2.0), (1, 4.0)):
        for offset, stride, twice in kinds:
            check(offset, stride, count, scale, twice)
        with torch.cuda.stream(torch.cuda.Stream()):
            check(*kinds[0][:2], count, scale, True)
    # A second round of the same kinds has nothing to look up.
    before = len(runs)
    for offset, stride, twice in kinds:
        check(offset, stride, 200, 0.25, twice)
    assert len(runs) == before <= 3 * len(kinds)

    x, y, graph = torch.randn(256, device="cuda"), torch.zeros(256, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(_scale_kernel, (1,), x, y, 200, 0.5, (1, 1), TWICE=False, BLOCK=256, num_warps=4)
    assert len(runs) == before
    x.fill_(3.0)
    graph.replay()
    assert y[:200].eq(1.5).all() and not y[200:].any()


def test_kernels_have_their_constexprs_last() -> None:
    """Only launches with constexprs by name, and the rest by position, are stored."""
    modules = (add_layer_norm, attention, attention_backward, embedding, feed_forward, linear_cross_entropy, rotary)
    kernels = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    assert len(kernels) > 15
    for name, kernel in kernels.items():
        parameters = inspect.signature(kernel.fn).parameters.values()
        are_constexprs = ["constexpr" in str(parameter.annotation) for parameter in parameters]
        assert are_constexprs == sorted(are_constexprs), name
