"""Small models of transformers, which take longer to make than to copy."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function make the model of each call once, and copy it: a test may change its own.

    The random numbers go on as after the model was made. A model is made anew while a test has replaced a class.
    """
    found: dict[str, tuple[Any, torch.Tensor, dict[str, dict[str, Any]]]] = {}

    @functools.wraps(make)
    def copied(*args: Any, **options: Any) -> Any:
        key = repr((args, options))
        if key not in found or not _is_as_now(found[key][2]):
            model = make(*args, **options)
            found[key] = model, torch.get_rng_state(), _names_of(model)
        model, state, _ = found[key]
        torch.set_rng_state(state)
        return copy.deepcopy(model)

    return copied


def _names_of(model: Any) -> dict[str, dict[str, Any]]:
    """Returns what the modules that a model's classes are of call by which name."""
    modules = {type(module).__module__ for module in model.modules()} | {"torch.nn"}
    return {name: dict(vars(sys.modules[name])) for name in modules}


def _is_as_now(names: dict[str, dict[str, Any]]) -> bool:
    return all(vars(sys.modules[of]).get(name) is value for of, each in names.items() for name, value in each.items())
