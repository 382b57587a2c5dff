"""A call of an op, from the function that the op's module calls to the kernel of a backend.

The reference serves every device that has no kernel. On CUDA and CPU a small function asks the kernel whether it can
compute the call; if not, the reference runs, and the kernel's reason is logged once. If PyTorch has a fused function
that computes the same, it runs instead of the reference, with which tests still compare. If an op has no kernel for a
backend by design, its definition gives the reason; any other missing kernel is logged like a refusal.

An eager call of plain tensors that is not traced, wrapped or watched skips PyTorch's dispatcher: for a small call, the
work that torch.library adds to the dispatcher for autograd takes longer than all the rest, whether gradients are needed
or not. The dispatcher is for the things that may surround a call: torch.compile and export,
functorch's transforms, forward-mode AD, modes that record or replace operations, subclasses, profilers. PyTorch marks a
tensor or a thread with a dispatch key for nearly each of these. If all keys are the ordinary ones, a call skips the
dispatcher; if anything is unknown, the dispatcher runs it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.kernels import _host, _plans
from fastformer.ops import _extension, _fastest, _flops, _transforms
from fastformer.ops._backends import Backends, triton_kernel

P = ParamSpec("P")
T = TypeVar("T")

_host.use_extension(_extension.host_function)

BACKENDS = ("triton", "cpp", "reference")
# The backend of each device type unless `use_backend` forces another; other devices use the reference.
PREFERRED = {"cuda": "triton", "cpu": "cpp"}

# The backend that `use_backend` forces here, or None.
forced_backend: ContextVar[str | None] = ContextVar("fastformer_backend", default=None)
# Shared by all threads: on a GPU the backward pass runs in a thread of autograd.
recorders: list[set[tuple[str, str]]] = []


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
    token = forced_backend.set(name)
    try:
        yield
    finally:
        forced_backend.reset(token)


@contextlib.contextmanager
def record_backends() -> Iterator[set[tuple[str, str]]]:
    """Collects (op, backend) of every call that runs in the block, including backward passes and other threads.

    Benchmarks and tests use it to know what they measured. PyTorch's own backward passes are not ops.
    """
    ran: set[tuple[str, str]] = set()
    recorders.append(ran)
    try:
        yield ran
    finally:
        # Compared by identity, because two sets of the same pairs are equal.
        recorders[:] = [recorder for recorder in recorders if recorder is not ran]


def note_backend(op_name: str, backend: str) -> None:
    """Adds the backend of a call to the sets of the open `record_backends` blocks."""
    for recorder in recorders:
        recorder.add((op_name, backend))


_Key, _Keys = torch._C.DispatchKey, torch._C.DispatchKeySet


def _plain_keys() -> dict[int, str]:
    """Returns the device type by the dispatch keys of a plain strided tensor.

    Autograd may see it, unless it was made in inference mode.
    """
    plain = {}
    for device, key, autocast, autograd in (
        ("cpu", _Key.CPU, _Key.AutocastCPU, _Key.AutogradCPU),
        ("cuda", _Key.CUDA, _Key.AutocastCUDA, _Key.AutogradCUDA),
    ):
        untracked = _Keys(key) | _Keys(autocast)
        for keys in (untracked, untracked | _Keys(_Key.ADInplaceOrView) | _Keys(autograd)):
            plain[keys.raw_repr()] = device
    return plain


_PLAIN = _plain_keys()
# The keys that a thread adds to those of its calls: usually, and in inference mode.
_QUIET_MODES = tuple(
    keys.raw_repr() for keys in (_Keys(_Key.BackendSelect) | _Keys(_Key.ADInplaceOrView), _Keys(_Key.BackendSelect))
)
# The Python types for each type of the schema; the dispatcher converts or refuses all others.
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_TYPES: dict[str, frozenset[type]] = {
    "Tensor": _TENSORS,
    "Optional[Tensor]": _TENSORS | {type(None)},
    "float": frozenset((float,)),
    "int": frozenset((int,)),
    "SymInt": frozenset((int,)),
    "Optional[int]": frozenset((int, type(None))),
    "bool": frozenset((bool,)),
    "List[bool]": frozenset((list,)),  # the op's own function made the elements
    "str": frozenset((str,)),
    "ScalarType": frozenset((torch.dtype,)),
}
_included, _keys_of = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_keys
_autograd_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class TensorIndices(dict[tuple[type, ...], tuple[int, ...]]):
    """Which of a call's arguments are tensors, by the types of the arguments, for `device_of`.

    If an argument is not exactly of the schema's type, there are no indices: the dispatcher serves these calls.
    """

    def __init__(self, schema: torch.FunctionSchema) -> None:
        # A ScalarType is an integer to the schema, and a torch.dtype to Python.
        self._types = tuple(
            _TYPES["ScalarType" if str(argument.real_type) == "ScalarType" else str(argument.type)]
            for argument in schema.arguments
        )

    def __missing__(self, types: tuple[type, ...]) -> tuple[int, ...]:
        if len(types) != len(self._types):
            return ()
        if any(kind not in allowed for kind, allowed in zip(types, self._types, strict=True)):
            return ()
        self[types] = indices = tuple(index for index, kind in enumerate(types) if kind in _TENSORS)
        return indices


def nothing_watches() -> bool:
    """Returns whether this thread has no active mode, transform or profiler. Not for use while torch.compile traces."""
    return (
        _included().raw_repr() in _QUIET_MODES
        and not torch._C._is_torch_function_mode_enabled()
        and forward_ad._current_level < 0
        and not torch._C._autograd._profiler_enabled()  # a profiler shows the calls of the dispatcher
    )


def nothing_sees_ops() -> bool:
    """Returns `nothing_watches` for a call whose ops need no cast: without autocast."""
    return nothing_watches() and not torch._C._is_any_autocast_enabled()


def device_of(args: tuple[Any, ...], tensor_indices: TensorIndices) -> tuple[str | None, bool]:
    """Returns (device type, whether a tensor requires a gradient) of a call with only plain tensors on one device.

    The type is None if a tensor isn't plain, the devices differ, or an argument isn't exactly of the schema's type.
    """
    device = None
    requires_grad = False
    for index in tensor_indices[tuple(map(type, args))]:
        tensor = args[index]
        here = _PLAIN.get(_keys_of(tensor).raw_repr())
        if here is None or here != (device or here):
            return None, False
        device = here
        requires_grad = requires_grad or tensor.requires_grad
    return device, requires_grad


class ArgumentChecks(NamedTuple):
    """The functions that examine the arguments of each call.

    Attributes:
        device_of: see `device_of`.
        geometry: see `_plans.geometry`.
        is_fast: whether both are C++ functions.
    """

    device_of: Callable[[tuple[Any, ...], TensorIndices], tuple[str | None, bool]]
    geometry: Callable[[tuple[Any, ...]], Hashable | None]
    is_fast: bool


@functools.cache
def argument_checks() -> ArgumentChecks:
    """Returns the argument checks, from C++ if the extension exists: these take a fifth of the time."""
    in_cpp = _extension.host_function("device_of"), _extension.host_function("geometry")
    return ArgumentChecks(in_cpp[0] or device_of, in_cpp[1] or _plans.geometry, None not in in_cpp)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether autograd will record operations on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # runs in each call: a generator takes three times as long
            if getattr(tensor, "requires_grad", False):
                return True
    return False


def unviewed(value: Tensor) -> Tensor:
    """Returns a new tensor that isn't marked as a view: autograd forbids changing a view that a function returns."""
    return torch.ops.aten._unsafe_view.default(value, value.shape) if value._is_view() else value


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor holds numbers, is of no subclass, and is neither traced nor batched."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None  # the mode of make_fx
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)  # the tensors of autograd's is_grads_batched
    )


def is_readable(tensor: Tensor) -> bool:
    """Returns whether reading a tensor's values is free: it is in CPU memory, and neither traced nor batched."""
    return tensor.device.type == "cpu" and is_plain(tensor)


@dataclass(eq=False, kw_only=True)
class Op(Backends, Generic[P, T]):
    """An op with its backends, which is called like its reference. The arguments are those of `define_op`.

    A call runs the overload `torch.ops.fastformer.<name>.default`. A plain eager call gets the same result without the
    overhead of the dispatcher and of torch.library.

    Attributes:
        default: that overload.
        defaults: the schema's default values, which belong to the last arguments.
        has_autograd: whether the dispatcher passes calls to autograd.
        setup_context: (ctx, arguments, results) saves what the backward pass needs; None if the op has no gradient.
        apply: (*arguments) -> results that autograd tracks, for direct calls; None if the op has no gradient, or it is
            an error.
        plans: the prepared Triton launches, by geometry; see `_plans`.
        taken: the geometries of calls that C++ was found to support.
        checked: the geometries of calls that the documented function has checked; see `repeat`.
        tensor_indices: which arguments are tensors.
        fastest: the choices of PyTorch's kernels for GPU calls; None for an op without them.
    """

    default: Callable[..., Any]
    defaults: tuple[Any, ...]
    reference: Callable[P, T]
    cpp_call: Callable[..., Any] | None
    torch_is_faster: Callable[[str], str | None] | None
    formula: Callable[..., Any] | None
    has_autograd: bool = False
    setup_context: Callable[..., None] | None = None
    apply: Callable[..., Any] | None = None
    plans: dict[Hashable, _plans.Plan] = field(default_factory=_plans.new_plans)
    taken: set[Hashable] = field(default_factory=set)
    checked: set[Hashable] = field(default_factory=set)
    tensor_indices: TensorIndices
    fastest: _fastest.ChoiceCache | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the op: directly if only autograd would notice, else by the dispatcher or the formula."""
        if torch.compiler.is_compiling():
            return cast(T, self.default(*args))
        device = None
        if self.has_autograd and nothing_watches():
            device, requires_grad = argument_checks().device_of(args, self.tensor_indices)
        if device is None:
            if torch._C._len_torch_dispatch_stack():
                _flops.tell_counters()
            if self.formula is not None and _transforms.needs_formula(args):
                return cast(T, self.formula(*args))
            return cast(T, self.default(*args))
        if not requires_grad or not torch.is_grad_enabled():
            return cast(T, self.run(PREFERRED[device], args))
        # Autograd's keys are excluded in an op that is differentiated as a whole.
        if self.apply is None or _autograd_is_excluded(_Key.AutogradOther):
            return cast(T, self.default(*args))
        return cast(T, self.apply(*args))

    def repeat(self, *args: Any, check_values: Callable[[], None] | None = None) -> T | None:
        """Runs a plain eager call whose geometry `settle` knows, for which all checks of the geometry would pass again.

        Args:
            args: the op's arguments.
            check_values: the checks that read a tensor's values, which have to run again.

        Returns:
            The op's results; None for any other call, and under autocast.
        """
        checks = argument_checks()
        if (  # `nothing_sees_ops`, without a call
            not checks.is_fast
            or _included().raw_repr() not in _QUIET_MODES
            or torch._C._is_torch_function_mode_enabled()
            or torch._C._is_any_autocast_enabled()
            or forward_ad._current_level >= 0
            or torch._C._autograd._profiler_enabled()
        ):
            return None
        device, requires_grad = checks.device_of(args, self.tensor_indices)
        if device is None or (key := checks.geometry(args)) not in self.checked:
            return None
        if check_values is not None:
            check_values()
        if not requires_grad or not torch.is_grad_enabled():
            return cast(T, self.run(PREFERRED[device], args, key))
        # Autograd's keys are excluded in an op that is differentiated as a whole.
        if self.apply is None or _autograd_is_excluded(_Key.AutogradOther):
            return None
        return cast(T, self.apply(*args))

    def settle(self, args: tuple[Any, ...]) -> None:
        """Remembers that the documented function has checked a call with these arguments."""
        checks = argument_checks()
        if checks.is_fast and nothing_sees_ops() and checks.device_of(args, self.tensor_indices)[0] is not None:
            _remember(self.checked, checks.geometry(args))

    def filled(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns all arguments of a call: the dispatcher drops trailing arguments that equal their defaults."""
        missing = len(self.arguments) - len(args)
        return (*args, *self.defaults[-missing:]) if missing else args

    def forward(self, ctx: Any, *args: Any) -> Any:
        """Runs a direct call that autograd tracks: the forward method of the op's `autograd.Function`."""
        output = self.run(PREFERRED[args[0].device.type], args)
        if isinstance(output, Tensor):
            output = unviewed(output) if output._is_view() else output
        elif True in map(Tensor._is_view, output):
            output = tuple(map(unviewed, output))
        ctx.forced_backend = forced_backend.get()  # as in `save`, without a call
        ctx.set_materialize_grads(False)
        cast("Callable[..., None]", self.setup_context)(ctx, args, output)
        return output

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves for the backward pass what `setup_context` names, and the forced backend."""
        # A context variable does not reach the thread in which autograd runs a GPU's backward pass.
        ctx.forced_backend = forced_backend.get()
        # Zeros instead of None would give unused parameters a gradient, and an optimizer would then change them.
        ctx.set_materialize_grads(False)
        if self.setup_context is not None:
            self.setup_context(ctx, inputs, output)

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
        forced = forced_backend.get()
        backend = forced or preferred
        if backend == "reference":
            return self._run_plain(backend, args)
        if key is None:
            key = argument_checks().geometry(args)
        if forced is None and self.fastest is not None and device.type in _fastest.DEVICES:
            faster = self.fastest.find(self.name, key, lambda: self.bind(args))
            if faster is not None:
                note_backend(self.name, faster.name)
                return faster.run(*args)
        if backend == "triton":
            return self._run_triton(device, args, key)
        if key not in self.taken:  # the geometry decides whether C++ supports a call
            backend = self.choose("cpp", forced, args)
            if backend != "cpp":
                return self._run_plain(backend, args)
            _remember(self.taken, key)
        for recorder in recorders:
            recorder.add((self.name, "cpp"))
        function = cast("Callable[..., Any]", _extension.function(self.name))
        return function(*args) if self.cpp_call is None else self.cpp_call(function, *args)

    def _run_triton(self, device: torch.device, args: tuple[Any, ...], key: Hashable | None) -> Any:
        plan = self.plans.get(key)
        if plan is None:
            backend = self.choose("triton", forced_backend.get(), args)
            if backend != "triton":
                return self._run_plain(backend, args)
            kernel = triton_kernel(self.stem)
            make = getattr(kernel, f"plan_{self.name}", None)
            plan = getattr(kernel, self.name) if make is None else make(*args)
            _plans.remember(self.plans, key, plan)
        note_backend(self.name, "triton")
        # Triton launches on the current device, which may differ from the tensors' device.
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return plan(*args)
        return plan(*args)

    def _run_plain(self, backend: str, args: tuple[Any, ...]) -> Any:
        """Runs a call on PyTorch's own operations: its fused function ("torch") or the reference."""
        note_backend(self.name, backend)
        function = self.torch_function if backend == "torch" else self.reference
        return cast("Callable[..., Any]", function)(*args)


def _remember(keys: set[Hashable], key: Hashable | None) -> None:
    if key is not None:
        if len(keys) >= _plans.LARGEST:
            keys.clear()
        keys.add(key)


# Every op, by its schema's name.
OPS: dict[str, Op[..., Any]] = {}


def add_op(name: str, op: Op[..., Any]) -> None:
    """Adds an op to `OPS`."""
    OPS[name] = op


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


# The copies of weights in the autocast dtype that a pass uses, by the id of the weight; see `nn.copied_weights`.
weight_copies: ContextVar[Mapping[int, Tensor]] = ContextVar("fastformer_weight_copies", default=MappingProxyType({}))


def copied(weight: T) -> T | Tensor:
    """Returns the copy of a weight in the autocast dtype if a pass has one, else the argument, which may be anything.

    A part of a model may turn autocast off, or cast to another dtype. Not for use while torch.compile traces.
    """
    copies = weight_copies.get()
    copy = copies.get(id(weight)) if copies else None
    if copy is None or not torch.is_autocast_enabled(device := copy.device.type):
        return weight
    return copy if copy.dtype == torch.get_autocast_dtype(device) else weight


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
    if not torch.compiler.is_compiling():
        tensors = tuple(map(copied, tensors))
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
