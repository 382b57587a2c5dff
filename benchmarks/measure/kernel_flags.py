"""Kernels that are off by default, switched on for a while, and a count of what of them was launched.

What an op decided for a geometry is kept (`_plans`), the kernels that it chose included: a switch alone changes nothing
for a call that has been met before. So all of that is forgotten at both ends, and what is measured in between counts as
theirs only where they were launched.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

FWD, BWD = "_attention_hopper_fwd_kernel", "_attention_hopper_bwd_kernel"


class Switch(NamedTuple):
    """Some kernels that are off by default.

    Attributes:
        name: what measurements with them are labelled with.
        place: (module of fastformer.kernels, its variable that is true where they are on).
        launcher: the module of fastformer.kernels whose `launch` launches them.
        is_one: (options of a launch) -> whether it is one of theirs.
        expected: (shape, mode) -> which of them a benchmark's case launches, each once a call; none: what is timed in
            that mode has none of them.
    """

    name: str
    place: tuple[str, str]
    launcher: str
    is_one: Callable[[Mapping[str, Any]], bool]
    expected: Callable[[Mapping[str, Any], str], frozenset[str]]


def _of_attention(shape: Mapping[str, Any], mode: str) -> frozenset[str]:
    from fastformer.kernels._attention_hopper import BACKWARD_BLOCK_DS

    backward = {BWD} if shape["head_dim"] in BACKWARD_BLOCK_DS else set()
    return frozenset({"fwd": {FWD}, "bwd": backward, "fwdbwd": {FWD} | backward}[mode])


def _of_feed_forward(shape: Mapping[str, Any], mode: str) -> frozenset[str]:
    return frozenset({"_linear_activation_kernel"} if mode.startswith("fwd") else ())


HOPPER = Switch(
    "attention_hopper", ("_attention_hopper", "ENABLED"), "_attention_hopper", lambda options: True, _of_attention
)
PERSISTENT = Switch(
    "persistent feed_forward", ("_feed_forward_configs", "PERSISTENT"), "feed_forward",
    lambda options: bool(options.get("PERSISTENT")), _of_feed_forward,
)  # fmt: skip


@contextlib.contextmanager
def switched_on(switch: Switch) -> Iterator[Counter[str]]:
    """In the block the kernels are on. Gives how often each of them was launched there, by name."""
    from fastformer.kernels import _plans

    flags, flag = _module(switch.place[0]), switch.place[1]
    launcher = _module(switch.launcher)
    launched: Counter[str] = Counter()
    launch = launcher.launch

    def counted(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> object:
        if switch.is_one(options):
            launched[kernel.fn.__name__] += 1
        return launch(kernel, grid, *args, **options)

    _plans.forget()
    try:
        with mock.patch.object(flags, flag, True), mock.patch.object(launcher, "launch", counted):
            yield launched
    finally:
        _plans.forget()


def not_theirs(expected: frozenset[str], launched: Mapping[str, int], turns: int) -> str | None:
    """Why so many turns weren't those of the expected kernels; None where each launched all of them."""
    lacking = [
        f"{launched.get(name, 0)} launches of {name}"
        for name in sorted(expected)
        if launched.get(name, 0) < max(1, turns)
    ]
    return f"{', '.join(lacking)} in {turns} turns" if lacking else None


def _module(name: str) -> Any:
    return importlib.import_module(f"fastformer.kernels.{name}")
