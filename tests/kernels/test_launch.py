"""`launch` runs the binary that Triton would, with the arguments of this call; what is compiled is a stub."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from benchmarks.host_time import Compiled, Driver, stub_compile  # noqa: E402
from fastformer.kernels import (  # noqa: E402
    _launch,
    add_layer_norm,
    attention,
    attention_backward,
    embedding,
    feed_forward,
    linear_cross_entropy,
    rotary,
)

Ran = tuple[Compiled, tuple[Any, ...]]


def _kernel(x_ptr, y_ptr, count, size, scale, strides, FLAG: tl.constexpr, BLOCK: tl.constexpr = 16):
    pass


class TwoDevices(Driver):
    """Of which one is the current device."""

    current = 0

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 100 + device


@pytest.fixture
def device_driver(monkeypatch: pytest.MonkeyPatch) -> TwoDevices:
    active = TwoDevices()
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(JITFunction, "_do_compile", stub_compile)
    monkeypatch.setattr(_launch, "_compiled", {})
    return active


@pytest.fixture
def ran(device_driver: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ran]]:
    """What was launched: the stub of the binary, and all that it was given."""
    launches: list[Ran] = []
    monkeypatch.setattr(Compiled, "run", lambda self, *args: launches.append((self, args)))
    yield launches


@pytest.fixture
def kernel() -> Any:
    return JITFunction(_kernel, do_not_specialize=["count"])


def variants() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls that differ in one thing each."""
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
    """Arguments that can be compared."""
    if isinstance(values, tuple | list):
        return [plain(value) for value in values]
    return id(values) if isinstance(values, torch.Tensor | TensorDescriptor) else (type(values), values)


def test_each_call_runs_the_binary_that_triton_picks(kernel: Any, ran: list[Ran]) -> None:
    """Whatever was launched before it: the whole sweep goes through thrice, once backwards."""
    calls = list(variants())
    picked = [kernel.run(*args, grid=(1,), warmup=True, **options) for args, options in calls]
    assert len(set(picked)) > 30  # the sweep tells binaries apart
    order = [*range(len(calls)), *range(len(calls))[::-1], *range(len(calls))]
    for index in order:
        args, options = calls[index]
        _launch.launch(kernel, (3, 5), *args, **options)
        compiled, (x, y, z, stream, function, metadata, launch_metadata, enter, leave, *given) = ran[-1]
        assert compiled is picked[index], (args, options)
        constants = [options["FLAG"], options.get("BLOCK", 16)]
        assert plain(given) == plain([*args, *constants])
        assert (x, y, z, stream, function, metadata) == (3, 5, 1, 100, compiled.function, compiled.packed_metadata)
        if index != order[0] and leave is None:
            assert launch_metadata is None and enter is None
    assert len(ran) == len(order)
    # From the second time on none went through Triton, which hands over its chains of hooks.
    assert all(args[7] is None for _, args in ran[len(calls) :])


def test_devices_have_binaries_of_their_own(kernel: Any, ran: list[Ran], device_driver: TwoDevices) -> None:
    (args, options), *_ = variants()
    for current in (0, 1, 0, 1):
        device_driver.current = current
        _launch.launch(kernel, (1,), *args, **options)
    first, second, third, fourth = (compiled for compiled, _ in ran)
    assert first is third and second is fourth and first is not second
    assert [args[3] for _, args in ran] == [100, 101, 100, 101]


def test_what_is_launched_again(kernel: Any, ran: list[Ran], device_driver: TwoDevices) -> None:
    """A plan's launch asks for the binary once a device, and hands over each call's own arguments."""
    (args, options), *_ = variants()
    again = _launch.Launch(kernel, (3, 5), **options)
    for _ in range(3):
        again(*args)
    other = torch.zeros(64)
    again(other, *args[1:])
    assert plain(ran[-1][1][9:]) == plain([other, *args[1:], True, 16])
    assert all(compiled is ran[0][0] and given[:3] == (3, 5, 1) for compiled, given in ran)
    device_driver.current = 1
    for _ in range(2):
        again(*args)
    assert ran[-1][0] is ran[-2][0] is not ran[0][0] and ran[-1][1][3] == 101
    device_driver.current = 0
    again(*args)
    assert ran[-1][0] is ran[0][0] and ran[-1][1][3] == 100
    knobs.runtime.launch_enter_hook.add(print)
    try:
        again(*args)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert ran[-1][1][7] is knobs.runtime.launch_enter_hook


def test_hooks_see_every_launch(kernel: Any, ran: list[Ran]) -> None:
    (args, options), *_ = variants()
    for _ in range(2):
        _launch.launch(kernel, (1,), *args, **options)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs.runtime, name)
        chain.add(print)
        try:
            _launch.launch(kernel, (1,), *args, **options)
        finally:
            chain.remove(print)
        _, given = ran[-1]
        assert given[6] is not None and given[7] is knobs.runtime.launch_enter_hook, name
    seen = []
    kernel.add_pre_run_hook(lambda *args, **options: seen.append(args))
    _launch.launch(kernel, (1,), *args, **options)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "fpsan"),
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash")),
    ],
)
def test_settings_make_other_binaries(
    owner: Any, name: str, value: Any, kernel: Any, ran: list[Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "add_stages_inspection_hook" and triton.__version__.startswith("3.6."):
        pytest.skip("Triton 3.6 asks for it while it compiles alone")
    (args, options), *_ = variants()
    _launch.launch(kernel, (1,), *args, **options)
    monkeypatch.setattr(owner, name, value)
    _launch.launch(kernel, (1,), *args, **options)
    assert ran[1][0] is kernel.run(*args, grid=(1,), warmup=True, **options) is not ran[0][0]
    monkeypatch.undo()


def test_what_a_key_does_not_hold_is_not_kept(ran: list[Ran]) -> None:
    """Constexprs by position, other arguments by name, and globals, which Triton holds against their old values."""
    x = torch.zeros(8)
    for flag in (True, False, True):
        kernel = JITFunction(_kernel)
        for block in (16, 32):
            _launch.launch(kernel, (1,), x, x, 2, 3, 0.5, (), flag, block)
            assert ran[-1][1][-2:] == (flag, block)
            assert ran[-1][0] is kernel.run(x, x, 2, 3, 0.5, (), flag, block, grid=(1,), warmup=True)
    for size in (17, 18):
        _launch.launch(kernel, (1,), x, x, 2, size=size, scale=0.5, strides=(), FLAG=True)
        assert ran[-1][1][12] == size
    assert not _launch._compiled
    values = {"LIMIT": 1}
    kernel.used_global_vals = {("LIMIT", id(values)): (1, values)}
    _launch.launch(kernel, (1,), x, x, 2, 3, 0.5, (), FLAG=True)
    values["LIMIT"] = 2
    with pytest.raises(RuntimeError):
        _launch.launch(kernel, (1,), x, x, 2, 3, 0.5, (), FLAG=True)


def test_an_unknown_version_takes_the_ordinary_way(
    kernel: Any, ran: list[Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "_specialize", None)
    (args, options), *_ = variants()
    for _ in range(2):
        _launch.launch(kernel, (1,), *args, **options)
        assert ran[-1][1][7] is knobs.runtime.launch_enter_hook
    assert not _launch._compiled


def test_the_versions_we_test_with_are_known() -> None:
    assert _launch._specialize is not None


@triton.jit(do_not_specialize=["count"])
def _scale_kernel(x_ptr, y_ptr, count, scale, strides, TWICE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * strides[0], mask=at < count, other=0.0)
    if TWICE:
        x += x
    tl.store(y_ptr + at * strides[1], x * scale, mask=at < count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches on a device")
def test_a_device_runs_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a side stream, in a graph, and unaligned, where 16-byte loads would fault."""
    monkeypatch.setattr(_launch, "_compiled", {})
    ordinary = JITFunction.run
    runs: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        runs.append(1)
        return ordinary(*args, **options)

    monkeypatch.setattr(JITFunction, "run", counted)

    def check(offset: int, stride: int, count: int, scale: float, twice: bool) -> None:
        x, y = torch.randn(4096, device="cuda"), torch.zeros(4096, device="cuda")
        into = y[offset:]
        _launch.launch(
            _scale_kernel, (1,), x[offset:], into, count, scale, (stride, 1), TWICE=twice, BLOCK=256, num_warps=4
        )
        assert torch.equal(into[:count], x[offset:][: count * stride : stride] * (2 * scale if twice else scale))
        assert not into[count:].any() and not y[:offset].any()

    kinds = [(offset, stride, twice) for offset in (0, 1, 4) for stride in (1, 3, 16) for twice in (True, False)]
    for count, scale in ((200, 0.5), (100, 2.0), (1, 4.0)):
        for offset, stride, twice in kinds:
            check(offset, stride, count, scale, twice)
        with torch.cuda.stream(torch.cuda.Stream()):
            check(*kinds[0][:2], count, scale, True)
    # A second round of the same kinds has nothing to ask of Triton.
    before = len(runs)
    for offset, stride, twice in kinds:
        check(offset, stride, 200, 0.25, twice)
    assert len(runs) == before <= 3 * len(kinds)

    x, y, graph = torch.randn(256, device="cuda"), torch.zeros(256, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _launch.launch(_scale_kernel, (1,), x, y, 200, 0.5, (1, 1), TWICE=False, BLOCK=256, num_warps=4)
    assert len(runs) == before
    x.fill_(3.0)
    graph.replay()
    assert y[:200].eq(1.5).all() and not y[200:].any()


def test_kernels_have_their_constexprs_last() -> None:
    """Launches hand over constexprs by name and the rest by position, or are not kept."""
    modules = (add_layer_norm, attention, attention_backward, embedding, feed_forward, linear_cross_entropy, rotary)
    kernels = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    assert len(kernels) > 15
    for name, kernel in kernels.items():
        parameters = inspect.signature(kernel.fn).parameters.values()
        are_constexprs = ["constexpr" in str(parameter.annotation) for parameter in parameters]
        assert are_constexprs == sorted(are_constexprs), name
