"""Connects ops to their backends: each op has one schema, one reference, and a dispatcher that picks the backend.

PyTorch's own dispatcher is the registry. The schema lives in Python, so that every op exists without the C++ extension.
The reference serves every device that has no kernel. On CUDA and CPU a small implementation asks the kernel whether it
can take the call; if not, the reference runs, and the kernel's reason is logged once. Where PyTorch has a fused
function that computes the same, that runs in place of the reference, which stays what tests compare with. An op that
has no kernel for a backend by design says so where it is defined; any other missing kernel is a refusal like the rest.

A kernel has a forward and a backward pass and nothing else. Under functorch's transforms, forward-mode differentiation
and create_graph, and for tensors of foreign classes, an op is its formula instead: PyTorch's own operations, which can
be differentiated any number of times in any direction, batched and wrapped. `_autograd` has what gradients need.
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
# (op_name, **the arguments by the schema's names) -> why a kernel can't take the call, or None.
WhyUnsupported = Callable[..., str | None]

logger = logging.getLogger("fastformer")
_host.extension_function = _extension.host_function

LIBRARY = torch.library.Library("fastformer", "DEF")
BACKENDS = ("triton", "cpp", "reference")
# What runs on a device unless `use_backend` forces another; the reference elsewhere.
PREFERRED = {"cuda": "triton", "cpu": "cpp"}

_DESCRIBED = {"reference": "the reference", "torch": "PyTorch's own kernel"}

_forced_backend: ContextVar[str | None] = ContextVar("fastformer_backend", default=None)
# Seen by all threads: on a GPU the backward pass runs in a thread of autograd's.
_recorders: list[set[tuple[str, str]]] = []
_told: set[tuple[str, str]] = set()


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
    """Returns the backend that `use_backend` forces here, or None."""
    return _forced_backend.get()


@contextlib.contextmanager
def record_backends() -> Iterator[set[tuple[str, str]]]:
    """Collects (op, backend) of every call that really ran in the block, backward passes and other threads included.

    For benchmarks and tests, which have to know what they measured. A backward pass that is PyTorch's own is not an op.
    """
    ran: set[tuple[str, str]] = set()
    _recorders.append(ran)
    try:
        yield ran
    finally:
        # By identity: two sets of the same pairs are equal.
        _recorders[:] = [recorder for recorder in _recorders if recorder is not ran]


def note_backend(op_name: str, backend: str) -> None:
    """Tells the open `record_backends` blocks which backend runs a call."""
    for recorder in _recorders:
        recorder.add((op_name, backend))


def is_strict() -> bool:
    """Returns whether an unsupported call is an error (FASTFORMER_STRICT=1) instead of a logged fallback."""
    return os.environ.get("FASTFORMER_STRICT", "0") == "1"


@functools.cache
def triton_kernel(stem: str) -> ModuleType | None:
    """The module `fastformer.kernels.<stem>`, or None where there is none or no triton. Imported on first use only."""
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
        defaults: the values of the last of them, where the schema gives some.
        has_autograd: whether the dispatcher hands calls over to autograd.
        apply: (*arguments) -> results that autograd knows, for calls past the dispatcher; None where there is no
            gradient, or it is an error.
        plans: what is left of the Triton launcher for a geometry; see `_plans`.
        taken: the geometries of calls that C++ was found to take.
        checked: the geometries of calls that the documented function has checked; see `repeat`.
        places: where the tensors stand in a call.
        chosen: kernels of PyTorch's that take calls on a GPU in place of ours; None for an op that has no others.
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
        """The results of a plain eager call whose geometry `settle` knows: the same checks would pass again.

        None for any other call, and under autocast. Checks that read the values of a tensor aren't spared.
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
        """The arguments of a call by the schema's names."""
        return dict(zip(self.arguments, args))  # noqa: B905 (every call comes here: their numbers were compared)

    def filled(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """All arguments of a call: the dispatcher hands over none that ends a call and equals its default."""
        missing = len(self.arguments) - len(args)
        return (*args, *self.defaults[-missing:]) if missing else args

    def run(self, preferred: str, args: tuple[Any, ...], key: Hashable | None = None) -> Any:
        """The results of a call, below autograd, on the preferred backend or the one that is chosen in its place.

        Args:
            preferred: the backend that the device suggests.
            args: by the schema's order.
            key: their geometry, if the caller knows it.
        """
        device = args[0].device
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
            # The public function has cast already. Inside any backend, autocast would take fp32 products down again.
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
        # The geometry decides whether C++ can take a call, so each geometry is asked once.
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
            # Triton launches on the current device, which need not be the tensors'.
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return plan(*args)
            return plan(*args)
        if backend == "cpp":
            function = cast(Callable[..., Any], cpp_kernel(self.name))
            return function(*args) if self.cpp_call is None else self.cpp_call(function, *args)
        if backend == "torch":
            return cast(Callable[..., Any], self.torch_function)(*args)
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
    """Returns why `backend` can't compute a call, in words; None if it can."""
    if (missing := missing_kernel(op, backend)) is not None:
        return missing
    if backend == "triton":
        return cast(str | None, cast(Any, triton_kernel(op.stem)).why_unsupported(op.name, **op.bind(*args)))
    unsupported = {"cpp": op.cpp_unsupported, "torch": op.torch_unsupported}.get(backend)
    return None if unsupported is None else unsupported(op.name, **op.bind(*args))


def _choose(op: Op, preferred: str, args: tuple[Any, ...]) -> str:
    """Chooses the backend that runs a call.

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
    # If the extension is missing altogether, the loader has logged that once for all ops.
    if (op.name, reason) not in _told and not (backend == "cpp" and _extension.load() is None):
        # A model in fp16 on a CPU would have a line for each op, all of them for one reason.
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
            function `torch.ops.fastformer_cpp.<name>` take the same positional arguments, and so does `plan_<name>`,
            where the Triton module has it: it gives what is left of the launcher for calls of the same geometry (see
            `_plans`). `why_unsupported` of the Triton module gets them by the schema's names.
        reference: plain PyTorch, right in every dtype up to fp64.
        stem: the file name that the op has in kernels/, csrc/ops/, ops/, tests/ops/ and benchmarks/.
        fake: shapes, dtypes and strides of the outputs; reads no data.
        cpp_unsupported: (op_name, **arguments) -> why the C++ function can't take the call, or None.
        cpp_call: (the C++ function, *arguments) -> the op's results, where that function takes other arguments.
        reference_only: "triton", "cpp": the backends that have no kernel for this op by design, and why. There the
            reference is the op, and nothing is logged or forbidden.
        torch_function: PyTorch's own fused function for it, with the reference's arguments and results. It runs in
            place of the reference if a kernel is missing or can't take a call.
        torch_unsupported: (op_name, **arguments) -> why that can't take the call, or None.
        torch_is_faster: (type of device) -> why PyTorch's own function is faster on this machine, or None. The
            documented function calls that one then, and not the op.
        formula: the same results, of operations that PyTorch differentiates any number of times in both directions,
            batches and hands to subclasses: nothing is written in place or read on the host. An op without
            gradients has none.
        has_faster: PyTorch may have a faster kernel on a GPU: see `_fastest`.

    Returns:
        What to call: the overload `torch.ops.fastformer.<name>.default`, or in a plain eager call what that would come
        to, without the dispatcher's and the library's share of its time (see `_eager`).
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
    """The function, for calls of the dispatcher: see `Op.filled`."""
    if not op.defaults:
        return function

    @functools.wraps(function)
    def filled(*args: Any) -> T:
        return function(*op.filled(args))

    return filled


def _eager_entry(op: Op, default: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the op: past the dispatcher if only autograd would notice, else through it or by the formula."""
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
    """Lets torch.onnx and `torch._decomp.get_decompositions` take the op apart.

    torch.compile and `run_decompositions()` decompose only what they name themselves, so they keep the op.
    """
    torch._decomp.register_decomposition(default, unsafe=True)(formula)
    # With symbolic shapes a fake tensor would take a decomposition, and its strides, for the op's fake if there were
    # no entry here.
    torch._decomp.register_decomposition(default, type="meta", unsafe=True)(fake)


def _kept_by_inductor(default: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake, which also tells Inductor that an op with a decomposition is to be called as it is.

    Where the environment variable CI is set, Inductor takes a decomposition that it does not use for a mistake of its
    own developers and raises. A list in its module of lowerings names the exceptions. Importing that module takes
    seconds, so the op is added by its first fake call after the import: Inductor traces a graph, by fakes, before it
    lowers it.
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
    """The fake, for calls in which no tensor has memory.

    PyTorch sends a call here as soon as one of its tensors is on "meta". The fake's outputs are uninitialised memory,
    which the caller would take for results if the other tensors were real.
    """

    @functools.wraps(fake)
    def checked(*args: Any) -> object:
        devices = {a.device.type for a in args if isinstance(a, Tensor)}
        if "meta" in devices and len(devices) > 1:
            raise ValueError(f"fastformer::{name}: expected tensors on one device, got {sorted(devices)}")
        return fake(*args)

    return checked


# The one autocast table. "cast": matrix products run in the autocast dtype (their softmax and loss stay fp32 inside).
# "keep": inputs stay as they come; statistics are fp32 inside whatever the dtype. Inside an op autocast is off.
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


# Asked once, since torch.compile of PyTorch 2.11 can't trace the question.
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
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
