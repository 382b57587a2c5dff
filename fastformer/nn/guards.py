"""Are these modules still what they were when something was decided about them? One flat comparison of identities.

A decision about a tree of modules (what may be fused, what may be left out) walks the tree once. From then on it holds
for as long as the same modules stand in the same places, of the same classes, with the same forwards and hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import starmap
from operator import is_
from typing import Any, cast

from torch import nn

# What a module may have of its own that changes what a call of it does.
_OWN = ("forward", "_compiled_call_impl")
# What of torch.nn's modules says along which dimension they work.
_SETTINGS = ("dim", "normalized_shape", "num_parameters", "gradient_checkpointing")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Guards:
    """What modules and their classes were when this was made.

    It keeps the modules inside of the owner alive, and not the owner: keep it in a dictionary with weak keys.

    Args:
        owner: of which its class and its children are watched. It may have hooks and a forward of its own.
        modules: inside of it. Each is watched by itself: give what is inside of it, too.
    """

    def __init__(self, owner: nn.Module, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._owner_kind = type(owner)
        self._kinds = list(map(type, self._modules))
        self._places: list[tuple[dict[str, Any], str]] = []
        self._children: list[dict[str, Any]] = []
        # Hooks come and go, and the dictionaries that hold them stay. Most are empty.
        self._unhooked: list[dict[int, Any]] = []
        self._hooked: list[tuple[dict[int, Any], list[int]]] = []
        for module in (owner, *self._modules):
            children = cast(dict[str, Any], module._modules)
            self._places += [(children, name) for name in children]
            self._children.append(children)
        for module in self._modules:
            own = vars(module)
            self._places += [(own, name) for name in _OWN]
            self._places += [(own, name) for name in _SETTINGS if name in own]
            for hooks in map(own.__getitem__, _HOOKS):
                if hooks:
                    self._hooked.append((hooks, list(hooks)))
                else:
                    self._unhooked.append(hooks)
        self._expected = list(starmap(dict.get, self._places))
        self._num_children = list(map(len, self._children))
        lines = (kind.__mro__ for kind in {*self._kinds, self._owner_kind})
        self._classes = [vars(kind) for kind in {kind for line in lines for kind in line} - {nn.Module, object}]
        self._methods = self._methods_now()

    def hold(self, owner: nn.Module) -> bool:
        """Whether everything is as it was, of the owner and inside of it."""
        return (
            type(owner) is self._owner_kind
            and all(map(is_, self._expected, starmap(dict.get, self._places)))
            and not any(self._unhooked)
            and all(map(is_, self._kinds, map(type, self._modules)))
            and self._num_children == list(map(len, self._children))
            and all(map(is_, self._methods, self._methods_now()))
            and all(list(hooks) == keys for hooks, keys in self._hooked)
        )

    def _methods_now(self) -> list[object]:
        return [methods.get(name) for methods in self._classes for name in ("forward", "__call__")]
