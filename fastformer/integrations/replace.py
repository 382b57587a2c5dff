"""Changes the class of accelerated modules in place, and restores their own class.

Parameters, buffers, submodules and hooks don't move, and neither does the object that optimizers, wrappers and the
parent module know. The new class is also derived from the old one, so `isinstance` answers as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

# The name of the attribute that holds an accelerated module's `_Memory`.
_MEMORY = "_fastformer_swapped"
_LIBRARIES = ("torch", "transformers", "sentence_transformers")


class _Memory(NamedTuple):
    original: type[nn.Module]
    replacement: type[nn.Module]
    added: tuple[str, ...]
    had: frozenset[str]  # the names in its __dict__


@dataclass(frozen=True)
class Replacement:
    """A class that modules of another class can have in its place.

    Attributes:
        original: the exact class to replace; a subclass of it may compute something else.
        replacement: the class derived from fastformer's and from `original`.
        attributes: (module) -> the attributes that `replacement` needs and `original` doesn't have.
        why_not: (module) -> why this module can't have the class, or None.
    """

    original: type[nn.Module]
    replacement: type[nn.Module]
    attributes: Callable[[Any], dict[str, Any]] = lambda module: {}
    why_not: Callable[[Any], str | None] = lambda module: None


def by_original(replacements: Iterable[Replacement]) -> dict[type[nn.Module], Replacement]:
    """Returns replacements by the class that they replace."""
    return {each.original: each for each in replacements}


def why_left(module: nn.Module, known: dict[type[nn.Module], Replacement]) -> str | None:
    """Returns why a module that resembles a known one isn't accelerated; None if it can be, or resembles none."""
    replacement = known.get(type(module))
    if replacement is not None:
        if "forward" in module.__dict__:
            return "it has its own forward"
        kind = replacement.original
        if kind.__module__.partition(".")[0] not in _LIBRARIES:  # a class of yours under another's name
            return f"{kind.__name__}.forward was replaced"
        for name in (*replacement.attributes(module), _MEMORY):
            if hasattr(module, name):
                return f"it has an attribute {name} already"
        return replacement.why_not(module)
    if is_accelerated(module):
        return None
    for original in known:
        if isinstance(module, original):
            return f"{type(module).__name__} is a subclass of {original.__name__}, and may compute something else"
    return None


def is_accelerated(module: nn.Module) -> bool:
    """Returns whether `replace_class` gave a module its class."""
    return isinstance(module.__dict__.get(_MEMORY), _Memory)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module has after it is restored."""
    memory = module.__dict__.get(_MEMORY)
    return memory.original if isinstance(memory, _Memory) else type(module)


def replace_class(module: nn.Module, by: Replacement) -> None:
    """Gives a module the class of its replacement."""
    added, had = by.attributes(module), frozenset(vars(module))
    for name, value in added.items():
        setattr(module, name, value)
    setattr(module, _MEMORY, _Memory(type(module), by.replacement, tuple(added), had))
    module.__class__ = by.replacement


def is_derived(module: nn.Module) -> bool:
    """Returns whether a module's class was later derived from fastformer's, as by FSDP2: it can't be restored here."""
    replacement = getattr(module, _MEMORY).replacement
    return type(module) is not replacement and isinstance(module, replacement)


def has_own_class(module: nn.Module) -> bool:
    """Returns whether an accelerated module has a class that is neither its original one nor the replacement."""
    memory = module.__dict__.get(_MEMORY)
    return isinstance(memory, _Memory) and type(module) not in (memory.original, memory.replacement)


def own_methods(module: nn.Module) -> list[str]:
    """Returns the methods of fastformer's class that an accelerated module itself overrides, and that may call it.

    A method from before `accelerate` never calls fastformer's class, and neither does the original's own method.
    """
    memory: _Memory = getattr(module, _MEMORY)
    return [
        name
        for name in vars(module).keys() - memory.had - {_MEMORY, *memory.added}
        if callable(ours := getattr(memory.replacement, name, None))
        and getattr(memory.original, name, None) not in (ours, getattr(vars(module)[name], "__func__", None))
        and not _is_of_its_class(module, name)
    ]


def restore_class(module: nn.Module) -> bool:
    """Gives an accelerated module its class and attributes back; False if it has a third class, which it keeps."""
    memory: _Memory = getattr(module, _MEMORY)
    is_ours = type(module) is memory.replacement
    if is_ours:
        for name in [each for each in vars(module).keys() - memory.had if _is_of_its_class(module, each)]:
            del module.__dict__[name]
        module.__class__ = memory.original
    for name in (*memory.added, _MEMORY):
        delattr(module, name)
    return is_ours


def forget_restored_forwards(modules: Iterable[nn.Module]) -> None:
    """Removes a forward from each module's attributes if it is the same as its class's forward.

    Code that patches a module's forward for a while leaves this attribute on the module, as the exporters of
    transformers do.
    """
    for module in modules:
        if "forward" in vars(module) and _is_of_its_class(module, "forward"):
            del module.__dict__["forward"]


def _is_of_its_class(module: nn.Module, name: str) -> bool:
    own: Any = vars(module).get(name)
    return isinstance(own, MethodType) and own.__self__ is module and own.__func__ is getattr(type(module), name, None)
