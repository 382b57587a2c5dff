"""How a module becomes ours in place, and how it becomes again what it was: by its class.

Its parameters, buffers, submodules and hooks stay where they are, and it stays the object that optimizers, wrappers and
its owner know. The class that it gets is derived from its own, too, so that `isinstance` says what it said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

# The attribute in which a swapped module remembers what it was.
_MEMORY = "_fastformer_swapped"


class _Memory(NamedTuple):
    original: type[nn.Module]
    swapped: type[nn.Module]
    added: tuple[str, ...]
    had: frozenset[str]  # the names in its __dict__


def _nothing(module: Any) -> dict[str, Any]:
    return {}


def _fits(module: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Swap:
    """A class that modules of another class can have in its place.

    Attributes:
        original: exactly this class; a subclass of it may compute something else.
        swapped: derived from ours and from `original`.
        attributes: (module) -> what `swapped` needs beside what a module of `original` has.
        why_not: (module) -> why this one can't be swapped, or None.
    """

    original: type[nn.Module]
    swapped: type[nn.Module]
    attributes: Callable[[Any], dict[str, Any]] = _nothing
    why_not: Callable[[Any], str | None] = _fits


def why_left(module: nn.Module, swaps: dict[type[nn.Module], Swap]) -> str | None:
    """Why a module that looks like one of the originals isn't swapped; None where it can be, or looks like none."""
    swap = swaps.get(type(module))
    if swap is not None:
        if "forward" in module.__dict__:
            return "it has a forward of its own"
        for name in (*swap.attributes(module), _MEMORY):
            if hasattr(module, name):
                return f"it has an attribute {name} already"
        return swap.why_not(module)
    if is_swapped(module):
        return None
    for original in swaps:
        if isinstance(module, original):
            return f"{type(module).__name__} is a subclass of {original.__name__}, and may compute something else"
    return None


def is_swapped(module: nn.Module) -> bool:
    """Whether a module has a class that `swap` gave it."""
    return isinstance(module.__dict__.get(_MEMORY), _Memory)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module has when it is restored."""
    memory = module.__dict__.get(_MEMORY)
    return memory.original if isinstance(memory, _Memory) else type(module)


def swap(module: nn.Module, with_: Swap) -> None:
    """Gives a module the other class."""
    added, had = with_.attributes(module), frozenset(vars(module))
    for name, value in added.items():
        setattr(module, name, value)
    setattr(module, _MEMORY, _Memory(type(module), with_.swapped, tuple(added), had))
    module.__class__ = with_.swapped


def is_derived(module: nn.Module) -> bool:
    """Whether somebody gave a swapped module a class made of ours since, as FSDP2 does: `unswap` can't take it away."""
    swapped = getattr(module, _MEMORY).swapped
    return type(module) is not swapped and isinstance(module, swapped)


def own_methods(module: nn.Module) -> list[str]:
    """The methods of ours in whose place somebody put others on a swapped module itself, which may hold ours.

    What was there before it was swapped holds none of ours, and nor does the original's own.
    """
    memory: _Memory = getattr(module, _MEMORY)
    return [
        name
        for name in vars(module).keys() - memory.had - {_MEMORY, *memory.added}
        if callable(ours := getattr(memory.swapped, name, None))
        and getattr(memory.original, name, None) not in (ours, getattr(vars(module)[name], "__func__", None))
        and not _is_of_its_class(module, name)
    ]


def unswap(module: nn.Module) -> bool:
    """Gives a swapped module back what it had. False where somebody gave it another class since, which it keeps."""
    memory: _Memory = getattr(module, _MEMORY)
    is_ours = type(module) is memory.swapped
    if is_ours:
        for name in [each for each in vars(module).keys() - memory.had if _is_of_its_class(module, each)]:
            del module.__dict__[name]
        module.__class__ = memory.original
    for name in (*memory.added, _MEMORY):
        delattr(module, name)
    return is_ours


def forget_restored_forward(module: nn.Module) -> None:
    """Removes a forward that is the class's own, which is left by who records what a module gives and puts it back."""
    if _is_of_its_class(module, "forward"):
        del module.__dict__["forward"]


def _is_of_its_class(module: nn.Module, name: str) -> bool:
    own: Any = vars(module).get(name)
    return isinstance(own, MethodType) and own.__self__ is module and own.__func__ is getattr(type(module), name, None)


def by_original(swaps: Iterable[Swap]) -> dict[type[nn.Module], Swap]:
    """The swaps by the class that they replace."""
    return {swap.original: swap for swap in swaps}
