"""Triton's interpreter, faster and closer to a device.

`quicken` leaves out repeated work, and tests of kernels take half as long; what a kernel computes stays the same to the
bit. `fuse` rounds a fused multiply-add once, as a device does. Of a release of Triton that is written otherwise,
nothing is changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """Changes the interpreter of this process. Call it before a kernel runs."""
    import triton
    from triton.runtime import interpreter

    options: Any = getattr(interpreter.interpreter_builder, "options", None)
    if not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        # Each sum and product of integers is computed once more in int64, for an assertion that only debug makes.
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patch_once(interpreter._patch_lang, interpreter._LangPatchScope)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if triton.__version__.startswith("3.6."):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


def fuse() -> None:
    """Makes tl.fma round once.

    With two roundings, fma(a, b, -(a * b)) is 0; on a device, it is the rounding error of a * b.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = x.data.dtype
        wide = np.float64 if dtype in (np.float16, np.float32) else dtype
        with np.errstate(all="ignore"):
            # A product of two fp32 is exact in fp64.
            data = (x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)).astype(dtype)
        return interpreter.TensorHandle(data, z.dtype.scalar)

    if hasattr(interpreter, "InterpreterBuilder") and hasattr(interpreter, "TensorHandle"):
        interpreter.InterpreterBuilder.create_fma = create_fma


def _patch_once(patch: Callable[[Any], Any], no_changes: Callable[[], Any]) -> Callable[[Any], Any]:
    """Patches triton.language once per launch, and not again in each call of a jit function."""
    import triton.language as tl

    @functools.cache
    def changed_first(fn: Any) -> list[tuple[Any, str]]:
        """Returns the functions that replace those of `fn`."""
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        places = [(language, "load") for language in languages] + [(tl.math, "exp")] * (tl in languages)
        return [*places, (tl.tensor, "__add__"), (tl.core.tensor_descriptor_base, "load")] if languages else []

    def patch_once(fn: Any) -> Any:
        places = changed_first(fn)
        if places and not any(tl.core.is_builtin(getattr(owner, name)) for owner, name in places):
            return no_changes()
        return patch(fn)

    return patch_once


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Stores the table of types, which the interpreter makes again at every lookup."""
    import triton.language as tl

    known: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(element, tl.pointer_type):
            return find(dtype)
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    return find_once


def _with_index(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Converts arrays of one element, which Triton 3.6 uses as indices, and which numpy 2.4 and newer refuse."""

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensor
