"""The decisions about a call, stored for later calls of the same geometry.

The backend of a call, its tile, its grid and the strides that a kernel receives follow from the shapes, strides, dtypes
and flags. At the sizes of a base model, these decisions take the host as long as the kernel takes the GPU. A plan is
the function that remains after the decisions: it allocates memory and launches kernels.

A plan holds no tensor and depends only on the properties of its arguments that `geometry` contains; of the rest, it
only passes pointers on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Plan = Callable[..., Any]
# The most geometries that are stored per op: more than a run with fixed shapes has, and few enough if none repeats.
LARGEST = 4096

_TENSORS = (Tensor, torch.nn.Parameter)
_VALUES = frozenset((type(None), bool, int, float, str, torch.dtype))
_all_plans: list[dict[Hashable, Plan]] = []


def geometry(args: tuple[Any, ...]) -> Hashable | None:
    """Returns the properties of an op's call on which a plan may depend; they are equal if two calls can share a plan.

    For a tensor, these are the dtype, sizes, strides and, because binaries differ by it, whether its address is a
    multiple of 16. All tensors of an op are on one device, so only the first one's is included. Returns None if an
    argument has another type.
    """
    key: list[Hashable] = [args[0].device, torch.are_deterministic_algorithms_enabled()]
    for argument in args:
        kind = type(argument)
        if kind in _TENSORS:
            key += (argument.dtype, argument.shape, argument.stride(), argument.data_ptr() % 16)
        elif kind in _VALUES:
            key.append(argument)
        elif kind is list:
            key.append(tuple(argument))
        else:
            return None
    return tuple(key)


def new_plans() -> dict[Hashable, Plan]:
    """Makes a dictionary for the plans of an op, with `geometry` as the key."""
    plans: dict[Hashable, Plan] = {}
    _all_plans.append(plans)
    return plans


def remember(plans: dict[Hashable, Plan], key: Hashable | None, plan: Plan) -> None:
    """Stores a plan for later calls. For calls without a key, nothing is stored."""
    if key is not None:
        if len(plans) >= LARGEST:
            plans.clear()
        plans[key] = plan


def planned(plan: Callable[..., Plan]) -> Plan:
    """Returns the launcher of an op: it plans a call, and runs it."""
    return lambda *args: plan(*args)(*args)


def forget() -> None:
    """Drops all plans, because a test replaced what they were made of."""
    for plans in _all_plans:
        plans.clear()
