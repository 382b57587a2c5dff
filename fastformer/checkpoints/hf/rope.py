"""Rotary positions in the settings of transformers' models, in the formats of its versions.

rope_theta, rope_scaling, partial_rotary_factor      settings like the others (v4); GPT-NeoX has other names
rope_parameters                                      a mapping with all of them, or one for each kind of layer (v5)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastformer.models import BERTConfig, GPTConfig
from fastformer.models.rotary_scaling import RotaryScaling

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
ROPE_NAMES = ("rope_theta", "partial_rotary_factor")
LENGTH = "original_max_position_embeddings"
_NAMES = ("type", "rope_type", *ROPE_NAMES)


def read_rope(
    settings: Mapping[str, Any],
    *,
    layers: str,
    base: float,
    fraction: float = 1.0,
    names: tuple[str, str] = ROPE_NAMES,
    is_nested: bool = False,
) -> dict[str, Any]:
    """Returns the options of `GPTConfig` for rotary positions: rotary_base, rotary_fraction, rotary_scaling.

    Fraction and scaling are omitted if they have their defaults.

    Args:
        settings: the settings of a model.
        layers: the kind of layers to read, since each kind may have parameters of its own.
        base, fraction: the values if the settings don't contain them.
        names: the names of both beside the other settings.
        is_nested: ignore parameters that aren't given for this kind of layers.

    Raises:
        ValueError: an unknown kind of scaling, or a value that isn't a number or is out of bounds.
    """
    rope = parameters_of(settings, layers, is_nested)
    theta, part = (
        next((value for value in (rope.get(name), settings.get(beside)) if value is not None), usual)
        for name, beside, usual in zip(ROPE_NAMES, names, (base, fraction), strict=True)
    )
    if not _number("rope_theta", theta) >= 1:
        raise ValueError(f"expected rope_theta of at least 1, got {theta!r:.60}")
    # Before a family orders the rows of its heads by it.
    if not 0 < _number("partial_rotary_factor", part) <= 1:
        raise ValueError(f"expected partial_rotary_factor in (0, 1], got {part!r:.60}")
    options: dict[str, Any] = {"rotary_base": theta}
    if part != 1.0:
        options["rotary_fraction"] = part
    kind = kind_of(rope)
    if "short_factor" in rope and kind in ("su", "yarn"):  # Phi-3's first names for it
        kind = "longrope"
    if kind not in KINDS:
        raise ValueError(f"expected a rope_type in {KINDS}, got {kind!r}")
    if kind == "default":
        return options
    if kind == "proportional":  # which rotates whole heads, most pairs by 0
        scaling = {"partial_rotary_factor": part, **{name: rope[name] for name in ("factor",) if name in rope}}
        return {"rotary_base": options["rotary_base"], "rotary_scaling": {"kind": kind, **scaling}}
    limit = settings.get("max_position_embeddings")
    scaling = {name: value for name, value in rope.items() if name not in _NAMES and value is not None}
    if kind == "linear":
        scaling.pop(LENGTH, None)
    elif kind == "dynamic":  # the scaling grows from this length on
        scaling[LENGTH] = limit
    elif settings.get(LENGTH) is not None:  # Phi-3's, which has priority
        scaling[LENGTH] = settings[LENGTH]
    else:
        scaling.setdefault(LENGTH, limit)
    if kind in ("yarn", "longrope") and "factor" not in scaling:
        if (before := _number(LENGTH, scaling[LENGTH])) < 2:
            raise ValueError(f"expected {LENGTH} of at least 2, got {before}")
        scaling["factor"] = _number("max_position_embeddings", limit) / before
    return {**options, "rotary_scaling": {"kind": kind, **scaling}}


def read_whole_rope(settings: Mapping[str, Any], *, base: float) -> dict[str, Any]:
    """Returns the options of `BERTConfig` for rotary positions, as `read_rope` does.

    Raises:
        ValueError: only a part of each head is rotated; or see `read_rope`.
    """
    rope = read_rope(settings, layers="full_attention", base=base)
    if (part := rope.get("rotary_fraction", 1.0)) != 1.0:
        raise ValueError(f"expected a model that rotates whole heads, got a partial_rotary_factor of {part}")
    return rope


def longest(settings: Mapping[str, Any], options: Mapping[str, Any], *, grows: bool) -> int:
    """Returns the number of positions that a model has.

    With some kinds of scaling, the settings may contain the number of positions before the scaling. Other kinds
    ("dynamic", "longrope") change the angles of all tokens once a sequence exceeds the original length, which a KV
    cache can't follow: such a model ends at the original length.

    Args:
        settings: the settings of the model.
        options: the result of `read_rope` for them.
        grows: whether max_position_embeddings may be the number before the scaling.

    Raises:
        ValueError: max_position_embeddings is not an integer of at least 1.
    """
    max_positions = settings.get("max_position_embeddings")
    if not isinstance(max_positions, int) or isinstance(max_positions, bool) or max_positions < 1:
        raise ValueError(f"expected max_position_embeddings to be an integer of at least 1, got {max_positions!r:.60}")
    scaling = options.get("rotary_scaling") or {}
    kind, before = scaling.get("kind"), scaling.get(LENGTH, max_positions)
    if kind in ("dynamic", "longrope"):
        return min(max_positions, before)
    if not grows or kind not in ("linear", "yarn"):
        return max_positions
    return max(max_positions, int(before * _number("factor", scaling.get("factor"))))


def original_length(settings: Mapping[str, Any]) -> int | None:
    """Returns the length beyond which a model with "longrope" rotates all tokens by its long factors.

    Args:
        settings: the settings of the model.

    Returns:
        The length; None if the model has no "longrope", has it in some layers only, or has no positions beyond.

    Raises:
        ValueError: see `read_rope`.
    """
    if not any("long_factor" in (settings.get(name) or {}) for name in ("rope_scaling", "rope_parameters")):
        return None
    if not settings.get("rope_parameters") and settings.get(LENGTH) is None:
        return None  # version 4 looks for it beside the other settings alone
    scaling = read_rope(settings, layers="full_attention", base=1e4).get("rotary_scaling") or {}
    limit = settings.get("max_position_embeddings")
    if scaling.get("kind") != "longrope" or not isinstance(limit, int) or limit <= scaling[LENGTH]:
        return None
    return int(scaling[LENGTH])


def beyond_original(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a model that computes any length as the given one does beyond its `original_length`.

    Args:
        settings: the settings of a model that has an `original_length`.

    Raises:
        ValueError: see `read_rope`.
    """
    scaling = RotaryScaling(read_rope(settings, layers="full_attention", base=1e4)["rotary_scaling"])
    limit = settings["max_position_embeddings"]
    changed = {
        "short_factor": scaling["long_factor"],
        "attention_factor": scaling.speeds(2 * len(scaling["long_factor"]), 1e4).scale,
        LENGTH: limit,
    }
    parameters = {
        name: {**settings[name], **changed} for name in ("rope_scaling", "rope_parameters") if settings.get(name)
    }
    return {**settings, **parameters, LENGTH: limit}


def write_lengths(config: GPTConfig | BERTConfig, *, grows: bool) -> dict[str, Any]:
    """Returns the settings from which `longest` computes a config's max_len."""
    scaling: Mapping[str, Any] = config.rotary_scaling or {}
    kind, max_positions = scaling.get("kind"), config.max_len
    if grows and kind == "linear":
        max_positions = math.ceil(max_positions / scaling["factor"])
    elif kind == "dynamic":
        max_positions = scaling[LENGTH]
    elif kind == "longrope" and max_positions == scaling[LENGTH]:
        max_positions = int(max_positions * scaling.get("factor", 1))
    original = {LENGTH: scaling[LENGTH]} if kind == "longrope" else {}
    return {"max_position_embeddings": max_positions, **original}


def with_rope(settings: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with these rotary parameters, as version 5 names them, and no older ones."""
    return {**settings, "rope_scaling": None, "rope_parameters": dict(rope)}


def with_alpha(settings: Mapping[str, Any], *, layers: str, base: float, head_dim: int) -> dict[str, Any]:
    """Returns settings with a base that contains the `alpha` of "dynamic", which then depends on no length (Hunyuan).

    Args:
        settings: the settings of a model.
        layers: see `read_rope`.
        base: the base if the settings don't contain it.
        head_dim: the size of a head.

    Raises:
        ValueError: an alpha that isn't a number above 0, or heads of 2 features, which can't have one.
    """
    rope = parameters_of(settings, layers)
    alpha = rope.pop("alpha", None)
    if not alpha or kind_of(rope) != "dynamic":
        return with_rope(settings, rope)
    if _number("alpha", alpha) < 0 or head_dim == 2:
        raise ValueError(f"expected an alpha above 0, and heads of more than 2 features, got {alpha!r} and {head_dim}")
    name = ROPE_NAMES[0]
    theta = next((value for value in (rope.get(name), settings.get(name)) if value is not None), base)
    stretched = float(_number(name, theta) * alpha ** (head_dim / (head_dim - 2)))
    return with_rope(settings, {"rope_type": "default", "rope_theta": stretched})


def write_rope(
    config: GPTConfig | BERTConfig, fraction: float, full: str | None = None, sliding: str | None = None
) -> dict[str, Any]:
    """Returns the settings of a config's rotary positions, readable by all versions of transformers.

    Args:
        config: the config of the model.
        fraction: the family's usual `rotary_fraction`, which settings without one have.
        full, sliding: the names of the kinds of layers, if each kind has parameters of its own.
    """
    scaling = {
        name: [*value] if isinstance(value, tuple) else value for name, value in (config.rotary_scaling or {}).items()
    }
    kind, base = scaling.pop("kind", "default"), config.rotary_base
    if kind == "dynamic":
        del scaling[LENGTH]
    own = getattr(config, "rotary_fraction", 1.0)
    partial = {} if own == fraction == 1.0 else {"partial_rotary_factor": own}
    if kind == "proportional":
        partial = {}  # the part is one of the scaling's parameters
    parameters = {"rope_type": kind, "rope_theta": base, **scaling, **partial}
    written: dict[str, Any] = {"rope_theta": base, **partial}
    if kind == "longrope":  # Phi-3 expects these three entries, under this name
        written["rope_scaling"] = {"type": kind, **{name: scaling[name] for name in ("short_factor", "long_factor")}}
    elif kind != "default":
        written["rope_scaling"] = {"rope_type": kind, **scaling}
    if full is None or sliding is None:
        return {**written, "rope_parameters": parameters}
    local = base if config.local_rotary_base is None else config.local_rotary_base
    nested = {full: parameters, sliding: {"rope_type": "default", "rope_theta": local}}
    return {**written, "rope_local_base_freq": local, "rope_parameters": nested}


def without_old_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings without the names of rotary positions before transformers 5, which replace those since then."""
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq") if settings.get("rope_parameters") else ()
    return {name: value for name, value in settings.items() if name not in old}


def parameters_of(settings: Mapping[str, Any], layers: str, is_nested: bool = False) -> dict[str, Any]:
    """Returns the mapping of rotary parameters, from whichever version.

    As in transformers, rope_scaling has priority, and another kind of scaling there replaces rope_parameters.
    """
    given: dict[str, Mapping[str, Any]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"expected {name} to be a mapping, got {value!r:.60}")
        given[name] = value
    scaling, parameters = given.get("rope_scaling") or {}, given.get("rope_parameters") or {}
    if scaling and not _has_kinds(parameters) and kind_of(scaling) != kind_of(parameters):
        parameters = {}
    if scaling and not _has_kinds(parameters):  # transformers takes what rope_scaling lacks from the other settings
        parameters = {
            name: value for name, value in parameters.items() if name not in ROPE_NAMES or settings.get(name) is None
        }
    chosen = (value.get(layers) or {} if is_nested or _has_kinds(value) else value for value in (parameters, scaling))
    return {name: value for each in chosen if isinstance(each, Mapping) for name, value in each.items()}


def _has_kinds(parameters: Mapping[str, Any]) -> bool:
    """Returns whether rotary parameters are those of several kinds of layers, such as "full_attention"."""
    return any(isinstance(value, Mapping) for name, value in parameters.items() if name.endswith("_attention"))


def kind_of(parameters: Mapping[str, Any]) -> Any:
    """Returns the kind of scaling that rotary parameters name."""
    return next((kind for kind in map(parameters.get, ("rope_type", "type")) if kind is not None), "default")


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"expected {name} to be a number, got {value!r}")
    return value
