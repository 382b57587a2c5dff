"""Which parts of a model are known, and whether functions stand in it that its libraries did not write."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType
from typing import Any

from torch import nn

from fastformer.integrations.hugging_face import works_by_token
from fastformer.integrations.swap import is_swapped, original_class
from fastformer.nn.guards import is_written_in, watched_names

# Whose functions may stand on a module: they read no positions. (A wrapped forward is asked about by itself.)
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "fastformer")
_PARTS: set[type[nn.Module]] = set()


def know_parts(*kinds: type[nn.Module]) -> None:
    """Remembers classes of transformers' heads and poolers that read one position at a time, or the first one."""
    _PARTS.update(kinds)


def reads_one_position(part: nn.Module) -> bool:
    """Whether a part of a head, without what is inside of it, reads one position at a time, or the first one."""
    kind = original_class(part) if is_swapped(part) else type(part)
    if kind.__module__ == "peft.utils.other":  # which keeps copies of a part, and calls one of them
        return True
    return kind in _PARTS or (not kind.__module__.startswith("transformers.models.") and works_by_token(part))


def code_of(function: object) -> object:
    """What has the code of a function, or of an object that is called as one."""
    function = getattr(function, "__func__", function)
    has_code = hasattr(function, "__code__") or isinstance(function, BuiltinFunctionType)
    return function if has_code else vars(type(function)).get("__call__")


# Attributes that hold functions which are asked about elsewhere: when a model is called, when a loss is asked for.
_ASKED_ABOUT = frozenset({"forward", "_compiled_call_impl", "_loss_function"})


def own_function(module: nn.Module) -> str | None:
    """The name of a function, or of anything else to be called, that stands on a module and isn't its libraries'."""
    own = vars(module)
    libraries = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    for name in watched_names(own):
        value = own[name]
        while isinstance(value, functools.partial):
            value = value.func
        if not callable(value) or name in _ASKED_ABOUT:
            continue
        if isinstance(value, nn.Module) or not is_written_in(code_of(value), *libraries):
            return name
    return None


def replaced_function(sources: Iterable[tuple[dict[str, Any], dict[str, object]]]) -> str | None:
    """Which function of these modules of transformers (see `sources_of`) is another now, in words; None: none."""
    for space, functions in sources:
        for name, function in functions.items():
            if function is None or space.get(name) is not function:
                return f"{name} of {space['__name__']} was replaced"
    return None
