"""Connects ops to their backends: each op has one schema, one reference, and a dispatcher that picks the backend.

PyTorch's own dispatcher is the registry. The schema is in Python, so that every op exists without the C++ extension.
The reference serves every device that has no kernel. On CUDA and CPU a small function asks the kernel whether it can
compute the call; if not, the reference runs, and the kernel's reason is logged once. If PyTorch has a fused function
that computes the same, it runs instead of the reference, with which tests still compare. If an op has no kernel for a
backend by design, its definition gives the reason; any other missing kernel is logged like a refusal.

A kernel has only a forward and a backward pass. Under functorch's transforms, forward-mode differentiation and
create_graph, and for tensors of foreign classes, the op's formula replaces it: PyTorch's own operations, which can be
differentiated any number of times in any direction, batched and wrapped. The code for gradients is in `_autograd`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch
import torch._decomp
from torch import Tensor

from fastformer.kernels import _host, _plans
from fastformer.ops import _eager, _extension, _fastest, _flops
from fastformer.ops._common import SharedReason

P = ParamSpec("P")
T = TypeVar("T")
# (op_name, **the arguments by the schema's names) -> why a kernel can't compute the call, or None.
WhyUnsupported = Callable[..., str | None]

logger = logging.getLogger("fastformer")
_host.extension_function = _extension.host_function

LIBRARY = torch.library.Library("fastformer", "DEF")
BACKENDS = ("triton", "cpp", "reference")
# The backend of each device type unless `use_backend` forces another; other devices use the reference.
PREFERRED = {"cuda": "triton", "cpu": "cpp"}

_DESCRIBED = {"reference": "the reference", "torch": "PyTorch's own kernel"}

_forced_backend: ContextVar[str | None] = ContextVar("fastformer_backend", default=None)
# Shared by all threads: on a GPU the backward pass runs in a thread of autograd.
_recorders: list[set[tuple[str, str]]] = []
_told: set[tuple[str, str]] = set()


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Runs every op of the block on one backend, on any device. For tests and benchmarks.

    The backward pass of an op runs on the backend of its forward pass, in any thread and at any time.

    Args:
        name: "triton" (for CPU tensors: Triton's interpreter), "cpp", "reference", or None for the usual choice.

    Raises:
        ValueError: an unknown name.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"expected a backend in {BACKENDS} or None, got {name!r}")
    token = _forced_backend.set(name)
    try:
        yield
    finally:
        _forced_backend.reset(token)


def forced_backend() -> str | None:
    """Returns the backend that `use_backend` forces here, or None."""
    return _forced_backend.get()


@contextlib.contextmanager
def record_backends() -> Iterator[set[tuple[str, str]]]:
    """Collects (op, backend) of every call that runs in the block, including backward passes and other threads.

    Benchmarks and tests use it to know what they measured. PyTorch's own backward passes are not ops.
    """
    ran: set[tuple[str, str]] = set()
    _recorders.append(ran)
    try:
        yield ran
    finally:
        # Compared by identity, because two sets of the same pairs are equal.
        _recorders[:] = [recorder for recorder in _recorders if recorder is not ran]


def note_backend(op_name: str, backend: str) -> None:
    """Adds the backend of a call to the sets of the open `record_backends` blocks."""
    for recorder in _recorders:
        recorder.add((op_name, backend))


def is_strict() -> bool:
    """Returns whether an unsupported call is an error (FASTFORMER_STRICT=1) instead of a logged fallback."""
    return os.environ.get("FASTFORMER_STRICT", "0") == "1"


@functools.cache
def triton_kernel(stem: str) -> ModuleType | None:
    """Returns the module `fastformer.kernels.<stem>`, imported on first use; None if it or triton doesn't exist."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec(f"fastformer.kernels.{stem}") is None:
        return None
    return importlib.import_module(f"fastformer.kernels.{stem}")


def cpp_kernel(op_name: str) -> Callable[..., Any] | None:
    """Returns an op's C++ function (`torch.ops.fastformer_cpp.<op_name>`); None if it was not built."""
    return _extension.function(op_name)


@dataclass(eq=False, kw_only=True)
class Op:
    """An op with its backends. The arguments are those of `define_op`.

    Attributes:
        name: the schema's name, `torch.ops.fastformer.<name>`.
        arguments: the names of the schema's arguments, in order.
        defaults: the schema's default values, which belong to the last arguments.
        has_autograd: whether the dispatcher passes calls to autograd.
        apply: (*arguments) -> results that autograd tracks, for direct calls; None if the op has no gradient, or it is
            an error.
        plans: the prepared Triton launches, by geometry; see `_plans`.
        taken: the geometries of calls that C++ was found to support.
        checked: the geometries of calls that the documented function has checked; see `repeat`.
        places: the positions of the tensors among the arguments.
        chosen: the choices of PyTorch's kernels for GPU calls; None for an op without them.
    """

    name: str
    stem: str
    arguments: tuple[str, ...]
    defaults: tuple[Any, ...]
    reference: Callable[..., Any]
    cpp_unsupported: WhyUnsupported | None
    cpp_call: Callable[..., Any] | None
    reference_only: Mapping[str, str]
    torch_function: Callable[..., Any] | None
    torch_unsupported: WhyUnsupported | None
    torch_is_faster: Callable[[str], str | None] | None
    formula: Callable[..., Any] | None
    has_autograd: bool = False
    apply: Callable[..., Any] | None = None
    plans: dict[Hashable, _plans.Plan] = field(default_factory=_plans.new_plans)
    taken: set[Hashable] = field(default_factory=set)
    checked: set[Hashable] = field(default_factory=set)
    places: _eager.Places
    chosen: _fastest.Chosen | None = None

    def repeat(self, args: tuple[Any, ...]) -> Any:
        """Returns the results of a plain eager call whose geometry `settle` knows: the same checks would pass again.

        Returns None for any other call, and under autocast. Checks that read a tensor's values still run.
        """
        checks = _eager.argument_checks()
        if not checks.is_fast or not _eager.nothing_watches() or torch._C._is_any_autocast_enabled():
            return None
        device, requires_grad = checks.device_of(args, self.places)
        if device is None or (key := checks.geometry(args)) not in self.checked:
            return None
        if not requires_grad or not torch.is_grad_enabled():
            return self.run(PREFERRED[device], args, key)
        return None if self.apply is None or _eager.autograd_is_excluded() else self.apply(*args)

    def settle(self, args: tuple[Any, ...]) -> None:
        """Remembers that the documented function has checked a call with these arguments."""
        checks = _eager.argument_checks()
        if checks.is_fast and _eager.nothing_watches() and checks.device_of(args, self.places)[0] is not None:
            _remember(self.checked, checks.geometry(args))

    def bind(self, *args: Any) -> dict[str, Any]:
        """Returns the arguments of a call by the schema's names."""
        return dict(zip(self.arguments, args))  # noqa: B905 (every call comes here: their numbers were compared)

    def filled(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns all arguments of a call: the dispatcher drops trailing arguments that equal their defaults."""
        missing = len(self.arguments) - len(args)
        return (*args, *self.defaults[-missing:]) if missing else args

    def run(self, preferred: str, args: tuple[Any, ...], key: Hashable | None = None) -> Any:
        """Runs a call, below autograd, on the preferred backend or its replacement.

        Args:
            preferred: the backend of the device.
            args: the arguments, in the schema's order.
            key: the geometry of the arguments, if the caller knows it.
        """
        device = args[0].device
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
            # The public function has cast already. Inside a backend, autocast would cast fp32 products down again.
            with torch.autocast(device.type, enabled=False):
                return self.run(preferred, args)
        wanted = _forced_backend.get() or preferred
        has_cpp = wanted == "cpp" and cpp_kernel(self.name) is not None
        if key is None and (has_cpp or wanted == "triton"):
            key = _eager.argument_checks().geometry(args)
        if self.chosen is not None and device.type in _fastest.DEVICES and _forced_backend.get() is None:
            choice = self.chosen.find(self.name, key, lambda: self.bind(*args))
            if choice is not None:
                note_backend(self.name, choice.name)
                return choice.run(*args)
        plan = self.plans.get(key) if wanted == "triton" else None
        # The geometry decides whether C++ supports a call, so this is determined once for each geometry.
        if plan is not None or (has_cpp and key in self.taken):
            backend = wanted
        else:
            backend = _choose(self, preferred, args)
            if has_cpp and backend == wanted:
                _remember(self.taken, key)
        note_backend(self.name, backend)
        if backend == "triton":
            if plan is None:
                plan = self._plan(key, args)
            # Triton launches on the current device, which may differ from the tensors' device.
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return plan(*args)
            return plan(*args)
        if backend == "cpp":
            function = cast("Callable[..., Any]", cpp_kernel(self.name))
            return function(*args) if self.cpp_call is None else self.cpp_call(function, *args)
        if backend == "torch":
            return cast("Callable[..., Any]", self.torch_function)(*args)
        return self.reference(*args)

    def _plan(self, key: Hashable | None, args: tuple[Any, ...]) -> _plans.Plan:
        kernel = triton_kernel(self.stem)
        make = getattr(kernel, f"plan_{self.name}", None)
        plan: _plans.Plan = getattr(kernel, self.name) if make is None else make(*args)
        _plans.remember(self.plans, key, plan)
        return plan


def _remember(known: set[Hashable], key: Hashable | None) -> None:
    if key is not None:
        if len(known) >= _plans.LARGEST:
            known.clear()
        known.add(key)


# Every op, by its schema's name.
OPS: dict[str, Op] = {}


def missing_kernel(op: Op, backend: str) -> str | None:
    """Returns why `backend` has no kernel for an op; None if it has one."""
    if backend == "triton":
        kernel = triton_kernel(op.stem)
        if kernel is not None and hasattr(kernel, op.name):
            return None
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return "there is no Triton kernel for it"
    if backend == "cpp" and cpp_kernel(op.name) is None:
        if _extension.load() is None:
            return _extension.NOT_BUILT
        return "the C++ extension lacks this op"
    if backend == "torch" and op.torch_function is None:
        return "PyTorch has no fused function for it"
    return None


def why_not(op: Op, backend: str, args: tuple[Any, ...]) -> str | None:
    """Returns why `backend` can't compute a call; None if it can."""
    if (missing := missing_kernel(op, backend)) is not None:
        return missing
    if backend == "triton":
        return cast("str | None", cast(Any, triton_kernel(op.stem)).why_unsupported(op.name, **op.bind(*args)))
    unsupported = {"cpp": op.cpp_unsupported, "torch": op.torch_unsupported}.get(backend)
    return None if unsupported is None else unsupported(op.name, **op.bind(*args))


def _choose(op: Op, preferred: str, args: tuple[Any, ...]) -> str:
    """Chooses the backend that runs a call.

    Raises:
        NotImplementedError: the backend can't compute it, and was forced, or FASTFORMER_STRICT=1 forbids the reference.
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
    # If the extension is missing altogether, the loader has logged that once for all ops.
    if (op.name, reason) not in _told and not (backend == "cpp" and _extension.load() is None):
        # An fp16 model on a CPU would otherwise log the same reason for each op.
        is_known = isinstance(reason, SharedReason) and any(other == reason for _, other in _told)
        _told.add((op.name, reason))
        level = logging.DEBUG if is_known else logging.WARNING
        logger.log(level, "%s runs on %s, not on %s: %s", op.name, _DESCRIBED[instead], backend, reason)
    return instead


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
    torch_is_faster: Callable[[str], str | None] | None = None,
    formula: Callable[..., T] | None = None,
    has_faster: bool = False,
) -> Callable[P, T]:
    """Defines `fastformer::<name>` with its reference, its fake and the choice of a backend on CUDA and CPU.

    Args:
        schema: "name(Tensor x, ...) -> ...". The Triton launcher `fastformer.kernels.<stem>.<name>` and the C++
            function `torch.ops.fastformer_cpp.<name>` have the same positional arguments. So has `plan_<name>`, if the
            Triton module has it: it returns a prepared launch for calls of the same geometry (see `_plans`). The Triton
            module's `why_unsupported` has them as keywords.
        reference: plain PyTorch, correct in every dtype up to fp64.
        stem: the file name of the op in kernels/, csrc/ops/, ops/, tests/ops/ and benchmarks/.
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
        The function to call. It runs the overload `torch.ops.fastformer.<name>.default`; a plain eager call gets the
        same result without the overhead of the dispatcher and of torch.library (see `_eager`).
    """
    LIBRARY.define(schema)
    name = schema[: schema.index("(")]
    default = getattr(torch.ops.fastformer, name).default
    op = OPS[name] = Op(
        name=name,
        stem=stem,
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
        places=_eager.Places(default._schema),
        chosen=_fastest.Chosen() if has_faster else None,
    )
    LIBRARY.impl(name, lambda *args: op.run("reference", op.filled(args)), "CompositeExplicitAutograd")
    LIBRARY.impl(name, lambda *args: op.run(PREFERRED["cuda"], op.filled(args)), "CUDA")
    LIBRARY.impl(name, lambda *args: op.run(PREFERRED["cpu"], op.filled(args)), "CPU")
    fake = _with_defaults(op, fake)
    formula = op.formula = None if formula is None else _with_defaults(op, formula)
    if formula is not None:
        fake = _kept_by_inductor(default, fake)
        _register_decomposition(default, formula, fake)
    torch.library.register_fake(f"fastformer::{name}", _without_memory(name, fake), lib=LIBRARY)
    return cast(Callable[P, T], _eager_entry(op, default))


def _with_defaults(op: Op, function: Callable[..., T]) -> Callable[..., T]:
    """Wraps a function for calls of the dispatcher: see `Op.filled`."""
    if not op.defaults:
        return function

    @functools.wraps(function)
    def filled(*args: Any) -> T:
        return function(*op.filled(args))

    return filled


def _eager_entry(op: Op, default: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the function that calls the op: directly if only autograd would notice, else by dispatcher or formula."""
    run, formula, places = op.run, op.formula, op.places

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return default(*args)
        device = None
        if op.has_autograd and _eager.nothing_watches():
            device, requires_grad = _eager.argument_checks().device_of(args, places)
        if device is None:
            if torch._C._len_torch_dispatch_stack():
                _flops.tell_counters()
            return formula(*args) if formula is not None and _eager.needs_formula(args) else default(*args)
        if not requires_grad or not torch.is_grad_enabled():
            return run(PREFERRED[device], args)
        if op.apply is None or _eager.autograd_is_excluded():
            return default(*args)
        return op.apply(*args)

    return call


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
    def told(*args: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        if lowering is not None:
            getattr(lowering, "FALLBACK_ALLOW_LIST", set()).add(name)
        return fake(*args)

    return told


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


# The only autocast table. "cast": matrix products run in the autocast dtype (their softmax and loss stay fp32 inside).
# "keep": inputs keep their dtype; statistics are fp32 inside in any case. Inside an op autocast is off.
AUTOCAST = {
    "attention": "cast",
    "varlen_attention": "cast",
    "attention_weights": "cast",
    "decode_attention": "cast",
    "feed_forward": "cast",
    "linear": "cast",
    "linear_cross_entropy": "cast",
    "linear_topk": "cast",
    "add_layer_norm": "keep",
    "embedding": "keep",
    "rotary": "keep",
}


# Queried once, because torch.compile of PyTorch 2.11 can't trace the query.
_AUTOCAST_DEVICES = frozenset(
    name for name in ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia") if torch.amp.is_autocast_available(name)
)


def _has_autocast(device_type: str) -> bool:
    if torch.compiler.is_compiling():
        return device_type in _AUTOCAST_DEVICES
    return torch.amp.is_autocast_available(device_type)


@overload
def autocast(op: str, *tensors: Tensor) -> tuple[Tensor, ...]: ...
@overload
def autocast(op: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]: ...
def autocast(op: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts the floating-point inputs of an op to the autocast dtype, if autocast is on and AUTOCAST says "cast".

    fp64 is never cast, as in PyTorch. Integer and boolean tensors and None are returned unchanged. Ops with the rule
    "keep" need not call this.
    """
    if AUTOCAST[op] == "keep":
        return tensors
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            device_type = tensor.device.type
            break
    else:
        return tensors
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
