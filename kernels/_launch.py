"""What the launchers share on the host: the launch, which device and dtypes a kernel takes, strides, dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton._C import libtriton
from triton.compiler import CompiledKernel
from triton.runtime import driver

from fastformer.kernels._fences import IS_OLD, inserted

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# (seed, threshold, keep_scale): the argument that kernels call `dropout`; without a seed nothing is dropped.
Dropout = tuple[Tensor | None, int, float]


@triton.jit
def _probe():
    pass


# Whether kernels were imported under TRITON_INTERPRET=1, that is, whether they take CPU tensors and no others.
INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)


# Triton's own function that says how arguments are specialised; None in versions of which the rest was not tried.
_specialize = getattr(libtriton, "native_specialize_impl", None) if triton.__version__[:4] in ("3.6.", "3.7.") else None


class _Compiled:
    """A compiled kernel, ready to be launched: `constants` are the arguments behind those that a launch hands over."""

    def __init__(self, kernel: Any, compiled: CompiledKernel, num_args: int, options: dict[str, object]) -> None:
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.constants = [options.get(p.name, p.default) for p in kernel.params[num_args:]]


# By kernel, driver and device: by what the arguments were specialised to, what is launched.
_compiled: dict[tuple[int, object, int], dict[tuple[object, ...], _Compiled]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> _Compiled | None:
    """`kernel[grid](*args, **options)`, at half the host's time from the second launch on.

    Which binary fits is asked of the function that Triton itself asks, once for all arguments. It tells apart whatever
    Triton does and more (what the kernel says not to specialise), so that equal keys mean the same binary. Triton does
    the launch where there is more to do: hooks, debugging, instrumentation, the interpreter, versions not tried here.

    Args:
        kernel: what `triton.jit` gives.
        grid: one to three numbers of programs.
        args: the kernel's first parameters, in order: tensors, numbers, None, and tuples of them.
        options: its other parameters, which are constexprs, and Triton's: num_warps, num_stages, ...

    Returns:
        What was launched, where it may be launched again as it is.
    """
    ordinary = _specialize is None or _is_watched(kernel)
    if _compiled and not ordinary:  # before the first, there need not be a driver
        active = driver.active
        device = active.get_current_device()
        known = _compiled.get((id(kernel), active, device))
        found = None if known is None else known.get(_key(kernel, device, args, options))
        if found is not None:
            x, y, z = (*grid, 1, 1)[:3]
            stream = active.get_current_stream(device)
            found.run(x, y, z, stream, found.function, found.metadata, None, None, None, *args, *found.constants)
            return found
    with inserted(kernel) as more:
        compiled = kernel[grid](*args, **options, **more)
    if not ordinary and isinstance(compiled, CompiledKernel) and _can_be_kept(kernel, len(args)):
        device = driver.active.get_current_device()
        known = _compiled.setdefault((id(kernel), driver.active, device), {})
        found = known[_key(kernel, device, args, options)] = _Compiled(kernel, compiled, len(args), options)
        return found
    return None


class Launch:
    """`launch` for a plan (see `_plans`), whose arguments are specialised alike in every call: which binary fits is
    asked once.

    Args:
        kernel, grid, options: as `launch` has them.
    """

    __slots__ = ("_grid", "_kernel", "_options", "_ready")

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: object) -> None:
        self._kernel, self._grid, self._options = kernel, grid, options
        self._ready: tuple[_Compiled, tuple[int, int, int], Any, int] | None = None

    def __call__(self, *args: object) -> None:
        """Launches the kernel. Of the arguments only addresses that stay multiples of 16, or not, may change."""
        if self._ready is not None:
            found, grid, active, device = self._ready
            if active is driver.active and device == active.get_current_device() and not _is_watched(self._kernel):
                stream = active.get_current_stream(device)
                found.run(*grid, stream, found.function, found.metadata, None, None, None, *args, *found.constants)
                return
        compiled = launch(self._kernel, self._grid, *args, **self._options)
        if compiled is not None:
            x, y, z = (*self._grid, 1, 1)[:3]
            self._ready = compiled, (x, y, z), driver.active, driver.active.get_current_device()


def _is_watched(kernel: Any) -> bool:
    """Whether Triton's `run` has more to do than to find the binary and to launch it."""
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


def _can_be_kept(kernel: Any, num_args: int) -> bool:
    """Whether the key holds all that a binary depends on: constexprs by value, and no globals."""
    are_constexprs = [parameter.is_constexpr for parameter in kernel.params]
    return not kernel.used_global_vals and not any(are_constexprs[:num_args]) and all(are_constexprs[num_args:])


def _has_calls(hook: object) -> bool:
    """Whether anything is hooked in: a chain may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _key(kernel: Any, device: int, args: tuple[object, ...], options: dict[str, object]) -> tuple[object, ...]:
    """Everything that the binary depends on, except the device."""
    assert _specialize is not None
    backend = kernel.device_caches[device][3]
    # Of a tuple it gives the types, and what is known of the values.
    return _specialize(backend, args, False, True, True), *options, *options.values()


def unsupported_device(x: Tensor) -> str | None:
    """Why no kernel takes tensors of this device, or None."""
    if not x.is_cuda and not INTERPRETED:
        return "the tensors are on the CPU and TRITON_INTERPRET=1 was not set before the kernels were imported"
    return None


def wrong_products(x: Tensor) -> str | None:
    """Why this Triton's products are wrong on x's device, or None."""
    if IS_OLD and architecture(x) // 10 == 10:
        # Errors of 1e5 on a B200, with four warps and narrow tiles: Triton's issue 9871.
        return f"Triton {triton.__version__} multiplies wrongly on sm_{architecture(x)}: expected 3.7.1 or newer"
    return None


def unsupported_products(x: Tensor) -> str | None:
    """Why no kernel with products (tl.dot) takes tensors like this one, or None."""
    if x.is_cuda and architecture(x) < 80:
        return "the GPU is older than compute capability 8.0, where tl.dot has no tensor cores"
    if (reason := wrong_products(x)) is not None:
        return reason
    if x.dtype == torch.bfloat16 and not x.is_cuda and INTERPRETED:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return unsupported_device(x)


def unsupported_dtype(*dtypes: torch.dtype) -> str | None:
    """Why no kernel takes inputs of these dtypes, or None."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"the inputs are {dtype}, not float16, bfloat16 or float32"
    return None


def architecture(x: Tensor) -> int:
    """The device's compute capability as in sm_90 -> 90; 0 under the interpreter."""
    return _capability(torch.cuda.get_device_capability, x.device) if x.is_cuda else 0


@functools.cache
def _capability(ask: Callable[[torch.device], tuple[int, int]], device: torch.device) -> int:
    # The function `ask` is part of the key: reports put another one there for a device that is not at hand.
    major, minor = ask(device)
    return major * 10 + minor


@functools.cache
def num_sms(device: torch.device) -> int:
    """How many programs run at once, one an SM; an H200's where a launch is only compiled, two in the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 132


def dot_precision(x: Tensor) -> str:
    """How tl.dot multiplies fp32.

    Three TF32 products carry about 21 bits of fp32's 24; plain TF32 would carry 10. The interpreter is exact.
    """
    return "tf32x3" if x.is_cuda else "ieee"


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (`triton.cdiv`, which kernels call too, takes fifty times as long.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n, 1 for 0; as `triton.next_power_of_2` does, see `cdiv`."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


def stride_unit(*tensors: Tensor | None) -> int:
    """8 where every stride but the last is a multiple of 8, else 1: kernels take strides in this unit.

    They multiply by it, so that the compiler sees that rows can be read 16 bytes at a time also where a stride is no
    multiple of 16 (head_dim 40), which is all that Triton tells it about an integer.
    """
    for x in tensors:
        if x is not None:
            for stride in x.stride()[:-1]:
                if stride % 8:
                    return 1
    return 8


def contiguous(x: Tensor | None) -> Tensor | None:
    """`x` as kernels read lengths, ids, seeds and parameters: by a pointer alone."""
    return None if x is None else x.contiguous()


def dropout_arguments(dropout_p: float, dropout_seed: Tensor | None) -> Dropout:
    """A dropout as kernels take it, by the rules of fastformer.ops._dropout."""
    if dropout_p == 0.0 or dropout_seed is None:
        return None, 0, 1.0
    if dropout_p == 1.0:
        return dropout_seed.contiguous(), 256, 0.0
    threshold = min(max(round(dropout_p * 256), 1), 255)
    return dropout_seed.contiguous(), threshold, 256 / (256 - threshold)
