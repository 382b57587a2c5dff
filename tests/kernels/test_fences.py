"""Kernels get the proxy fences that an older Triton omits, and miscompiled products are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

import triton  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from benchmarks.host_time import HopperStubDriver, StubKernel, stub_compile  # noqa: E402
from benchmarks.machine_code.report import recorded  # noqa: E402
from fastformer.kernels import (  # noqa: E402
    _binaries,
    _fences,
    _host,
    _launch,
    attention,
    decode_attention,
    feed_forward,
)

PTX = "\tcp.async.wait_group \t1;\n\tbar.sync \t0;\n\twgmma.mma_async.sync.aligned {%r1};\n"


def _kernel(x_ptr):
    pass


def compiled_ptx() -> str:
    """Returns the result of a compilation for given PTX, through the backend's `add_stages`."""
    stages = {"ptx": lambda source, metadata: source}
    if knobs.runtime.add_stages_inspection_hook is not None:
        knobs.runtime.add_stages_inspection_hook(object(), stages, object(), object(), 90)
    return stages["ptx"](PTX, {})


@pytest.mark.parametrize("is_watched", [True, False])
@pytest.mark.parametrize("is_old", [True, False])
def test_a_launch_compiles_with_fences_if_triton_omits_them(is_old, is_watched, monkeypatch) -> None:
    """This also holds if Triton itself launches because of a hook."""
    seen: list[tuple[str, str]] = []

    def compile_one(self: Any, key: str, signature: object, device: int, constants: object, options: Any, *rest: Any):
        seen.append((compiled_ptx(), options.ptx_options or ""))
        return stub_compile(self, key, signature, device, *rest)

    def compile_ahead(source: object, target: object, options: dict[str, Any]) -> StubKernel:
        seen.append((compiled_ptx(), options.get("ptx_options", "")))
        return StubKernel()

    driver = HopperStubDriver()
    monkeypatch.setattr(_fences, "IS_OLD", is_old)
    for name in ("_compiled", "_ready"):
        monkeypatch.setattr(_launch, name, {})
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(_host, "active", driver)
    monkeypatch.setattr(_host, "extension_function", lambda name: None)
    monkeypatch.setattr(JITFunction, "_do_compile", compile_one)
    monkeypatch.setattr(triton, "compile", compile_ahead)
    monkeypatch.setattr(_binaries, "binary_of", lambda *_: None)
    kernel, x = JITFunction(_kernel), torch.zeros(16)
    if is_watched:
        kernel.add_pre_run_hook(lambda *_, **__: None)
    for _ in range(2):
        _launch.launch(kernel, (1,), x)
    (ptx, options), *others = seen
    assert not others and (_fences.FENCE in ptx) == is_old
    # Triton's cache on disk must not give a binary out that was compiled without.
    assert bool(options) == is_old
    assert knobs.runtime.add_stages_inspection_hook is None


def test_a_hook_of_the_users_is_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(_fences, "IS_OLD", True)
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *args: calls.append(len(args)))
    users = knobs.runtime.add_stages_inspection_hook
    with pytest.raises(KeyError), _fences.inserted(JITFunction(_kernel)):
        assert _fences.FENCE in compiled_ptx()
        raise KeyError
    assert calls == [5] and knobs.runtime.add_stages_inspection_hook is users
    with _fences.inserted(_kernel) as options:  # as the interpreter has it
        assert not options and knobs.runtime.add_stages_inspection_hook is users


@pytest.mark.parametrize("arch, is_old, is_wrong", [(100, True, True), (100, False, False), (90, True, False)])
def test_sm_100_is_refused_with_a_triton_that_miscompiles(arch, is_old, is_wrong, monkeypatch) -> None:
    monkeypatch.setattr(_launch, "IS_OLD", is_old)
    with FakeTensorMode(), recorded(arch):
        x = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="cuda")
        reasons = [
            attention.why_unsupported("attention_fwd", q=x, k=x, v=x, softmax_scale=1.0),
            decode_attention.why_unsupported("decode_attention", q=x, k_cache=x, v_cache=x, cos=None, sin=None),
            feed_forward.why_unsupported("feed_forward_fwd", x=x),
        ]
    for reason in reasons:
        assert (reason is not None) == is_wrong
        assert reason is None or ("3.7.1" in reason and "sm_100" in reason)
