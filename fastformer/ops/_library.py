"""How an op meets its backends: one schema, one reference, and a dispatcher that picks what runs.

PyTorch's own dispatcher is the registry. The schema lives in Python, so that every op exists without the C++ extension;
the reference serves every device that has no kernel; on CUDA and CPU a small implementation asks the kernel whether it
can take the call and, if not, runs the reference and says so once with the kernel's own reason. Where PyTorch has a
fused function that computes the same, that runs in place of the reference, which stays what tests compare with. An op
that has no kernel for a backend by design says so where it is defined; any other missing kernel is a refusal like the
rest.

A kernel has a forward and a backward pass and nothing else. Under functorch's transforms, forward-mode differentiation
and create_graph, and for tensors of foreign classes, an op is its formula instead: PyTorch's own operations, which can
be differentiated any number of times in any direction, batched and wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch
import torch._decomp
import torch._library.autograd
from torch import Tensor

from fastformer.kernels import _plans
from fastformer.ops import _eager, _extension
from fastformer.ops._common import SharedReason

P = ParamSpec("P")
T = TypeVar("T")
# (op_name, **the arguments by the schema's names) -> why a kernel can't take the call, or None.
WhyUnsupported = Callable[..., str | None]

logger = logging.getLogger("fastformer")

LIBRARY = torch.library.Library("fastformer", "DEF")
BACKENDS = ("triton", "cpp", "reference")
# What runs on a device unless something forces another; the reference elsewhere.
_PREFERRED = {"cuda": "triton", "cpu": "cpp"}

_DESCRIBED = {"reference": "the reference", "torch": "PyTorch's own kernel"}

_forced_backend: ContextVar[str | None] = ContextVar("fastformer_backend", default=None)
# Seen by all threads: on a GPU the backward pass runs in a thread of autograd's.
_recorders: list[set[tuple[str, str]]] = []
_told: set[tuple[str, str]] = set()


def _undefined(preferred: str, args: tuple[Any, ...]) -> Any:
    raise AssertionError("expected `define_op` to say how the op runs")


@dataclass
class Definition:
    """What `define_op` was told about one op.

    Attributes:
        name: the schema's name, `torch.ops.fastformer.<name>`.
        stem: the file name that the op has in kernels/, csrc/ops/, ops/, tests/ops/ and benchmarks/.
        arguments: the names of the schema's arguments, in order.
        reference_only: the backends that have no kernel for it by design, and why.
        cpp_unsupported: why the C++ function can't take a call.
        torch_function: PyTorch's own fused function for it, or None.
        torch_unsupported: why that can't take a call.
        run: (preferred backend, arguments) -> results, on the backend that is chosen.
        formula: the same results out of operations that PyTorch differentiates, batches and wraps, or None.
        has_autograd: whether the dispatcher hands calls over to autograd.
        apply: (*arguments) -> results that autograd knows, for calls past the dispatcher; None where there is no
            gradient, or it is an error.
    """

    name: str
    stem: str
    arguments: tuple[str, ...]
    reference_only: Mapping[str, str]
    cpp_unsupported: WhyUnsupported | None
    torch_function: Callable[..., Any] | None = None
    torch_unsupported: WhyUnsupported | None = None
    formula: Callable[..., Any] | None = None
    run: Callable[[str, tuple[Any, ...]], Any] = _undefined
    has_autograd: bool = False
    apply: Callable[..., Any] | None = None

    def bind(self, *args: Any) -> dict[str, Any]:
        """The arguments of a call by the schema's names."""
        return dict(zip(self.arguments, args))  # noqa: B905 (every call comes here: their numbers were compared)


# Every op, by its schema's name.
OPS: dict[str, Definition] = {}


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Runs every op of the block on one backend, whatever the device suggests. For tests and benchmarks.

    The backward pass of an op runs where its forward pass was forced to run, in whichever thread and whenever.

    Args:
        name: "triton" (on CPU tensors: through Triton's interpreter), "cpp", "reference", or None for the usual choice.

    Raises:
        ValueError: another name.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"expected a backend out of {BACKENDS} or None, got {name!r}")
    token = _forced_backend.set(name)
    try:
        yield
    finally:
        _forced_backend.reset(token)


def forced_backend() -> str | None:
    """What `use_backend` says here, or None."""
    return _forced_backend.get()


@contextlib.contextmanager
def record_backends() -> Iterator[set[tuple[str, str]]]:
    """Collects (op, backend) of every call that really ran in the block, backward passes and other threads included.

    For benchmarks and tests, which have to know what they measured.
    """
    ran: set[tuple[str, str]] = set()
    _recorders.append(ran)
    try:
        yield ran
    finally:
        # By identity: two sets of the same pairs are equal.
        _recorders[:] = [recorder for recorder in _recorders if recorder is not ran]


def is_strict() -> bool:
    """Whether a call that the fast path can't take is an error (FASTFORMER_STRICT=1) instead of a logged fallback."""
    return os.environ.get("FASTFORMER_STRICT", "0") == "1"


@functools.cache
def triton_kernel(stem: str) -> ModuleType | None:
    """The module `fastformer.kernels.<stem>`, or None where there is none or no triton. Imported on first use only."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec(f"fastformer.kernels.{stem}") is None:
        return None
    return importlib.import_module(f"fastformer.kernels.{stem}")


def cpp_kernel(op_name: str) -> Callable[..., Any] | None:
    """The C++ function of an op (`torch.ops.fastformer_cpp.<op_name>`), or None where it was not built."""
    return _extension.function(op_name)


def missing_kernel(op: Definition, backend: str) -> str | None:
    """Why there is nothing on `backend` that could take any call of this op; None if there is a kernel."""
    if backend == "triton":
        kernel = triton_kernel(op.stem)
        if kernel is not None and hasattr(kernel, op.name):
            return None
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return "there is no Triton kernel for it"
    if backend == "cpp" and cpp_kernel(op.name) is None:
        if _extension.load() is None:
            return "the C++ extension is not built for this CPU; `fastformer doctor` says how"
        return "the C++ extension lacks this op"
    if backend == "torch" and op.torch_function is None:
        return "PyTorch has no fused function for it"
    return None


def why_not(op: Definition, backend: str, args: tuple[Any, ...]) -> str | None:
    """Why `backend` can't take this call, in words; None if it can."""
    if (missing := missing_kernel(op, backend)) is not None:
        return missing
    if backend == "triton":
        return cast(str | None, cast(Any, triton_kernel(op.stem)).why_unsupported(op.name, **op.bind(*args)))
    if backend == "cpp" and op.cpp_unsupported is not None:
        return op.cpp_unsupported(op.name, **op.bind(*args))
    if backend == "torch" and op.torch_unsupported is not None:
        return op.torch_unsupported(op.name, **op.bind(*args))
    return None


def define_op(
    schema: str,
    reference: Callable[P, T],
    *,
    stem: str,
    fake: Callable[..., object],
    cpp_unsupported: WhyUnsupported | None = None,
    cpp_call: Callable[..., T] | None = None,
    reference_only: Mapping[str, str] = MappingProxyType({}),
    torch_function: Callable[..., T] | None = None,
    torch_unsupported: WhyUnsupported | None = None,
    formula: Callable[..., T] | None = None,
) -> Callable[P, T]:
    """Defines `fastformer::<name>` with its reference, its fake and the choice of a backend on CUDA and CPU.

    Args:
        schema: "name(Tensor x, ...) -> ...". The Triton launcher `fastformer.kernels.<stem>.<name>` and the C++
            function `torch.ops.fastformer_cpp.<name>` take the same positional arguments, and so does `plan_<name>`,
            where the Triton module has it: it gives what is left of the launcher for calls of the same geometry (see
            `_plans`). What asks whether they can take a call (`why_unsupported` of the Triton module,
            `cpp_unsupported`) gets them by the schema's names.
        reference: plain PyTorch, right in every dtype up to fp64.
        stem: the file name that the op has in kernels/, csrc/ops/, ops/, tests/ops/ and benchmarks/.
        fake: shapes, dtypes and strides of the outputs; reads no data.
        cpp_unsupported: (op_name, **arguments) -> why the C++ function can't take the call, or None.
        cpp_call: (the C++ function, *arguments) -> the op's results, where that function takes other arguments.
        reference_only: "triton", "cpp": the backends that have no kernel for this op by design, and why. There the
            reference is the op, and nothing is logged or forbidden.
        torch_function: PyTorch's own fused function for it, with the reference's arguments and results: what runs in
            place of the reference where a kernel is missing or can't take a call.
        torch_unsupported: (op_name, **arguments) -> why that can't take the call, or None.
        formula: the same results, of operations that PyTorch differentiates any number of times in both directions,
            batches and hands to subclasses: nothing is written in place or read on the host. What gives no gradients
            has none.

    Returns:
        What to call: the overload `torch.ops.fastformer.<name>.default`, or in a plain eager call what that would come
        to, without the dispatcher's and the library's share of its time (see `_eager`).
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    overload_ = getattr(torch.ops.fastformer, name).default
    arguments = tuple(argument.name for argument in overload_._schema.arguments)
    places = _eager.Places(overload_._schema)
    op = OPS[name] = Definition(
        name, stem, arguments, reference_only, cpp_unsupported, torch_function, torch_unsupported, formula
    )

    plans = _plans.new_plans()

    def run(preferred: str, args: tuple[Any, ...]) -> Any:
        device = args[0].device
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
            # The public function has cast already. Inside any backend, autocast would take fp32 products down again.
            with torch.autocast(device.type, enabled=False):
                return run(preferred, args)
        plan = key = None
        if (_forced_backend.get() or preferred) == "triton":
            key = _eager.asked().geometry(args)
            plan = plans.get(key)
        backend = "triton" if plan is not None else _choose(op, preferred, args)
        for recorder in _recorders:
            recorder.add((name, backend))
        if backend == "triton":
            if plan is None:
                kernel = triton_kernel(stem)
                plan_of = getattr(kernel, f"plan_{name}", None)
                plan = getattr(kernel, name) if plan_of is None else plan_of(*args)
                _plans.remember(plans, key, plan)
            # Triton launches on the current device, which need not be the tensors'.
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return plan(*args)
            return plan(*args)
        if backend == "cpp":
            function = cast(Callable[..., Any], cpp_kernel(name))
            return function(*args) if cpp_call is None else cpp_call(function, *args)
        if backend == "torch":
            return cast(Callable[..., Any], torch_function)(*args)
        return reference(*args)  # type: ignore[call-arg]

    LIBRARY.impl(name, lambda *args: run("reference", args), "CompositeExplicitAutograd")
    LIBRARY.impl(name, lambda *args: run(_PREFERRED["cuda"], args), "CUDA")
    LIBRARY.impl(name, lambda *args: run(_PREFERRED["cpu"], args), "CPU")
    if formula is not None:
        fake = _kept_by_inductor(overload_, fake)
        _register_decomposition(overload_, formula, fake)
    torch.library.register_fake(f"fastformer::{name}", _without_memory(name, fake), lib=LIBRARY)
    op.run = run

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload_(*args)
        if not (op.has_autograd and _eager.nothing_watches()):
            return formula(*args) if formula is not None and _eager.needs_formula(args) else overload_(*args)
        device, requires_grad = _eager.asked().device_of(args, places)
        if device is None:
            return formula(*args) if formula is not None and _eager.needs_formula(args) else overload_(*args)
        if not requires_grad or not torch.is_grad_enabled():
            return run(_PREFERRED[device], args)
        if op.apply is None or _eager.autograd_is_excluded():
            return overload_(*args)
        return op.apply(*args)

    return cast(Callable[P, T], call)


def _register_decomposition(overload_: Any, formula: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Lets torch.onnx and `torch._decomp.get_decompositions` take the op apart.

    torch.compile and `run_decompositions()` decompose only what they name themselves, so they keep the op.
    """
    torch._decomp.register_decomposition(overload_, unsafe=True)(formula)
    # With symbolic shapes a fake tensor would take a decomposition, and its strides, for the op's fake if there were
    # no entry here.
    torch._decomp.register_decomposition(overload_, type="meta", unsafe=True)(fake)


def _kept_by_inductor(overload_: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake, which also tells Inductor that an op with a decomposition is to be called as it is.

    Where the environment variable CI is set, Inductor takes a decomposition that it does not use for a mistake of its
    own developers and raises. A list in its module of lowerings names the exceptions. Importing that module takes
    seconds, so the op is added by its first fake call after the import: Inductor traces a graph, by fakes, before it
    lowers it.
    """
    name = overload_.name()

    @functools.wraps(fake)
    def told(*args: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        if lowering is not None:
            getattr(lowering, "FALLBACK_ALLOW_LIST", set()).add(name)
        return fake(*args)

    return told


def _without_memory(name: str, fake: Callable[..., object]) -> Callable[..., object]:
    """The fake, for calls in which no tensor has memory.

    PyTorch sends a call here as soon as one of its tensors is on "meta", and the fake's outputs hold whatever there was
    in memory: with real tensors among the arguments somebody takes them for results.
    """

    @functools.wraps(fake)
    def checked(*args: Any) -> object:
        devices = {a.device.type for a in args if isinstance(a, Tensor)}
        if "meta" in devices and len(devices) > 1:
            raise ValueError(f"fastformer::{name}: expected tensors on one device, got {sorted(devices)}")
        return fake(*args)

    return checked


def _choose(op: Definition, preferred: str, args: tuple[Any, ...]) -> str:
    """The backend that runs this call.

    Raises:
        NotImplementedError: the backend can't, and it was forced or FASTFORMER_STRICT=1 forbids the reference.
    """
    forced = _forced_backend.get()
    backend = preferred if forced is None else forced
    if backend == "reference" or (forced is None and backend in op.reference_only):
        return "reference"
    reason = why_not(op, backend, args)
    if reason is None:
        return backend
    if is_strict() or forced is not None:
        raise NotImplementedError(f"fastformer::{op.name} can't run on {backend}: {reason}")
    instead = "reference" if why_not(op, "torch", args) else "torch"
    # Where there is no extension at all, the loader has said so for all ops together.
    if (op.name, reason) not in _told and not (backend == "cpp" and _extension.load() is None):
        # A model in fp16 on a CPU would have a line for each op, all of them for one reason.
        is_known = isinstance(reason, SharedReason) and any(other == reason for _, other in _told)
        _told.add((op.name, reason))
        level = logging.DEBUG if is_known else logging.WARNING
        logger.log(level, "%s runs on %s, not on %s: %s", op.name, _DESCRIBED[instead], backend, reason)
    return instead


def unviewed(value: Any) -> Any:
    """A new tensor as no view of what it was made of: autograd lets no view that a function gives be changed."""
    is_view = isinstance(value, Tensor) and value._is_view()
    return torch.ops.aten._unsafe_view.default(value, value.shape) if is_view else value


def register_autograd(
    name: str,
    backward: Callable[..., Any],
    *,
    setup_context: Callable[..., None],
    differentiable_backward: Callable[..., Any] | None = None,
) -> None:
    """Gives `fastformer::<name>` its gradient. `backward` calls the `_bwd` op, whose own gradient is an error.

    It serves calls through the dispatcher and, as an `autograd.Function`, those past it alike.

    Args:
        name: of the op.
        backward: (ctx, *gradients of the outputs) -> those of the inputs. An output that nobody reads has None; where
            all have, this isn't called.
        setup_context: as torch.library.register_autograd takes it.
        differentiable_backward: what runs in place of `backward` where its results are to be differentiated again, and
            under functorch and forward mode; None where `backward` itself is of differentiable operations.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A context variable does not reach the thread in which autograd runs a GPU's backward pass.
        ctx.forced_backend = _forced_backend.get()
        # Zeros in place of no gradient would be one for parameters that have none, which an optimizer then moves.
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        if differentiable_backward is not None and (torch.is_grad_enabled() or _eager.is_transformed()):
            return differentiable_backward(ctx, *grads)
        if ctx.forced_backend is None:
            return backward(ctx, *grads)
        with use_backend(ctx.forced_backend):
            return backward(ctx, *grads)

    def forward(ctx: Any, *args: Any) -> Any:
        output = op.run(_PREFERRED[args[0].device.type], args)
        output = tuple(map(unviewed, output)) if isinstance(output, tuple) else unviewed(output)
        setup(ctx, args, output)
        return output

    op = OPS[name]
    op.has_autograd = True
    members = {"forward": staticmethod(forward), "backward": staticmethod(run)}
    function = type(f"fastformer_{name}", (torch.autograd.Function,), members)
    # What `function.apply` comes to where nothing transforms the call, which `call` has seen.
    op.apply = cast(Any, super(torch.autograd.Function, function)).apply
    _register_kernel(op, torch._library.autograd.Info(run, setup))


def forbid_double_backward(name: str) -> None:
    """Makes differentiating `fastformer::<name>` (a backward op) an error that says so, instead of a silent zero."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fastformer::{name} has no double backward: no gradients of gradients")

    op = OPS[name]
    op.has_autograd = True
    _register_kernel(op, torch._library.autograd.Info(backward, None))


def _register_kernel(op: Definition, info: torch._library.autograd.Info) -> None:
    """What the dispatcher calls for autograd: torch.library's kernel, and the formula where that one would be wrong.

    Below a transform of functorch's torch.library's kernel raises, and tangents it drops without a word.
    """
    kernel = torch._library.autograd.make_autograd_impl(getattr(torch.ops.fastformer, op.name).default, info)

    def formula_or_kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if op.formula is not None and _eager.is_transformed():
            return op.formula(*args)
        return kernel(keyset, *args)

    LIBRARY.impl(op.name, formula_or_kernel, "Autograd", with_keyset=True)


def refuse_derivatives(name: str, *tensors: Tensor | None) -> None:
    """For an op that has no gradients: an error where functorch or forward mode asks for them, instead of zeros.

    Raises:
        NotImplementedError: one of the tensors is being differentiated by.
    """
    if _eager.is_transformed() and any(t is not None and _eager.is_differentiated(t) for t in tensors):
        raise NotImplementedError(f"{name} is for inference: it has no gradients, and no forward-mode derivatives")


def differentiate(
    function: Callable[..., Any], inputs: tuple[Tensor | None, ...], needed: Sequence[bool], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of a function, as functions of its inputs and of its outputs' gradients: for double backward.

    Args:
        function: (*inputs) -> a tensor or a tuple of them, in differentiable operations.
        inputs: what to differentiate by; one that is None has no gradient.
        needed: which of them.
        grads: the gradients of the first outputs, or None.

    Returns:
        One gradient, or None, for each input.
    """
    with torch.enable_grad():
        # Views, so that one tensor in two places has a gradient for each, and what it is made from is left alone.
        leaves = [
            x.view_as(x) if wanted and x is not None and x.requires_grad else x
            for x, wanted in zip(inputs, needed, strict=True)
        ]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=False) if dy is not None and y.requires_grad]
        wanted = [leaf for leaf, x in zip(leaves, inputs, strict=True) if leaf is not x and leaf is not None]
        if not pairs or not wanted:
            return (None,) * len(inputs)
        ys, dys = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, dys, create_graph=True, allow_unused=True))
        return tuple(next(found) if leaf is not x else None for leaf, x in zip(leaves, inputs, strict=True))


# The one autocast table. "cast": matrix products run in the autocast dtype (their softmax and loss stay fp32 inside).
# "keep": inputs stay as they come; statistics are fp32 inside whatever the dtype. Inside an op autocast is off.
AUTOCAST = {
    "attention": "cast",
    "varlen_attention": "cast",
    "attention_weights": "cast",
    "decode_attention": "cast",
    "feed_forward": "cast",
    "linear_cross_entropy": "cast",
    "linear_topk": "cast",
    "add_layer_norm": "keep",
    "embedding": "keep",
    "rotary": "keep",
}


@overload
def autocast(op: str, *tensors: Tensor) -> tuple[Tensor, ...]: ...
@overload
def autocast(op: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]: ...
def autocast(op: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The floating-point inputs of an op that AUTOCAST says to cast, in the autocast dtype where it is on.

    fp64 is never cast, as in PyTorch. Integer and boolean tensors and None pass through. An op of the rule "keep" has
    no need to call this.
    """
    if AUTOCAST[op] == "keep":
        return tensors
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            device_type = tensor.device.type
            break
    else:
        return tensors
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
