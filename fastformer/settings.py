"""What the settings of a model or of a training may be: types and bounds, held where a dataclass of them is made.

A field says it by its annotation: `norm: Literal["layer", "rms"]`, `dropout: Annotated[float, Range(0, below=1)]`.
`check_settings` reads that, and so does the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

INT64_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a setting may be.

    Attributes:
        least: the smallest one.
        most: the largest one; None: no limit.
        below: an upper limit that itself is not allowed; None: no limit.
    """

    least: float
    most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            number >= self.least
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        if self.below is not None:
            return f"in [{self.least}, {self.below})"
        return f"of at least {self.least}" if self.most is None else f"in [{self.least}, {self.most}]"


Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Amount = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, below=1)]
Seed = Annotated[int, Range(0, most=INT64_MAX)]
# How sacreBLEU cuts text into words for BLEU. The last three need a model that stands in its folder already.
BleuTokenize = Literal[
    "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none", "flores101", "flores200", "spBLEU-1K"
]


def check_settings(settings: Any) -> None:
    """Holds every field of a dataclass against its annotation; whole numbers become floats where floats are asked for.

    Raises:
        ValueError: a value of another type, or out of bounds; the field is named.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        problem = why_not(value, hint)
        if problem is None and isinstance(value, int) and abs(value) > INT64_MAX:
            problem = "to be an integer of 64 bits"
        if problem:
            raise ValueError(f"expected {name} {problem}, got {value!r}{suggestion(value, choices(hint))}")
        if isinstance(value, int) and not isinstance(value, bool) and _float_alone(hint):
            setattr(settings, name, float(value))


def why_not(value: object, hint: Any) -> str | None:
    """What a value should have been ("to be an integer", "of at least 1"); None if it is fine."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        problems = [why_not(value, option) for option in get_args(hint)]
        if None in problems:
            return None
        # 0 for `Annotated[int, Range(1)] | None` is out of bounds rather than of another type.
        bounds = [problem for problem in problems if problem is not None and not problem.startswith("to be")]
        return bounds[0] if bounds else f"to be {describe(hint)}"
    if origin is Annotated:
        kind, *bounds = get_args(hint)
        problem = why_not(value, kind)
        if problem:
            return problem
        return next((str(bound) for bound in bounds if isinstance(bound, Range) and value not in bound), None)
    if origin is Literal:
        return None if value in get_args(hint) and not isinstance(value, bool) else f"to be {describe(hint)}"
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if number and math.isfinite(value) else "to be a number"  # type: ignore[arg-type]
    if hint is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "to be an integer"
    kind = origin or hint
    return None if hint is Any or isinstance(value, kind) else f"to be {describe(hint)}"


def describe(hint: Any) -> str:
    """What a type is called in a message: "an integer", "'relu' or 'gelu'", "a number or null"."""
    origin = get_origin(hint)
    if origin is Annotated:
        return describe(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(option) for option in get_args(hint)))
    if origin is Literal:
        *others, last = (repr(choice) for choice in get_args(hint))
        return f"{', '.join(others)} or {last}" if others else last
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    if hint is None or hint is type(None):
        return "null"
    return names.get(origin or hint, getattr(hint, "__name__", str(hint)))


def describe_bounds(hint: Any) -> str:
    """As `describe`, with the numbers that are allowed: "an integer of at least 1 or null"."""
    if get_origin(hint) is Annotated:
        return " ".join([describe(hint), *(str(bound) for bound in get_args(hint)[1:] if isinstance(bound, Range))])
    if get_origin(hint) not in (Union, types.UnionType):
        return describe(hint)
    kinds = dict.fromkeys(describe_bounds(option) for option in get_args(hint))
    # "an integer of at least 1" of one architecture says enough of "an integer" of another.
    return " or ".join(kind for kind in kinds if not any(other.startswith(f"{kind} ") for other in kinds))


def choices(hint: Any) -> list[str]:
    """The words that a type allows; empty where it is no choice."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [word for option in get_args(hint) for word in choices(option)]


def suggestion(word: object, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest known word, or nothing, as for a number in place of a word."""
    near = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _float_alone(hint: Any) -> bool:
    kinds = [_plain(option) for option in get_args(hint)] if get_origin(hint) in (Union, types.UnionType) else []
    return float in (kinds or [_plain(hint)]) and int not in kinds


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint
