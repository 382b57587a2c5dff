"""The decisions about a call, stored for later calls of the same geometry.

The backend of a call, its tile, its grid and the strides that a kernel receives follow from the shapes, strides, dtypes
and flags. At the sizes of a base model the host needs as long for these decisions as the GPU for the kernel. A plan is
the function of the arguments that remains after the decisions: it allocates and launches.

A plan holds no tensor, and reads only those facts of its arguments that `geometry` has: the rest are pointers to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Plan = Callable[..., Any]
# The most geometries of an op that are stored: more than a run of fixed shapes has, few enough if none repeats.
LARGEST = 4096

_TENSORS = (Tensor, torch.nn.Parameter)
_VALUES = frozenset((type(None), bool, int, float, str, torch.dtype))
_all_plans: list[dict[Hashable, Plan]] = []


def geometry(args: tuple[Any, ...]) -> Hashable | None:
    """Returns the facts about an op's call that a plan may depend on: equal for two calls that one plan serves.

    Of a tensor that is its dtype, sizes, strides and, since binaries differ by it, whether its address is a multiple of
    16; of all tensors the first one's device, since an op's are on one. None if an argument is of another kind.
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
    """Makes a dictionary for the plans of one op, by `geometry`."""
    plans: dict[Hashable, Plan] = {}
    _all_plans.append(plans)
    return plans


def remember(plans: dict[Hashable, Plan], key: Hashable | None, plan: Plan) -> None:
    """Stores a plan for the calls that follow; the decisions for a call without a key are made anew every time."""
    if key is not None:
        if len(plans) >= LARGEST:
            plans.clear()
        plans[key] = plan


def forget() -> None:
    """Drops all plans, since their basis has changed: a tile was measured, or a test replaced a part."""
    for plans in _all_plans:
        plans.clear()
