"""Rotary positions in the settings of transformers' models, of which there are several generations.

rope_theta, rope_scaling, partial_rotary_factor      beside the others (version 4); GPT-NeoX has names of its own
rope_parameters                                      all of them in a mapping (version 5); or one for each kind of layer
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastformer.models import GPTConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_BASES = ("rope_theta", "rotary_emb_base")
_FRACTIONS = ("partial_rotary_factor", "rotary_pct")
_LENGTH = "original_max_position_embeddings"
_NAMES = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


def read_rope(
    settings: Mapping[str, Any], *, layers: str, base: float, fraction: float = 1.0, is_nested: bool = False
) -> dict[str, Any]:
    """The options of `GPTConfig` that say how positions turn: rotary_base, rotary_fraction, rotary_scaling.

    Those that are as usual are left out.

    Args:
        settings: of a model.
        layers: the kind of layers that is asked for, where each may have parameters of its own.
        base, fraction: where the settings don't say.
        is_nested: the parameters of another kind of layers don't count.

    Raises:
        ValueError: an unknown kind of scaling, or no number.
    """
    found = _parameters(settings, layers, is_nested)
    theta = next((of[name] for of in (found, settings) for name in _BASES if of.get(name) is not None), base)
    part = next((of[name] for of in (found, settings) for name in _FRACTIONS if of.get(name) is not None), fraction)
    options: dict[str, Any] = {"rotary_base": _number("rope_theta", theta)}
    if _number("partial_rotary_factor", part) != 1.0:
        options["rotary_fraction"] = part
    kind = found.get("rope_type") or found.get("type") or "default"
    if "short_factor" in found and kind in ("su", "yarn"):  # Phi-3's first names
        kind = "longrope"
    if kind not in KINDS:
        raise ValueError(f"expected a rope_type out of {KINDS}, got {kind!r}")
    if kind == "default":
        return options
    limit = settings.get("max_position_embeddings")
    scaling = {name: value for name, value in found.items() if name not in _NAMES and value is not None}
    if kind == "linear":
        scaling.pop(_LENGTH, None)
    elif kind == "dynamic":  # it grows from there
        scaling[_LENGTH] = limit
    elif settings.get(_LENGTH) is not None:  # Phi-3's, which comes first
        scaling[_LENGTH] = settings[_LENGTH]
    else:
        scaling.setdefault(_LENGTH, limit)
    if kind in ("yarn", "longrope") and "factor" not in scaling:
        scaling["factor"] = _number("max_position_embeddings", limit) / _number(_LENGTH, scaling[_LENGTH])
    return {**options, "rotary_scaling": {"kind": kind, **scaling}}


def longest(settings: Mapping[str, Any], options: Mapping[str, Any], *, grows: bool) -> int:
    """The number of positions that a model has.

    Some kinds of scaling are written beside the number of positions that a model had before. Others change the angles
    of all tokens once a sequence is longer than originally, which no cache can follow: they end there.

    Args:
        settings: of the model.
        options: `read_rope` of them.
        grows: whether the number in the settings may be the one before.

    Raises:
        ValueError: a max_position_embeddings that is no integer.
    """
    said = settings.get("max_position_embeddings")
    if not isinstance(said, int) or isinstance(said, bool):
        raise ValueError(f"expected max_position_embeddings to be an integer, got {said!r}")
    scaling = options.get("rotary_scaling") or {}
    kind, before = scaling.get("kind"), scaling.get(_LENGTH, said)
    if kind in ("dynamic", "longrope"):
        return min(said, before)
    if not grows or kind not in ("linear", "yarn"):
        return said
    return max(said, int(before * _number("factor", scaling.get("factor"))))


def write_lengths(config: GPTConfig, *, grows: bool) -> dict[str, Any]:
    """The settings of which `longest` makes a config's max_len."""
    scaling: Mapping[str, Any] = config.rotary_scaling or {}
    kind, said = scaling.get("kind"), config.max_len
    if grows and kind == "linear":
        said = math.ceil(said / scaling["factor"])
    elif kind == "dynamic":
        said = scaling[_LENGTH]
    elif kind == "longrope" and said == scaling[_LENGTH]:
        said = int(said * scaling.get("factor", 1))
    own = {_LENGTH: scaling[_LENGTH]} if kind == "longrope" else {}
    return {"max_position_embeddings": said, **own}


def write_rope(config: GPTConfig, full: str | None = None, sliding: str | None = None) -> dict[str, Any]:
    """The settings of a config's rotary positions, as all versions of transformers read them.

    Args:
        config: of the model.
        full, sliding: the kinds of layers, if each has parameters of its own.
    """
    scaling = {
        name: [*value] if isinstance(value, tuple) else value for name, value in (config.rotary_scaling or {}).items()
    }
    kind, base = scaling.pop("kind", "default"), config.rotary_base
    if kind == "dynamic":
        del scaling[_LENGTH]
    partial = {} if config.rotary_fraction == 1.0 else {"partial_rotary_factor": config.rotary_fraction}
    parameters = {"rope_type": kind, "rope_theta": base, **scaling, **partial}
    written: dict[str, Any] = {"rope_theta": base, **partial}
    if kind == "longrope":  # of which Phi-3 wants three entries, under this name
        written["rope_scaling"] = {"type": kind, **{name: scaling[name] for name in ("short_factor", "long_factor")}}
    elif kind != "default":
        written["rope_scaling"] = {"rope_type": kind, **scaling}
    if full is None or sliding is None:
        return {**written, "rope_parameters": parameters}
    local = base if config.local_rotary_base is None else config.local_rotary_base
    nested = {full: parameters, sliding: {"rope_type": "default", "rope_theta": local}}
    return {**written, "rope_local_base_freq": local, "rope_parameters": nested}


def of_version(settings: Mapping[str, Any], major: int) -> dict[str, Any]:
    """Settings without those that a version of transformers doesn't read, or reads besides: see above.

    Args:
        settings: of a model.
        major: the number of the version, before its first point.
    """
    unread = ("rope_parameters",) if major < 5 else ("rope_theta", "rope_scaling", "rope_local_base_freq")
    if major >= 5 and not settings.get("rope_parameters"):
        return dict(settings)
    return {name: value for name, value in settings.items() if name not in unread}


def _parameters(settings: Mapping[str, Any], layers: str, is_nested: bool) -> dict[str, Any]:
    """The mapping of parameters, of whichever generation."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"expected {name} to be a mapping, got {value!r:.60}")
        nested = {kind: each for kind, each in value.items() if isinstance(each, Mapping)}
        if nested or is_nested:
            value = nested.get(layers, {})
        found |= value
    return found


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"expected {name} to be a number, got {value!r}")
    return value
