"""Are these modules still what they were when something was decided about them? A few flat comparisons of identities.

A decision about a tree of modules (what may be fused, what may be left out) walks the tree once. From then on it holds
for as long as the same modules stand in the same places, of the same classes, with the same forwards, functions and
hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat, starmap
from operator import is_, itemgetter
from types import MappingProxyType
from typing import Any

from torch import nn

# What of a module's settings says along which dimension it works, or how it is called.
_SETTINGS = frozenset(
    {
        *("dim", "normalized_shape", "num_parameters", "gradient_checkpointing", "forward", "_compiled_call_impl"),
        *("is_causal", "chunk_size_feed_forward", "position_embedding_type", "has_relative_attention_bias", "config"),
    }
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks_of = itemgetter(*_HOOKS)
_children_of = itemgetter("_modules")
# A forward of the owner's own is its caller's affair.
_OF_THE_OWNER_ALONE = frozenset({"forward", "_compiled_call_impl"})


class Guards:
    """What modules and their classes were when this was made.

    It keeps the modules inside of the owner alive, and not the owner: let the owner hold it.

    Args:
        owner: of which its class, its children and its attributes are watched. It may have hooks and a forward of its
            own.
        modules: inside of it. Each is watched by itself: give what is inside of it, too.
        functions: what else is watched, each by where it stands (the `vars` of a class or of a Python module) and its
            name.
    """

    def __init__(
        self, owner: nn.Module, modules: Iterable[nn.Module], functions: Iterable[tuple[Mapping[str, Any], str]] = ()
    ) -> None:
        self._modules = list(modules)
        self._own = list(map(vars, self._modules))
        self._owner_kind = type(owner)
        self._kinds = list(map(type, self._modules))
        # Not only what is in the dictionaries counts: people put others in their place.
        self._parents = [own for own in self._own if own["_modules"]]
        self._leaves = [own for own in self._own if not own["_modules"]]
        self._unhooked = [own for own in self._own if not any(_hooks_of(own))]
        self._hooked = [own for own in self._own if any(_hooks_of(own))]
        self._without_forward = [own for own in self._own if "forward" not in own]
        self._places = [(own, name) for own in self._own for name in watched_names(own)]
        self._owner_names = [name for name in watched_names(vars(owner)) if name not in _OF_THE_OWNER_ALONE]
        lines = (kind.__mro__ for kind in {*self._kinds, self._owner_kind})
        kinds = {kind for line in lines for kind in line} - {object}
        self._methods = [(vars(kind), name) for kind in kinds for name in ("forward", "__call__")]
        for space, name in functions:
            (self._places if isinstance(space, dict) else self._methods).append((space, name))  # type: ignore[arg-type]
        self._expected = self._now(owner)
        self._expected_sizes = self._sizes_now(owner)
        self._expected_hooks = list(map(list, chain.from_iterable(map(_hooks_of, self._hooked))))

    def hold(self, owner: nn.Module) -> bool:
        """Whether everything is as it was, of the owner and inside of it."""
        return (
            type(owner) is self._owner_kind
            and not any(chain.from_iterable(map(_hooks_of, self._unhooked)))
            and not any(map(_children_of, self._leaves))
            and not any(map(dict.__contains__, self._without_forward, repeat("forward")))
            and self._expected_sizes == self._sizes_now(owner)
            and all(map(is_, self._expected, self._now(owner)))
            and self._expected_hooks == list(map(list, chain.from_iterable(map(_hooks_of, self._hooked))))
        )

    def _sizes_now(self, owner: nn.Module) -> list[int]:
        parents = map(_children_of, self._parents)
        return [len(owner._modules), len(vars(owner)), *map(len, parents), *map(len, self._own)]

    def _now(self, owner: nn.Module) -> list[object]:
        """As many as before, where the sizes are the same."""
        children: list[dict[str, Any]] = [owner._modules, *map(_children_of, self._parents)]
        own = vars(owner)
        return [
            *map(type, self._modules),
            *chain.from_iterable(children),
            *chain.from_iterable(map(dict.values, children)),
            *starmap(dict.get, self._places),
            *map(own.get, self._owner_names),
            *starmap(MappingProxyType.get, self._methods),
        ]


def watched_names(own: dict[str, Any]) -> Iterator[str]:
    """The attributes in a module's dictionary that may change what a call of it does: functions, and room for some.

    A module that isn't there is None, in whose place people put functions.
    """
    for name, value in own.items():
        if name in _SETTINGS or (value is None and name[0] != "_") or (callable(value) and not isinstance(value, type)):
            yield name
