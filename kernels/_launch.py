"""The host code that the launchers share: the launch, the supported devices and dtypes, strides, dropout."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton._C import libtriton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from fastformer.kernels import _binaries, _host
from fastformer.kernels._fences import IS_OLD, inserted
from fastformer.kernels._signature import arguments_of, key_of, signature_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# (seed, threshold, keep_scale): the kernels' argument `dropout`. Without a seed, nothing is dropped.
Dropout = tuple[Tensor | None, int, float]


@triton.jit
def _probe():
    pass


# Whether kernels were imported under TRITON_INTERPRET=1, in which case they support only CPU tensors.
INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)


# The versions of Triton with which this module has been tested, on a stub of the driver.
_TESTED = ("3.6.", "3.7.", "3.8.", "3.9.")
# Triton's own function that specialises arguments; None for other versions.
_specialize = getattr(libtriton, "native_specialize_impl", None) if triton.__version__[:4] in _TESTED else None

# (x, y, z, stream, *arguments): launches one kernel on one device.
Start = Callable[..., object]


class Resolved(NamedTuple):
    """The origin of a launch's binary.

    Attributes:
        kernel: the kernel's name.
        arch: the architecture, 90 for sm_90.
        key: see `_signature.key_of`.
        origin: "file" (compiled ahead of time) or "compiler" (Triton's, or its cache).
        seconds: how long it took until the kernel could be launched.
        binary: the binary to write to a file; None if a file can't store everything that its launch needs.
    """

    kernel: str
    arch: int
    key: str
    origin: str
    seconds: float
    binary: _binaries.Binary | None


# (kernel, grid, arguments, options): called instead of launching, for reports of launches.
interceptor: Callable[[Any, tuple[int, ...], tuple[object, ...], dict[str, object]], None] | None = None
watchers: list[Callable[[Resolved], None]] = []


def watch(watcher: Callable[[Resolved], None]) -> None:
    """Adds a function that is called for each binary that is made ready in this process."""
    watchers.append(watcher)


def unwatch(watcher: Callable[[Resolved], None]) -> None:
    """Removes what `watch` added."""
    watchers.remove(watcher)


# By kernel and device: the functions that start the kernel, by the specialisation of the arguments.
_compiled: dict[tuple[int, int], dict[tuple[object, ...], Start]] = {}
# By kernel, device and `key_of`: the same functions, for arguments that Triton would specialise differently.
_ready: dict[tuple[int, int, str], Start] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> Start | None:
    """Runs `kernel[grid](*args, **options)`; from the second launch on, in a fraction of the usual host time.

    The binary is chosen by `_signature.signature_of`: from a file of binaries if one has it, else from the compiler.
    Triton launches the kernel itself in cases that need more: hooks, debugging, instrumentation, the interpreter, and
    untested versions.

    Args:
        kernel: a result of `triton.jit`. A global that it reads is a constant.
        grid: the numbers of programs, in one to three dimensions.
        args: the kernel's first arguments, in order: tensors, numbers, None, and tuples of them.
        options: the other arguments, which are constexprs, and compiler options: num_warps, num_stages, ...

    Returns:
        The function that launched the kernel if it can be reused, else None.
    """
    if interceptor is not None:
        interceptor(kernel, grid, args, options)
        return None
    if _specialize is None or not isinstance(kernel, triton.runtime.JITFunction) or _is_watched(kernel):
        _launch_by_triton(kernel, grid, args, options)
        return None
    active = _host.active
    device = active.get_current_device()
    starts = _compiled.get((id(kernel), device))
    # For a tuple, it returns the types and the known properties of the values. Equal keys mean the same binary.
    key = _specialize(_backend(active.get_capability(device)), args, False, True, True), *options, *options.values()
    start = None if starts is None else starts.get(key)
    if start is None:
        if not _has_constexprs_last(kernel, len(args)):
            _launch_by_triton(kernel, grid, args, options)
            return None
        start = _resolve(kernel, device, args, options)
        _compiled.setdefault((id(kernel), device), {})[key] = start
    x, y, z = (*grid, 1, 1)[:3]
    start(x, y, z, active.get_current_stream(device), *args)
    return start


class Launch:
    """A launch for a plan (see `_plans`), which finds the binary once: all calls' arguments are specialised alike.

    Args:
        kernel, grid, options: see `launch`.
    """

    __slots__ = ("_grid", "_kernel", "_options", "_ready")

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: object) -> None:
        self._kernel, self._grid, self._options = kernel, grid, options
        self._ready: tuple[Start, int, int, int, Any, int] | None = None

    def __call__(self, *args: object) -> None:
        """Launches the kernel. Between calls, only addresses may change, and not whether they are multiples of 16."""
        if self._ready is not None:
            start, x, y, z, where, device = self._ready
            if where is _host.active and device == where.get_current_device() and not _is_watched(self._kernel):
                start(x, y, z, where.get_current_stream(device), *args)
                return
        started = launch(self._kernel, self._grid, *args, **self._options)
        if started is not None:
            x, y, z = (*self._grid, 1, 1)[:3]
            self._ready = started, x, y, z, _host.active, _host.active.get_current_device()


def _launch_by_triton(kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], options: dict[str, object]) -> None:
    with inserted(kernel) as more:
        kernel[grid](*args, **options, **more, **_binaries.FUSION)


@functools.cache
def _backend(capability: int) -> Any:
    """Returns the backend with the rules of an architecture, for `_specialize`."""
    return make_backend(GPUTarget("cuda", capability, 32))


def _resolve(kernel: Any, device: int, args: tuple[object, ...], options: dict[str, object]) -> Start:
    """Finds or compiles the binary for arguments like these, loads it, and returns the function that starts it."""
    began = time.perf_counter()
    arch = _host.active.get_capability(device)
    arguments, compiler_options = arguments_of(kernel, args, options)
    signature = signature_of(kernel, arguments)
    key = key_of(kernel, signature, compiler_options)
    if (start := _ready.get((id(kernel), device, key))) is not None:
        return start
    make = _host.extension_function("make_kernel")  # without it, Triton's own launcher is used
    origin, binary, compiled = "file", _binaries.find(arch, key), None
    if binary is None:
        origin = "compiler"
        compiled = _binaries.compile_kernel(kernel, signature, compiler_options, arch)
        binary = _binaries.binary_of(compiled, signature, len(args))
    if make is not None and binary is not None:
        code = binary.cubin, binary.name
        start = make(code, binary.threads, binary.shared, device, binary.layout, binary.maps)
    else:
        if compiled is None and binary is not None:
            compiled = _binaries.compiled_of(binary, kernel, signature, arch)
        start = _start_by_triton(kernel, compiled, len(args), options)
    _ready[id(kernel), device, key] = start
    for watcher in watchers:
        watcher(Resolved(kernel.fn.__name__, arch, key, origin, time.perf_counter() - began, binary))
    return start


def _start_by_triton(kernel: Any, compiled: Any, num_args: int, options: dict[str, object]) -> Start:
    """Returns a function that starts a compiled kernel with Triton's own launcher."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    constants = [options.get(parameter.name, parameter.default) for parameter in kernel.params[num_args:]]

    def start(x: int, y: int, z: int, stream: int, *args: object) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *args, *constants)

    # From Triton 3.8 on, a compiled kernel unloads its machine code when nothing refers to it.
    start.compiled = compiled  # type: ignore[attr-defined]
    return start


def _is_watched(kernel: Any) -> bool:
    """Returns whether Triton's `run` does more than find the binary and launch it."""
    runtime = knobs.runtime
    return bool(
        _has_calls(runtime.launch_enter_hook)
        or _has_calls(runtime.launch_exit_hook)
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or getattr(runtime, "add_stages_inspection_hook", None) is not None
        or getattr(kernel, "debug", None)
        or getattr(kernel, "pre_run_hooks", None)
    )


def _has_constexprs_last(kernel: Any, num_args: int) -> bool:
    """Returns whether the launch's arguments are exactly the parameters that aren't constexprs."""
    are_constexprs = [parameter.is_constexpr for parameter in kernel.params]
    return not any(are_constexprs[:num_args]) and all(are_constexprs[num_args:])


def _has_calls(hook: object) -> bool:
    """Returns whether a hook calls anything, because a chain of hooks may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))


def unsupported_device(x: Tensor) -> str | None:
    """Returns why no kernel supports tensors on this device, or None."""
    if not x.is_cuda and not INTERPRETED:
        return "the tensors are on the CPU and TRITON_INTERPRET=1 was not set before the kernels were imported"
    return None


def multiplies_wrongly(arch: int) -> bool:
    """Returns whether this Triton's products are wrong on an architecture, such as 100 for sm_100."""
    # Errors of 1e5 on a B200, with four warps and narrow tiles: Triton's issue 9871.
    return IS_OLD and arch // 10 == 10


def wrong_products(x: Tensor) -> str | None:
    """Returns why this Triton's products are wrong on x's device, or None."""
    if multiplies_wrongly(architecture(x)):
        return f"Triton {triton.__version__} multiplies wrongly on sm_{architecture(x)}: expected 3.7.1 or newer"
    return None


def unsupported_products(x: Tensor) -> str | None:
    """Returns why no kernel with products (tl.dot) supports tensors like this one, or None."""
    if x.is_cuda and architecture(x) < 80:
        return "the GPU is older than compute capability 8.0, where tl.dot has no tensor cores"
    if (reason := wrong_products(x)) is not None:
        return reason
    if x.dtype == torch.bfloat16 and not x.is_cuda and INTERPRETED:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return unsupported_device(x)


def unsupported_dtype(*dtypes: torch.dtype) -> str | None:
    """Returns why no kernel supports inputs of these dtypes, or None."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"the inputs are {dtype}, not float16, bfloat16 or float32"
    return None


def architecture(x: Tensor) -> int:
    """Returns the device's compute capability, 90 for sm_90; 0 under the interpreter."""
    return _capability(torch.cuda.get_device_capability, x.device) if x.is_cuda else 0


@functools.cache
def _capability(ask: Callable[[torch.device], tuple[int, int]], device: torch.device) -> int:
    # The function `ask` is part of the key, because reports replace it to pretend that another device is present.
    major, minor = ask(device)
    return major * 10 + minor


@functools.cache
def num_sms(device: torch.device) -> int:
    """Returns the number of SMs: that of an H200 if there is no GPU, and 2 for tensors on a CPU."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 132


def dot_precision(x: Tensor) -> str:
    """Returns the precision of tl.dot for fp32.

    Three TF32 products give about 21 of fp32's 24 bits; a single one would give 10. The interpreter is exact.
    """
    return "tf32x3" if x.is_cuda else "ieee"


def cdiv(a: int, b: int) -> int:
    """Returns a / b rounded up. (`triton.cdiv`, which kernels call too, is fifty times slower.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two >= n, and 1 for 0. (It replaces `triton.next_power_of_2`, as `cdiv` does.)"""
    return 1 << (n - 1).bit_length() if n > 0 else 1


def stride_unit(*tensors: Tensor | None) -> int:
    """Returns 8 if every stride but the last is a multiple of 8, else 1: kernels count strides in this unit.

    Kernels multiply by the unit, from which the compiler learns that rows can be read 16 bytes at a time. Triton only
    tells it whether an integer is a multiple of 16, which a stride may not be (head_dim 40).
    """
    for x in tensors:
        if x is not None:
            for stride in x.stride()[:-1]:
                if stride % 8:
                    return 1
    return 8


def contiguous(x: Tensor | None) -> Tensor | None:
    """Returns `x` contiguous: kernels read lengths, ids, seeds and parameters through a pointer without strides."""
    return None if x is None else x.contiguous()


def dropout_arguments(dropout_p: float, dropout_seed: Tensor | None) -> Dropout:
    """Returns the kernels' argument `dropout`, by the rules of fastformer.ops._dropout."""
    if dropout_p == 0.0 or dropout_seed is None:
        return None, 0, 1.0
    if dropout_p == 1.0:
        return dropout_seed.contiguous(), 256, 0.0
    threshold = min(max(round(dropout_p * 256), 1), 255)
    return dropout_seed.contiguous(), threshold, 256 / (256 - threshold)
