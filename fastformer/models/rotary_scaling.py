"""Rotary positions beyond the lengths that a model was first trained on: the angular speeds of each method.

A pair i of the rotated features turns by position * base^(-2i / rotary_dim), its plain speed; a method slows pairs
down, and may lengthen queries and keys. The names of the parameters are those of transformers' `rope_parameters`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor

from fastformer.settings import shown, suggestion

Kind = Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
_LENGTH = "original_max_position_embeddings"
_PART = "partial_rotary_factor"
_FACTORS = ("short_factor", "long_factor")
# The required and the optional parameters of each kind.
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor", _LENGTH), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _LENGTH), ()),
    "yarn": (
        ("factor", _LENGTH),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ((*_FACTORS, _LENGTH), ("factor", "attention_factor")),
    "proportional": ((_PART,), ("factor",)),
}


def as_scaling(name: str, value: Any) -> RotaryScaling | None:
    """Converts the setting of a model."""
    return value if value is None or isinstance(value, RotaryScaling) else RotaryScaling(value)


class RotarySpeeds(NamedTuple):
    """The parameters of tables of cosines and sines.

    Attributes:
        speeds: (rotary_dim // 2,) fp64, radians per position; None: those of the base.
        scale: cosines and sines are multiplied by this, so that scores grow by its square.
    """

    speeds: Tensor | None
    scale: float = 1.0


class RotaryScaling(dict[str, Any]):
    """The method and its parameters, checked: a mapping that does not change, with lists as tuples.

    Args:
        values: `kind`, one of "linear", "dynamic", "llama3", "yarn", "longrope" and "proportional", and the parameters
            of that kind under transformers' names. "longrope" needs `factor` or `attention_factor`: transformers
            derives the factor from max_position_embeddings / original_max_position_embeddings if it isn't given.

    Raises:
        ValueError: an unknown kind or parameter, one that is missing, or a value that is not allowed.
    """

    def __init__(self, values: Mapping[str, Any] | Iterator[tuple[str, Any]]) -> None:
        if not isinstance(values, Mapping | Iterator):
            raise ValueError(f"expected rotary_scaling to be a mapping with a kind, got {shown(values)}")
        values = dict(values)  # `dataclasses.asdict` gives pairs
        kind = values.get("kind")
        if not isinstance(kind, str) or kind not in _PARAMETERS:
            kinds = ", ".join(map(repr, get_args(Kind)))
            raise ValueError(
                f"expected a kind of rotary_scaling in {kinds}, got {shown(kind)}{suggestion(kind, _PARAMETERS)}"
            )
        needed, optional = _PARAMETERS[kind]
        for name in values:
            if name not in ("kind", *needed, *optional):
                hint = suggestion(name, (*needed, *optional))
                raise ValueError(f"rotary_scaling of kind {kind!r} has no parameter {name!r}{hint}")
        # Parameters that are null are ignored, as in transformers.
        parameters = {name: _checked(name, value) for name, value in values.items() if value is not None}
        for name in needed:
            if name not in parameters:
                raise ValueError(f"expected rotary_scaling of kind {kind!r} to have a {name}, got {dict(values)}")
        if kind == "longrope" and not {"factor", "attention_factor"} & parameters.keys():
            raise ValueError(
                "expected rotary_scaling of kind 'longrope' to have a factor (max_position_embeddings / "
                f"{_LENGTH}) or an attention_factor, got {sorted(parameters)}"
            )
        if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
            raise ValueError(
                f"expected a low_freq_factor below the high_freq_factor of rotary_scaling, got "
                f"{parameters['low_freq_factor']} and {parameters['high_freq_factor']}"
            )
        super().__init__(parameters)

    def check(self, rotary_dim: int, base: float, max_len: int) -> None:
        """Checks the parameters against a model's sizes.

        Raises:
            ValueError: factors for another number of pairs; a base of 1 for "yarn", which distinguishes pairs by
                their number of turns, while all pairs of that base turn alike; sequences so long that the speeds would
                change as a sequence grows, so that a token's keys would depend on the length of its batch.
        """
        kind = self["kind"]
        for name in _FACTORS:
            if name in self and len(self[name]) != rotary_dim // 2:
                raise ValueError(
                    f"expected {rotary_dim // 2} numbers in {name} of rotary_scaling, one for each pair of the "
                    f"{rotary_dim} rotated features, got {len(self[name])}"
                )
        if self.get(_PART, 1.0) > 1:
            raise ValueError(f"expected {_PART} of rotary_scaling of at most 1, got {self[_PART]}")
        if kind == "yarn" and base == 1:
            raise ValueError(f"expected a rotary_base above 1 for rotary_scaling of kind {kind!r}, got {base}")
        if kind in ("dynamic", "longrope") and max_len > self[_LENGTH]:
            raise ValueError(
                f"expected max_len of at most {_LENGTH} = {self[_LENGTH]} for rotary_scaling of kind {kind!r}, got "
                f"{max_len}: beyond that length the frequencies change when the longest sequence of a batch grows, and "
                "keys in a cache were turned by the old ones"
            )

    def speeds(self, rotary_dim: int, base: float) -> RotarySpeeds:
        """Computes the speeds for sequences of the lengths that `check` allows.

        "linear": Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation".
        "dynamic": the plain speeds, up to original_max_position_embeddings (the NTK-aware base changes beyond).
        "llama3": Llama 3.1: pairs that turn fewer than low_freq_factor times in the original length are slowed down by
        the factor, those that turn more than high_freq_factor times keep their speed, between them it is interpolated.
        "yarn": Peng et al. 2023, "YaRN", section 3.2 and 3.4: the same idea by a ramp over the pairs' indices from
        beta_fast to beta_slow turns, and longer queries and keys. "longrope": Ding et al. 2024, "LongRoPE": a factor
        for each pair, the short ones up to original_max_position_embeddings. "proportional": the first pairs, a
        partial_rotary_factor of all, keep their speed, divided by the factor; the others don't turn (Gemma 4).
        """
        plain = plain_speeds(rotary_dim, base)
        kind = self["kind"]
        if kind == "linear":
            return RotarySpeeds(plain / self["factor"])
        if kind == "dynamic":
            return RotarySpeeds(plain)
        if kind == "llama3":
            low, high = self["low_freq_factor"], self["high_freq_factor"]
            turns = self[_LENGTH] * plain / (2 * math.pi)
            weight = ((turns - low) / (high - low)).clamp(0, 1)
            return RotarySpeeds(plain * (weight + (1 - weight) / self["factor"]))
        if kind == "proportional":
            turning = torch.arange(rotary_dim // 2) < self.num_turning(rotary_dim)
            return RotarySpeeds((plain / self.get("factor", 1.0)).where(turning, 0.0))
        if kind == "yarn":
            return RotarySpeeds(self._yarn(plain, rotary_dim, base), self._yarn_scale())
        scale = self.get("attention_factor")
        if scale is None:
            factor = self["factor"]
            scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self[_LENGTH]))
        return RotarySpeeds(plain / torch.tensor(self["short_factor"], dtype=torch.float64), float(scale))

    def num_turning(self, rotary_dim: int) -> int:
        """Returns the number of pairs that turn."""
        return int(self.get(_PART, 1.0) * rotary_dim // 2)

    def _yarn(self, plain: Tensor, rotary_dim: int, base: float) -> Tensor:
        def pair_of(turns: float) -> float:
            """Returns the pair, as a real number, that makes a number of turns in the original length."""
            return rotary_dim * math.log(self[_LENGTH] / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair_of(self.get("beta_fast", 32.0)), pair_of(self.get("beta_slow", 1.0))
        if self.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        pairs = torch.arange(rotary_dim // 2, dtype=torch.float64)
        slowed = ((pairs - first) / (last - first if last != first else 0.001)).clamp(0, 1)
        return plain * (1 - slowed + slowed / self["factor"])

    def _yarn_scale(self) -> float:
        if "attention_factor" in self:
            return float(self["attention_factor"])

        def length(weight: float) -> float:
            return 1.0 if self["factor"] <= 1 else 0.1 * weight * math.log(self["factor"]) + 1.0

        if self.get("mscale") and self.get("mscale_all_dim"):
            return length(self["mscale"]) / length(self["mscale_all_dim"])
        return length(1.0)

    # A config is part of the key of a cache of models.
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def _unchangeable(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("rotary_scaling can't be changed: make another GPTConfig")

    __setitem__ = __delitem__ = __ior__ = _unchangeable
    clear = pop = popitem = setdefault = update = _unchangeable


_MOST_FEATURES = 2**20


def plain_speeds(rotary_dim: int, base: float) -> Tensor:
    """Returns base^(-2i / rotary_dim), (rotary_dim // 2,) fp64: Su et al. 2021, "RoFormer", section 3.2.2.

    Raises:
        ValueError: more features than any head has, which would take gigabytes.
    """
    if rotary_dim > _MOST_FEATURES:
        raise ValueError(f"expected a head with at most {_MOST_FEATURES} rotated features, got {rotary_dim}")
    return torch.exp(-math.log(base) * torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)


def _checked(name: str, value: Any) -> Any:
    """Returns the stored form of a parameter.

    Raises:
        ValueError: the value is not allowed.
    """
    if name == "kind":
        return value
    if name == "truncate":
        if isinstance(value, bool):
            return value
        raise ValueError(f"expected truncate of rotary_scaling to be true or false, got {shown(value)}")
    if name in _FACTORS:
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise ValueError(f"expected {name} of rotary_scaling to be a list of numbers, got {shown(value)}")
        return tuple(_number(name, item) for item in value)
    if name == _LENGTH:
        if isinstance(value, int) and not isinstance(value, bool) and 1 < value < 2**63:
            return value
        raise ValueError(f"expected {name} of rotary_scaling to be an integer of 2 to 2^63 - 1, got {shown(value)}")
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    # Compared, for math.isfinite takes no integer of hundreds of digits.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not is_number or (value <= 0 and not name.startswith("mscale")):
        raise ValueError(f"expected {name} of rotary_scaling to be a number above 0, got {shown(value)}")
    return float(value)
