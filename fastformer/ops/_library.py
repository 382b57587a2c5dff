"""Defines ops: each has one schema, one reference, and a dispatcher that picks the backend (`_dispatch`).

PyTorch's own dispatcher is the registry. The schema is in Python, so that every op exists without the C++ extension.

A kernel has only a forward and a backward pass. Under functorch's transforms, forward-mode differentiation and
create_graph, and for tensors of foreign classes, the op's formula replaces it: PyTorch's own operations, which can be
differentiated any number of times in any direction, batched and wrapped. The code for gradients is in `_autograd`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch
import torch._decomp
from torch import Tensor

from fastformer.ops import _fastest
from fastformer.ops._backends import WhyUnsupported
from fastformer.ops._dispatch import PREFERRED, Op, TensorIndices, add_op

P = ParamSpec("P")
T = TypeVar("T")

LIBRARY = torch.library.Library("fastformer", "DEF")


def define_op(
    schema: str,
    reference: Callable[P, T],
    *,
    stem: str | None = None,
    fake: Callable[..., object],
    cpp_unsupported: WhyUnsupported | None = None,
    cpp_call: Callable[..., T] | None = None,
    reference_only: Mapping[str, str] = MappingProxyType({}),
    torch_function: Callable[..., T] | None = None,
    torch_unsupported: WhyUnsupported | None = None,
    torch_is_faster: Callable[[str], str | None] | None = None,
    formula: Callable[..., T] | None = None,
    has_faster: bool = False,
) -> Op[P, T]:
    """Defines `fastformer::<name>` with its reference, its fake and the choice of a backend on CUDA and CPU.

    Args:
        schema: "name(Tensor x, ...) -> ...". The Triton launcher `fastformer.kernels.<stem>.<name>` and the C++
            function `torch.ops.fastformer_cpp.<name>` have the same positional arguments. So has `plan_<name>`, if the
            Triton module has it: it returns a prepared launch for calls of the same geometry (see `_plans`). The Triton
            module's `why_unsupported` has them as keywords.
        reference: plain PyTorch, correct in every dtype up to fp64.
        stem: the file name of the op in kernels/, csrc/ops/, ops/, tests/ops/ and benchmarks/. None: the op's name
            without _fwd and _bwd.
        fake: the shapes, dtypes and strides of the outputs; reads no data.
        cpp_unsupported: (op_name, **arguments) -> why the C++ function can't compute the call, or None.
        cpp_call: (the C++ function, *arguments) -> the op's results, if that function has other arguments.
        reference_only: the reasons why "triton" or "cpp" has no kernel for this op by design. On such a backend the
            reference is the op; nothing is logged, and FASTFORMER_STRICT=1 allows it.
        torch_function: PyTorch's own fused function for the op, with the reference's arguments and results. It replaces
            the reference if a kernel is missing or can't compute a call.
        torch_unsupported: (op_name, **arguments) -> why torch_function can't compute the call, or None.
        torch_is_faster: (device type) -> why PyTorch's own function is faster on this machine, or None. If it is
            faster, the documented function calls it instead of the op.
        formula: the same results, from operations that PyTorch can differentiate any number of times in both
            directions, batch, and pass to subclasses: nothing is written in place or read on the host. An op without
            gradients has no formula.
        has_faster: whether PyTorch may have a faster kernel on a GPU: see `_fastest`.

    Returns:
        The op, which is called like its reference.
    """
    LIBRARY.define(schema)
    name = schema[: schema.index("(")]
    default = getattr(torch.ops.fastformer, name).default
    op = Op(
        name=name,
        default=default,
        stem=name.replace("_fwd", "").replace("_bwd", "") if stem is None else stem,
        arguments=tuple(argument.name for argument in default._schema.arguments),
        defaults=tuple(a.default_value for a in default._schema.arguments if a.has_default_value()),
        reference=reference,
        cpp_unsupported=cpp_unsupported,
        cpp_call=cpp_call,
        reference_only=reference_only,
        torch_function=torch_function,
        torch_unsupported=torch_unsupported,
        torch_is_faster=torch_is_faster,
        formula=formula,
        tensor_indices=TensorIndices(default._schema),
        fastest=_fastest.ChoiceCache() if has_faster else None,
    )
    add_op(name, op)
    LIBRARY.impl(name, lambda *args: op.run("reference", op.filled(args)), "CompositeExplicitAutograd")
    LIBRARY.impl(name, lambda *args: op.run(PREFERRED["cuda"], op.filled(args)), "CUDA")
    LIBRARY.impl(name, lambda *args: op.run(PREFERRED["cpu"], op.filled(args)), "CPU")
    fake = _with_defaults(op, fake)
    formula = op.formula = None if formula is None else _with_defaults(op, formula)
    if formula is not None:
        fake = _kept_by_inductor(default, fake)
        _register_decomposition(default, formula, fake)
    torch.library.register_fake(f"fastformer::{name}", _without_memory(name, fake), lib=LIBRARY)
    return op


def _with_defaults(op: Op[..., Any], function: Callable[..., T]) -> Callable[..., T]:
    """Wraps a function for calls of the dispatcher: see `Op.filled`."""
    if not op.defaults:
        return function

    @functools.wraps(function)
    def filled(*args: Any) -> T:
        return function(*op.filled(args))

    return filled


def _register_decomposition(default: Any, formula: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Lets torch.onnx and `torch._decomp.get_decompositions` decompose the op.

    torch.compile and `run_decompositions()` decompose only ops on their own lists, so they keep this op.
    """
    torch._decomp.register_decomposition(default, unsafe=True)(formula)
    # With symbolic shapes and without this entry, a fake tensor would use a decomposition, and its strides, instead of
    # the op's fake.
    torch._decomp.register_decomposition(default, type="meta", unsafe=True)(fake)


def _kept_by_inductor(default: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the fake so that it also tells Inductor to call the op, although it has a decomposition.

    If the environment variable CI is set, Inductor raises an error for a decomposition that it doesn't use, as a
    mistake of its own developers. A list in its module of lowerings names the exceptions. Importing that module takes
    seconds, so the op's first fake call after the import adds the op: Inductor traces a graph, with fakes, before it
    lowers the graph.
    """
    name = default.name()

    @functools.wraps(fake)
    def with_fallback(*args: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        if lowering is not None:
            getattr(lowering, "FALLBACK_ALLOW_LIST", set()).add(name)
        return fake(*args)

    return with_fallback


def _without_memory(name: str, fake: Callable[..., object]) -> Callable[..., object]:
    """Wraps the fake for calls in which no tensor has memory.

    PyTorch calls it as soon as one of the tensors is on "meta". If the other tensors are real, the fake's outputs would
    be uninitialised memory that the caller takes for results.
    """

    @functools.wraps(fake)
    def checked(*args: Any) -> object:
        devices = {a.device.type for a in args if isinstance(a, Tensor)}
        if "meta" in devices and len(devices) > 1:
            raise ValueError(f"fastformer::{name}: expected tensors on one device, got {sorted(devices)}")
        return fake(*args)

    return checked
