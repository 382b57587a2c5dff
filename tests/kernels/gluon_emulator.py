"""Runs a Gluon kernel's own Python body on a CPU, with its asynchrony, since Gluon has no interpreter.

The functions under `@gluon.jit` are run as Python with stand-ins for the language (NumPy). What a GPU does at the same
time happens here in an order that a schedule chooses, one step at a time:

- each partition of `warp_specialize` is a thread, and one thread runs until its next barrier, copy or product; it is
  called as its function, with a number ("consume 0");
- a TMA copy lands at a time of the schedule's choice; until then its buffer can't be read;
- a product (`warpgroup_mma`) reads its shared operands as late as it may: when a wait says that it is done;
- barriers have phases, counts and bytes as in PTX.

Errors: a deadlock (none can run), a buffer read before its copy has landed, or written while it is read or before it
was read at all, a result used before its wait, more arrivals than a barrier counts, memory read or written out of
bounds or written twice, int32 overflow, products or copies that are left in flight.
"""

from __future__ import annotations

import functools
import re
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from fastformer.kernels._attention_hopper_forward import async_load
from tests.kernels.gluon_values import (
    FLOATS,
    GlobalTensor,
    GluonError,
    Pointer,
    Value,
    binary,
    bits_of,
    common,
    rounded,
    value,
    wrapped,
)

Schedule = Callable[[list[str]], int]


def eager(*first: str) -> Schedule:
    """A schedule that runs the partition whose name begins with the first of `first`, if it can continue, else the next
    one.
    """

    def rank(name: str) -> int:
        return next(i for i, start in enumerate(first) if name.startswith(start))

    return lambda names: min(range(len(names)), key=lambda i: (rank(names[i]), i))


def shuffled(seed: int) -> Schedule:
    """A random schedule."""
    generator = np.random.default_rng(seed)
    return lambda names: int(generator.integers(len(names)))


class Slot:
    """A buffer of shared memory."""

    def __init__(self, name: str, shape: list[int], dtype: Any) -> None:
        self.name = name
        self.array = np.full(shape, np.nan, dtype=np.float32)
        self.dtype = dtype
        self.state = "never written"  # or "in flight", "landed", "read", "stored" and then "fenced"
        self.readers = 0
        self.writer: str | None = None  # the partition that stored


class View:
    """A buffer as an operand."""

    def __init__(self, slot: Slot, see: Callable[[np.ndarray], np.ndarray] = lambda array: array) -> None:
        self.slot = slot
        self.see = see

    def reshape(self, shape: list[int]) -> View:
        return View(self.slot, lambda array: self.see(array).reshape(shape))

    def permute(self, order: tuple[int, ...]) -> View:
        return View(self.slot, lambda array: self.see(array).transpose(order))

    def slice(self, start: Any, length: Any, dim: int = 0) -> View:
        """Returns [start, start + length) of a dimension."""
        start, length = int(value(start)), int(value(length))

        def see(array: np.ndarray) -> np.ndarray:
            whole = self.see(array)
            if not 0 <= start <= start + length <= whole.shape[dim]:
                raise GluonError(f"a slice [{start}, {start + length}) of {whole.shape[dim]}")
            return whole[(slice(None),) * dim + (slice(start, start + length),)]

        see(self.slot.array)
        return View(self.slot, see)

    def store(self, x: Value) -> None:
        """Stores values from a partition; a product sees them only after a fence."""
        if self.slot.readers or self.slot.state == "in flight":
            raise GluonError(f"{self.slot.name} is overwritten while it is read or written")
        if x.dtype != self.slot.dtype or x.shape != list(self.slot.array.shape):
            raise GluonError(f"{x.dtype} {x.shape} is stored as {self.slot.dtype} {self.slot.array.shape}")
        self.slot.array[...] = x.array
        self.slot.state = "stored"
        self.slot.writer = threading.current_thread().name


class Shared:
    """An allocation whose first dimension counts buffers, or barriers (int64)."""

    def __init__(self, dtype: Any, shape: list[int], name: str) -> None:
        self.dtype = dtype
        self.shape = [int(size) for size in shape]
        make = Barrier if dtype == gl.int64 else functools.partial(Slot, shape=self.shape[1:], dtype=dtype)
        self.items = [make(f"{name}[{i}]") for i in range(self.shape[0])]

    def index(self, i: Any) -> Any:
        i = int(value(i))
        if not 0 <= i < len(self.items):
            raise GluonError(f"buffer {i} of {len(self.items)}")
        item = self.items[i]
        return item if isinstance(item, Barrier) else View(item)


class Barrier:
    """An mbarrier: a phase ends when all of its arrivals and all of its bytes have come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.arrived = 0
        self.bytes = 0
        self.phase = 0

    def change(self, arrivals: int, size: int) -> None:
        if not self.count:
            raise GluonError(f"{self.name} was never initialised")
        self.arrived += arrivals
        self.bytes += size
        if self.arrived > self.count:
            raise GluonError(f"{self.name} counts {self.count} arrivals, this is one more")
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0


class Product:
    """A warpgroup_mma in flight; it has a `result` once a wait has completed it."""

    def __init__(self, a: Any, b: View, acc: Any) -> None:
        self.operands = (a, b)
        self.acc = acc
        self.result: Value | None = None
        self.type = types.SimpleNamespace(layout=None)
        for slot in self.slots():
            if slot.state in ("in flight", "never written"):
                raise GluonError(f"{slot.name} is read before its copy has landed")
            if slot.state == "stored":
                raise GluonError(f"{slot.name} is read without a fence behind what was stored")
            slot.readers += 1

    def slots(self) -> list[Slot]:
        return [operand.slot for operand in self.operands if isinstance(operand, View)]

    def complete(self) -> None:
        a, b = (x.see(x.slot.array) if isinstance(x, View) else x.array for x in self.operands)
        product = np.matmul(a.astype(np.float32), b.astype(np.float32))
        if self.acc is not None:
            acc = self.acc.result if isinstance(self.acc, Product) else self.acc
            product = product + acc.array
        self.result = Value(product.astype(np.float32), gl.float32)
        for slot in self.slots():
            slot.readers -= 1
            slot.state = "read"


class _Stopped(BaseException):
    """Ends the thread of a partition after another one has failed."""


class Run:
    """One program: its partitions, copies in flight, and the schedule that orders them."""

    def __init__(self, program: int, programs: int, memories: dict[int, GlobalTensor], schedule: Schedule) -> None:
        self.program, self.programs = program, programs
        self.memories = memories
        self.schedule = schedule
        self.local = threading.local()
        self.copies: list[Callable[[], None]] = []
        self.ready: dict[str, Callable[[], bool]] = {}
        self.batons: dict[str, threading.Semaphore] = {}
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.allocations = 0
        self.slots: list[Slot] = []

    # The partitions.

    def specialize(self, partitions: list[tuple[Callable, tuple]], *_: Any) -> None:
        threads = []
        for function, arguments in partitions:
            role = function.__name__.strip("_")
            name = f"{role} {sum(other.startswith(role) for other in self.batons)}"
            self.ready[name] = lambda: True
            self.batons[name] = threading.Semaphore(0)
            threads.append(
                threading.Thread(target=self._partition, args=(name, function, arguments), name=name, daemon=True)
            )
        for thread in threads:
            thread.start()
        while (self.ready or self.copies) and self.error is None:
            names = [name for name, can in self.ready.items() if can()]
            names += [f"copy {i}" for i in range(len(self.copies))]
            if not names:
                self.error = GluonError(f"deadlock: {self.waiting}")
                break
            name = names[self.schedule(names)]
            if name in self.batons:
                self.batons[name].release()
                self.back.acquire()
            else:
                self.copies.pop(int(name.removeprefix("copy ")))()
        for baton in self.batons.values():
            baton.release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    @property
    def waiting(self) -> str:
        return ", ".join(f"partition {name} waits for {can.__doc__}" for name, can in self.ready.items())

    def _partition(self, name: str, function: Callable, arguments: tuple) -> None:
        self.local.name = name
        self.local.products = []
        self.batons[name].acquire()
        try:
            if self.error is None:
                with np.errstate(all="ignore"):
                    function(*arguments)
                if self.local.products:
                    raise GluonError(f"partition {name} ends with products in flight")
        except _Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        with suppress(KeyError):
            del self.ready[name]
        self.back.release()

    def pause(self, can: Callable[[], bool] = lambda: True) -> None:
        """Lets the schedule choose the next partition; returns once `can()` is true and this one is chosen."""
        name = self.local.name
        self.ready[name] = can
        self.back.release()
        self.batons[name].acquire()
        if self.error is not None:
            raise _Stopped

    # The language.

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        self.allocations += 1
        shared = Shared(dtype, shape, f"allocation {self.allocations}")
        self.slots += [item for item in shared.items if isinstance(item, Slot)]
        return shared

    def fence(self) -> None:
        """Makes this partition's stores visible to the asynchronous units; stores of others need their own fences."""
        if hasattr(self.local, "name"):
            self.pause()
        for slot in self.slots:
            if slot.state == "stored" and slot.writer == threading.current_thread().name:
                slot.state = "fenced"

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = count

    def expect(self, barrier: Barrier, size: int) -> None:
        self.pause()
        barrier.change(1, size)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.pause()
        barrier.change(count, 0)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        parity = int(value(phase)) & 1

        def can() -> bool:
            return barrier.phase & 1 != parity

        can.__doc__ = f"phase {parity} of {barrier.name}"
        self.pause(can)

    def copy(self, descriptor: Any, coordinates: list[Any], barrier: Barrier, view: View) -> None:
        self.pause()
        slot = view.slot
        if slot.readers or slot.state == "in flight":
            raise GluonError(f"{slot.name} is overwritten while it is read or written")
        if slot.state == "landed":
            raise GluonError(f"{slot.name} is overwritten before it was read")
        data = self._box(descriptor, [int(value(x)) for x in coordinates])
        if list(data.shape) != list(slot.array.shape):
            raise GluonError(f"a copy of {data.shape} into {slot.array.shape}")
        slot.state = "in flight"

        def land() -> None:
            slot.array[...] = data
            slot.state = "landed"
            barrier.change(0, -data.size * 2)

        self.copies.append(land)

    def _box(self, descriptor: Any, coordinates: list[int]) -> np.ndarray:
        """Returns the values that TMA reads: zeros out of bounds, with addresses modulo 2**64."""
        real = descriptor.descriptor
        base = sum(c * s for c, s in zip(coordinates, real.strides, strict=True)) * 2 % 2**64
        base = (base - 2**64 if base >= 2**63 else base) // 2
        offsets, inside = np.zeros([1] * 5, dtype=np.int64), np.ones([1] * 5, dtype=bool)
        for dim, (at, size, extent, stride) in enumerate(
            zip(coordinates, real.block_shape, real.shape, real.strides, strict=True)
        ):
            steps = np.arange(size).reshape([-1 if i == dim else 1 for i in range(5)])
            inside = inside & (at + steps >= 0) & (at + steps < extent)
            offsets = offsets + (steps * stride if size > 1 else 0)
        memory = self.memories[real.base.data_ptr()]
        offsets, inside = np.broadcast_arrays(offsets + base + memory.first, inside)
        chosen = offsets[inside]
        if ((chosen < 0) | (chosen >= len(memory.array))).any():
            raise GluonError("TMA reads outside the tensor")
        box = np.zeros(real.block_shape, dtype=np.float32)
        box[inside] = memory.array[chosen]
        return box

    def mma(self, a: Any, b: View, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        self.pause()
        product = Product(a, b, acc if use_acc else None)
        self.local.products.append(product)
        return product if is_async else self.mma_wait(0, [product])

    def mma_wait(self, outstanding: int, deps: list[Any]) -> Any:
        self.pause()
        products = self.local.products
        while len(products) > outstanding:
            products.pop(0).complete()
        results = [dep.result if isinstance(dep, Product) else dep for dep in deps]
        if any(result is None for result in results):
            raise GluonError("a product's result is used before it is waited for")
        return results[0] if len(results) == 1 else tuple(results)


def _elementwise(function: Callable) -> Callable:
    return lambda x: Value(rounded(function(x.array.astype(np.float32)), gl.float32), gl.float32)


def _where(condition: Value, x: Any, y: Any) -> Value:
    x, y = value(x), value(y)
    dtype = common(x.dtype, y.dtype)
    return Value(np.where(condition.array, x.array, y.array).astype(x.array.dtype), dtype)


def _assembly(asm: str, constraints: str, args: list[Value], dtype: Any, is_pure: bool, pack: int) -> Value:
    """Emulates the instructions that the kernels use, as defined by PTX."""
    match = re.fullmatch(r"(\S+) \$0, \$(\d), \$(\d)(?:, (\w+))?;", asm)
    assert match is not None and pack == 1, asm
    name, first, second, selector = match.groups()
    a, b = args[int(first) - 1].array, args[int(second) - 1].array
    if name == "prmt.b32":
        source = [(x & 0xFFFFFFFF) >> 8 * i & 0xFF for x in (a, b) for i in range(4)]
        words = np.zeros(a.shape, dtype=np.int64)
        for byte in range(4):
            digit = int(selector, 16) >> 4 * byte & 0xF
            chosen = source[digit & 7]
            words |= (np.where(chosen & 0x80, 0xFF, 0) if digit & 8 else chosen) << 8 * byte
    else:
        half = {"cvt.rn.bf16x2.f32": gl.bfloat16, "cvt.rn.f16x2.f32": gl.float16}[name]
        words = bits_of(rounded(a, half), half) << 16 | bits_of(rounded(b, half), half)  # the first is the upper half
    return Value(wrapped(words, dtype), dtype)


def _join(x: Value, y: Value) -> Value:
    return Value(np.stack(np.broadcast_arrays(x.array, y.array), -1), x.dtype)


def _split(x: Value) -> tuple[Value, Value]:
    return Value(x.array[..., 0], x.dtype), Value(x.array[..., 1], x.dtype)


def _convert(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    if isinstance(layout, gl.DistributedLinearLayout) and list(layout.shape) != x.shape:
        raise GluonError(f"a layout of {layout.shape} for {x.shape}")
    return x


def _load(pointer: Pointer, mask: Value | None = None, other: float = 0.0) -> Value:
    here = np.ones(np.shape(pointer.offset), dtype=bool) if mask is None else mask.array
    array = np.full(here.shape, other, dtype=pointer.memory.array.dtype)
    array[here] = pointer.memory.array[pointer.inside(here)]
    return Value(array, pointer.memory.dtype)


def _atomic_add(pointer: Pointer, x: Value, mask: Value, sem: str) -> None:
    here = np.broadcast_to(mask.array, x.array.shape)
    index = pointer.inside(here)
    pointer.memory.added[index] = True
    np.add.at(pointer.memory.array, index, x.array[here])


def _store(pointer: Pointer, x: Value, mask: Value) -> None:
    index = pointer.inside(mask.array)
    if pointer.memory.written[index].any():
        raise GluonError("an element is written twice")
    shape = np.broadcast_shapes(np.shape(pointer.offset), mask.array.shape)
    pointer.memory.written[index] = True
    pointer.memory.array[index] = np.broadcast_to(x.array, shape)[np.broadcast_to(mask.array, shape)]


def _range(*bounds: Any) -> Iterator[Value]:
    for i in range(*(int(value(bound)) for bound in bounds)):
        yield Value(np.int64(i), gl.int32)


class _Language:
    """The stand-in for gl and tl in one run; dtypes and layouts are the real ones."""

    def __init__(self, run: Run) -> None:
        self.program_id = lambda axis: value(run.program)
        self.num_programs = lambda axis: value(run.programs)
        self.allocate_shared_memory = run.allocate_shared_memory
        self.warp_specialize = run.specialize
        self.static_range = range
        self.arange = lambda start, end, layout=None: Value(np.arange(start, end), gl.int32)
        self.full = lambda shape, x, dtype, layout=None: Value(np.full(shape, x, dtype=np.float32), dtype)
        self.zeros = lambda shape, dtype, layout=None: Value(np.zeros(shape, dtype=np.float32), dtype)
        self.maximum, self.minimum = binary(np.fmax), binary(np.fmin)
        self.max = lambda x, axis: Value(np.fmax.reduce(x.array, axis), x.dtype)
        self.sum = lambda x, axis: Value(x.array.sum(axis, dtype=np.float32), x.dtype)
        self.exp2, self.log2 = _elementwise(np.exp2), _elementwise(np.log2)
        self.where, self.join, self.split = _where, _join, _split
        self.convert_layout, self.inline_asm_elementwise = _convert, _assembly
        self.load, self.store, self.atomic_add = _load, _store, _atomic_add
        self.cast = lambda x, dtype: value(x).to(dtype)
        self.mul = lambda x, y, sanitize_overflow=True: value(x) * y
        self.add = lambda x, y, sanitize_overflow=True: value(x) + y
        self.umulhi = lambda x, y: Value(
            ((x.array.astype(np.uint64) * np.uint64(y)) >> np.uint64(32)).astype(np.int64), gl.uint32
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)


class _Descriptor:
    """A TensorDescriptor as kernels see it."""

    def __init__(self, descriptor: Any) -> None:
        self.descriptor = descriptor
        self.dtype = FLOATS[descriptor.base.dtype]
        shape = list(descriptor.block_shape)
        self.block_type = types.SimpleNamespace(shape=shape, nbytes=int(np.prod(shape)) * 2)
        self.layout = descriptor.layout


class KernelBody:
    """A function in the form of `gluon.jit`, to be emulated on its own, if its source is in no file."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn


def _emulated(function: Any, replaced: Callable[[Any], Any]) -> Callable:
    """Returns the body of a jit function with its references replaced."""
    body = function.fn
    names: dict[str, Any] = {"range": _range}

    def look_up() -> types.FunctionType:
        for name, x in body.__globals__.items():
            names.setdefault(name, replaced(x))
        names["__builtins__"] = body.__globals__["__builtins__"]
        return types.FunctionType(body.__code__, names, body.__name__, body.__defaults__, body.__closure__)

    cached: list[types.FunctionType] = []

    @functools.wraps(body)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not cached:
            cached.append(look_up())
        return cached[0](*args, **kwargs)

    return call


def emulate(
    kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any], tensors: list[torch.Tensor],
    schedule: Schedule,
) -> None:  # fmt: skip
    """Runs `kernel[(programs,)](*arguments, **constants)` one program after another, and writes its outputs.

    Args:
        kernel: the result of `gluon.jit`, or a `KernelBody`.
        tensors: the tensors of the descriptors.
    """
    memories = {x.data_ptr(): GlobalTensor(x) for x in tensors}

    def argument(x: Any) -> Any:
        if isinstance(x, tuple) and not hasattr(x, "block_shape"):
            return tuple(argument(item) for item in x)
        if hasattr(x, "block_shape"):
            return _Descriptor(x)
        if isinstance(x, torch.Tensor):
            memory = memories.setdefault(x.data_ptr(), GlobalTensor(x))
            return Pointer(memory, np.int64(memory.first))
        return x if x is None else value(x)

    arguments = tuple(argument(x) for x in arguments)
    for program in range(programs):
        run = Run(program, programs, memories, schedule)
        language = _Language(run)
        stand_ins: dict[int, Any] = {
            id(gl): language, id(triton.language): language, id(hopper.warpgroup_mma): run.mma,
            id(hopper.warpgroup_mma_wait): run.mma_wait, id(hopper.fence_async_shared): run.fence,
            id(hopper.mbarrier): types.SimpleNamespace(
                init=run.init, expect=run.expect, arrive=run.arrive, wait=run.wait, MBarrierLayout=lambda: None
            ),
            id(async_load): run.copy,
        }  # fmt: skip
        emulated: dict[int, Callable] = {}

        def replaced(x: Any, stand_ins: dict[int, Any] = stand_ins, emulated: dict[int, Callable] = emulated) -> Any:
            if id(x) in stand_ins:
                return stand_ins[id(x)]
            if isinstance(x, gl.constexpr):
                return x.value
            if hasattr(x, "fn") and hasattr(x.fn, "__code__"):
                return emulated.setdefault(id(x), _emulated(x, replaced))
            return x

        _emulated(kernel, replaced)(*arguments, **constants)
    for memory in memories.values():
        memory.finish()
