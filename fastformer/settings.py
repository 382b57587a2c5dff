"""Dataclasses of settings: their fields define types, bounds and defaults, which are checked for every new object.

A field's annotation defines the allowed values: `norm: Literal["layer", "rms"]`, `dropout: Annotated[float, Range(0,
below=1)]`. `check_settings` reads that, and so do the command line and the YAML files.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

INT64_MAX = 2**63 - 1
LEAST_WEIGHT = 0.001  # of a corpus; the greatest one is its inverse


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a setting may be.

    Attributes:
        least: the smallest one; None: no limit.
        most: the largest one; None: no limit.
        below: an upper limit that itself is not allowed; None: no limit.
        above: a lower limit that itself is not allowed; None: no limit.
    """

    least: float | None = None
    most: float | None = None
    below: float | None = None
    above: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
            and (self.above is None or number > self.above)
        )

    def __str__(self) -> str:
        lower = f"({self.above}" if self.least is None else f"[{self.least}"
        if self.below is not None:
            return f"in {lower}, {self.below})"
        if self.most is not None:
            return f"in {lower}, {self.most}]"
        return f"above {self.above}" if self.least is None else f"of at least {self.least}"


@dataclasses.dataclass(frozen=True)
class Convert:
    """A part of an annotation that converts a value into the stored form, in place of the usual check.

    Attributes:
        convert: a function of the setting's name and the value; raises a ValueError that names the setting.
    """

    convert: Callable[[str, Any], Any]


Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Amount = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, below=1)]
Seed = Annotated[int, Range(0, most=INT64_MAX)]
# The ways in which sacreBLEU tokenizes text for BLEU. The last three need a model in sacreBLEU's folder.
BleuTokenize = Literal[
    "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none", "flores101", "flores200", "spBLEU-1K"
]


class _Field(NamedTuple):
    """The facts about a field that its class determines.

    Attributes:
        default: a value that needs no check; `_Field` itself if there is none.
        usual: the bounds of values by type, for types that need no other check; None: any value of the type fits.
        convert: converts the value; None: `why_not` checks it.
    """

    name: str
    hint: Any
    default: object
    usual: dict[type, Range | None]
    convert: Callable[[str, Any], Any] | None


def check_settings(settings: Any, names: Collection[str] | None = None) -> bool:
    """Checks the fields of a dataclass against their annotations.

    Integers become floats in a field of floats, and integer scalars (NumPy's, a tensor of one) become ints.

    Args:
        settings: the dataclass.
        names: the fields to check; None: all of them.

    Returns:
        Whether any of them differs from its default.

    Raises:
        ValueError: a value has another type or is out of bounds; the message names the field.
    """
    values, is_changed = vars(settings), False
    for field in _fields(settings.__class__):
        if names is not None and field.name not in names:
            continue
        value = values[field.name]
        if value is field.default:
            continue
        is_changed = True
        if type(value) in field.usual:
            bounds = field.usual[type(value)]
            if bounds is None or (-INT64_MAX <= value <= INT64_MAX and value in bounds):
                continue
        checked = _checked(field, value)
        if checked is not value:
            object.__setattr__(settings, field.name, checked)  # works for a frozen dataclass too
    return is_changed


@functools.cache
def _fields(cls: type) -> tuple[_Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    result = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        convert = next((extra.convert for extra in extras if isinstance(extra, Convert)), None)
        usual: dict[type, Range | None] = {}
        for option in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
            extras = get_args(option)[1:] if get_origin(option) is Annotated else ()
            bounds = [extra for extra in extras if isinstance(extra, Range)]
            if _plain(option) in (int, float) and len(bounds) == 1:
                usual[_plain(option)] = bounds[0]
            elif option in (bool, str, type(None)):
                usual[option] = None
        needs_float = _float_alone(hint) and isinstance(field.default, int)
        default = _Field if field.default is dataclasses.MISSING or needs_float else field.default
        result.append(_Field(field.name, hint, default, {} if convert else usual, convert))
    return tuple(result)


def _checked(field: _Field, value: Any) -> Any:
    """Returns the value of a field in its stored form.

    Raises:
        ValueError: the value doesn't fit the field.
    """
    name, hint = field.name, field.hint
    if field.convert is not None:
        return field.convert(name, value)
    becomes_float = _float_alone(hint)
    if (becomes_float or int in _kinds(hint)) and not isinstance(value, int | float | str):
        value = as_integer(value)
    problem = why_not(value, hint)
    is_long = isinstance(value, int) and abs(value) > INT64_MAX and not becomes_float
    if problem is None and is_long and not _has_most(hint):
        problem = "to be an integer of 64 bits"
    if problem:
        raise ValueError(f"expected {name} {problem}, got {shown(value)}{suggestion(value, choices(hint))}")
    return float(value) if becomes_float and isinstance(value, int) and not isinstance(value, bool) else value


def shown(value: object) -> str:
    """Formats a value for an error message, cut if it is long."""
    return repr(value) if isinstance(value, str) else f"{value!r:.80}"


def as_integer(value: Any) -> Any:
    """Converts an object that stands for an int, such as a scalar of NumPy or of a tensor; returns others unchanged."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    try:  # an array has __index__ too, and may hold a float or several numbers
        return operator.index(value)
    except TypeError:
        return value


def as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """Converts a list, or another iterable, to a tuple.

    Raises:
        ValueError: a text, a mapping, or something that can't be iterated over; the message names the setting.
    """
    error = ValueError(f"expected {name} to be a list, got {values!r:.60}")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise error
    try:
        return tuple(values)
    except TypeError:  # tensors and arrays are Iterables, but those without dimensions can't be iterated over
        raise error from None


def as_ids(name: str, values: Any) -> tuple[int, ...]:
    """Converts ids to a tuple.

    Raises:
        ValueError: something else than integers; the message names the setting.
    """
    ids = tuple(map(as_integer, as_tuple(name, values)))
    for value in ids:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"expected {name} to hold integers, got {value!r:.60}")
    return ids


def why_not(value: object, hint: Any) -> str | None:
    """Returns the expected kind of a value ("to be an integer", "of at least 1"); None if the value fits."""
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
        is_known = any(isinstance(value, type(choice)) and value == choice for choice in get_args(hint))
        return None if is_known and not isinstance(value, bool) else f"to be {describe(hint)}"
    if hint is float:
        return None if _is_finite(value) else "to be a number"
    if hint is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "to be an integer"
    kind = origin or hint
    return None if hint is Any or isinstance(value, kind) else f"to be {describe(hint)}"


def check_value(name: str, value: object, hint: Any) -> None:
    """Checks one value, such as an argument, as `check_settings` does the fields of a dataclass.

    Raises:
        ValueError: the value doesn't fit the type or the bounds; the message names it.
    """
    if problem := why_not(value, hint):
        raise ValueError(f"expected {name} {problem}, got {shown(value)}")


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def describe(hint: Any) -> str:
    """Describes a type in a message: "an integer", "'relu' or 'gelu'", "a number or null"."""
    origin = get_origin(hint)
    if origin is Annotated:
        return describe(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(option) for option in get_args(hint)))
    if origin is Literal:
        *others, last = (repr(choice) for choice in get_args(hint))
        return f"{', '.join(others)} or {last}" if others else last
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict: "a mapping",
        tuple: "a list",
    }
    if hint is None or hint is type(None):
        return "null"
    return names.get(origin or hint, getattr(hint, "__name__", str(hint)))


def describe_bounds(hint: Any) -> str:
    """Describes a type as `describe` does, with its bounds: "an integer of at least 1 or null"."""
    if get_origin(hint) is Annotated:
        bounds = [bound for bound in get_args(hint)[1:] if isinstance(bound, Range)]
        # The bounds of a 64-bit integer are of no use to a reader.
        return " ".join([describe(hint), *(str(bound) for bound in bounds if (bound.most or 0) <= INT64_MAX)])
    if get_origin(hint) not in (Union, types.UnionType):
        return describe(hint)
    kinds = dict.fromkeys(describe_bounds(option) for option in get_args(hint))
    # "an integer of at least 1" of one architecture includes "an integer" of another.
    return " or ".join(kind for kind in kinds if not any(other.startswith(f"{kind} ") for other in kinds))


def choices(hint: Any) -> list[str]:
    """Returns the words that a type allows; empty if it is not a choice of words."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [word for option in get_args(hint) for word in choices(option)]


def suggestion(word: object, choices: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the nearest known word, or an empty text, as for a number."""
    near = difflib.get_close_matches(word, list(choices), n=1) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _kinds(hint: Any) -> list[Any]:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [_plain(option) for option in options]


def _float_alone(hint: Any) -> bool:
    kinds = _kinds(hint)
    return float in kinds and int not in kinds


def _has_most(hint: Any) -> bool:
    """Returns whether an annotation sets a largest value."""
    if get_origin(hint) is Annotated:
        return any(isinstance(extra, Range) and extra.most is not None for extra in get_args(hint)[1:])
    return any(map(_has_most, get_args(hint)))


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def shows_fields(settings: type[Any], names: Iterable[str] | None = None) -> Callable[[T], T]:
    """Returns a decorator that shows fields of a dataclass in a function's signature, before its **options.

    Args:
        settings: the dataclass. Its docstring or the function's documents the fields.
        names: the fields to show; None: all of them.
    """

    def decorate(function: T) -> T:
        signature = inspect.signature(function)  # type: ignore[arg-type]
        *named, options = signature.parameters.values()
        shown = [
            options.replace(name=field.name, kind=options.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in dataclasses.fields(settings)
            if names is None or field.name in names
        ]
        shown_signature = signature.replace(parameters=[*named, *shown, options])
        function.__signature__ = shown_signature  # type: ignore[attr-defined]
        return function

    return decorate
