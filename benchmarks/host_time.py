"""Measures the host's time for a call of an op: `python -m benchmarks.host_time [--out FILE]`.

A GPU that waits for Python is idle, and at the sizes of a base model an op's kernel takes about as long as its call.
The measurement needs no GPU: the tensors are on the CPU, kernels are not compiled, and fastformer's launcher calls a
stub of CUDA's driver. A time therefore includes all of fastformer's Python and C++, PyTorch's autograd and Triton's
code, but neither the driver's own part of a launch nor a GPU's allocator.

A call with a known geometry runs its plan ("plan"); "launcher" is the time to decide again, including the plan.

Times are minima of medians, for a machine that has other work too (`chrt -f 50` keeps that off one core).
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from benchmarks.machine_code.stub_driver import StubDevice, library
from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from fastformer.kernels import (
    _attention_hopper,
    _binaries,
    _host,
    _launch,
    _plans,
    add_layer_norm,
    attention,
    attention_backward,
    decode_attention,
)
from fastformer.kernels._signature import Signature, layout_of
from fastformer.ops import _dispatch, _extension
from fastformer.ops import add_layer_norm as add_layer_norm_op
from fastformer.ops import attention as attention_op
from fastformer.ops import decode_attention as decode_attention_op

# In the modes "run" and "launch", the arguments are those of these kernels' launches.
_KERNELS = {
    "attention fwd": attention._attention_fwd_kernel,
    "attention bwd": attention_backward._dkdv_kernel,
    "add_layer_norm fwd": add_layer_norm._add_layer_norm_fwd_kernel,
    "add_layer_norm bwd": add_layer_norm._add_layer_norm_bwd_kernel,
}


class HopperStubDriver(StubDevice):
    """An sm_90 device, as far as Triton and fastformer query it before a launch."""

    def __init__(self) -> None:
        super().__init__(90)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class StubKernel(CompiledKernel):  # type: ignore[misc] # triton has no types
    """A kernel that launches nothing."""

    name, src, module = "stub", None, None
    function, packed_metadata = 0, (4, 1, 0)

    def __init__(self) -> None:
        """Sets the attributes of a kernel that has been loaded onto the device."""

    def _init_handles(self) -> None:
        pass

    def run(self, *args: object) -> None:
        """Does nothing in place of a launch."""


def stub_compile(self: JITFunction[Any], key: str, signature: object, device: int, *rest: object) -> StubKernel:
    """Replaces the function with which Triton's `run` compiles."""
    compiled = StubKernel()
    self.device_caches[device][0][key] = compiled
    return compiled


def _uncompiled(signature: Signature, num_args: int) -> _binaries.Binary:
    """Returns a binary for any signature, with the right parameters and without code."""
    blocks = (re.findall(r"tensordesc<bf16\[([\d, ]+)\]", kind) for kind in map(str, signature.types.values()))
    maps = tuple((3, 2, 9, tuple(map(int, block.split(",")))) for matches in blocks for block in matches)
    return _binaries.Binary("any", 128, 0, layout_of(signature, num_args), maps, b"")


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """Makes kernels take CPU tensors; fastformer's launcher, if there is one, launches nothing on a stub driver."""
    make = _extension.host_function("make_kernel")
    function = library().stub_function(None, 0)

    def make_kernel(code: object, *rest: object) -> Callable[..., object]:
        assert make is not None
        return make(function, *rest)

    driver = HopperStubDriver()
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (triton.runtime.driver, "_active", driver),
            (_host, "active", driver),
            (_host, "extension_function", lambda name: None if make is None else make_kernel),
            (_binaries, "compile_kernel", lambda *_: StubKernel()),
            (_binaries, "binary_of", lambda compiled, *rest: _uncompiled(*rest)),
            (_launch, "_compiled", {}),
            (_launch, "_ready", {}),
            (_launch, "INTERPRETED", True),
            (attention, "unsupported_products", lambda x: None),
            (decode_attention, "unsupported_products", lambda x: None),
            (attention, "architecture", lambda x: 90),
            (attention_backward, "architecture", lambda x: 90),
            (_attention_hopper, "architecture", lambda x: 90),
            (_attention_hopper, "FORWARD", ()),  # the plain form, except where the kernels for sm_90 are asked for
            (_attention_hopper, "BACKWARD", ()),
            (_attention_hopper, "num_sms", lambda device: 132),
            (JITFunction, "_do_compile", stub_compile),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(mock.patch.dict(_dispatch.PREFERRED, cpu="triton"))
        _plans.forget()
        yield
    _plans.forget()


def _calls(
    op: str, forward: Callable[[], object], backward: Callable[[], object], launchers: Any, *inputs: tuple[Any, ...]
) -> dict[str, Callable[[], object]]:
    """Makes the calls of an op, and of its launchers' module with the arguments of forward and backward."""

    def without() -> object:
        with torch.no_grad():
            return forward()

    calls = {f"{op} fwd": forward, f"{op} bwd": backward, f"{op} fwd no_grad": without}
    for way, arguments in zip(("fwd", "bwd"), inputs, strict=True):
        calls |= _launched(f"{op} {way}", launchers, f"{op}_{way}", arguments)
    return calls


def _launched(name: str, launchers: Any, launcher: str, arguments: tuple[Any, ...]) -> dict[str, Callable[[], object]]:
    """Makes the calls of a launcher and of its plan."""
    plan = getattr(launchers, f"plan_{launcher}")(*arguments)
    return {
        f"{name} launcher": functools.partial(getattr(launchers, launcher), *arguments),
        f"{name} plan": functools.partial(plan, *arguments),
    }


def _attention() -> dict[str, Callable[[], object]]:
    """Makes calls of causal self-attention, whose heads are split from one projection.

    The inputs are small, since a CPU also zeroes dq itself.
    """
    qkv = torch.randn(1, 192, 3, 2, 64, dtype=torch.bfloat16)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    dout = torch.randn(1, 192, 2, 64, dtype=torch.bfloat16)
    out = attention_op(q, k, v, is_causal=True)
    saved = [x.detach() for x in (q, k, v, out)]
    options = (None, 64**-0.5, None, 0, 0.0, None)
    arguments = (*saved[:3], None, *options)
    gradients = (dout, *saved, torch.randn(1, 2, 192), None, *options, False)
    with (  # the same with the kernels for sm_90
        mock.patch.object(_attention_hopper, "FORWARD", (64, 128)),
        mock.patch.object(_attention_hopper, "BACKWARD", (64, 128)),
    ):
        fwd, bwd = attention.plan_attention_fwd(*arguments), attention.plan_attention_bwd(*gradients)
    return {
        "attention hopper fwd plan": functools.partial(fwd, *arguments),
        "attention hopper bwd plan": functools.partial(bwd, *gradients),
        **_calls(
            "attention",
            lambda: attention_op(q, k, v, is_causal=True),
            lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
            attention,
            arguments,
            gradients,
        ),
    }


def _add_layer_norm() -> dict[str, Callable[[], object]]:
    """Makes calls of the residual add and the norm after it."""
    x, residual, dy, dresidual = (torch.randn(1, 192, 512, dtype=torch.bfloat16) for _ in range(4))
    weight, bias = torch.nn.Parameter(torch.ones(512)), torch.nn.Parameter(torch.zeros(512))
    x.requires_grad_(), residual.requires_grad_()
    inputs = (x, residual, weight, bias)
    outputs = add_layer_norm_op(*inputs)
    stream, statistic = outputs[1].detach(), torch.randn(192)
    saved = [t.detach() for t in inputs]
    return _calls(
        "add_layer_norm",
        lambda: add_layer_norm_op(*inputs),
        lambda: torch.autograd.grad(outputs, inputs, (dy, dresidual), retain_graph=True),
        add_layer_norm,
        (*saved, 1e-5, 0.0, None, False),
        (dy, dresidual, stream, saved[2], statistic, statistic, 0.0, None, False, True, torch.bfloat16),
    )


def _decode_attention() -> dict[str, Callable[[], object]]:
    """Makes calls of a decode step with rotary tables and a slot table."""
    q, k, v = (torch.randn(4, 1, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    k_cache, v_cache = torch.randn(2, 64, 16, 2, 64, dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 256, 32)
    lengths, table = torch.full((4,), 100, dtype=torch.int32), torch.zeros(4, 256, dtype=torch.int32)
    arguments = (q, k_cache, v_cache, lengths, k, v, None, table, 0.125, True, None, cos, sin, False, 0.0)

    def step() -> Tensor:
        with torch.no_grad():
            return decode_attention_op(
                q, k_cache, v_cache, lengths, k=k, v=v, slot_table=table, softmax_scale=0.125, cos=cos, sin=sin
            )

    launched = _launched("decode_attention", decode_attention, "decode_attention", arguments)
    return {"decode_attention no_grad": step, **launched}


def _runs(cases: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Makes calls of Triton's own `run` and `launch`, with the arguments of fastformer's launches."""
    runs: dict[str, Callable[[], object]] = {}
    for name, kernel in _KERNELS.items():
        with mock.patch.object(_launch, "interceptor") as intercepted:
            cases[f"{name} launcher"]()
        launches = (call.args for call in intercepted.call_args_list)
        ((args, options),) = ((args, options) for launched, _, args, options in launches if launched is kernel)
        runs[f"{name} Triton's run"] = functools.partial(kernel.run, *args, grid=(1,), warmup=False, **options)
        runs[f"{name} our launch"] = functools.partial(_launch.launch, kernel, (1,), *args, **options)
    return runs


def cases() -> dict[str, Callable[[], object]]:
    """Returns the calls to measure, by name; inside `stubbed`."""
    ops = {**_attention(), **_add_layer_norm(), **_decode_attention()}
    return ops | _runs(ops)


def seconds(function: Callable[[], object], calls: int, rounds: int) -> float:
    """Returns the least of the rounds' medians."""
    medians = []
    for _ in range(rounds):
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times))
    return min(medians)


def main() -> None:
    """Runs the command."""
    parser = parser_of("host_time", __doc__, out=True)
    parser.add_argument("--only", help="one case, by its name")
    parser.add_argument("--calls", type=int, default=200, help="calls a round (default 200)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds, of whose medians the least counts (default 15)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with stubbed():
        chosen = {name: case for name, case in cases().items() if args.only in (None, name)}
        if not chosen:
            parser.error(f"expected --only to be one of {', '.join(map(repr, cases()))}, got {args.only!r}")
        times = {name: seconds(function, args.calls, args.rounds) for name, function in chosen.items()}
    microseconds = {name: round(time_ * 1e6, 1) for name, time_ in times.items()}
    for name, time_ in microseconds.items():
        print(f"{name:32s} {time_:7.1f} us")
    record.append(args.out, {"mode": "host", "microseconds": microseconds, **record.environment("cpu")})


if __name__ == "__main__":
    main()
