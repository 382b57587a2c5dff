"""Rotary positions in the settings of transformers' models, of which there are several generations.

rope_theta, rope_scaling, partial_rotary_factor      beside the others (version 4)
rope_parameters                                      all of them in a mapping (version 5); or one for each kind of layer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The parameters of each kind of scaling, those that it has to have first; and what else names it.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("attention_factor", "factor"),
    ),
}
_OTHER_NAMES = {"su": "longrope"}
_BASE = 10_000.0
# The positions of a model, where scaling leaves max_position_embeddings at those that it was trained with.
_GROWS = ("linear", "dynamic", "yarn")


def read_rope(settings: Mapping[str, Any], *, layers: str | None = None, base: float = _BASE) -> dict[str, Any]:
    """The options of `GPTConfig` that say how positions turn: rotary_base, rotary_fraction, rotary_scaling.

    Those that are as usual are left out.

    Args:
        settings: of a model.
        layers: the kind of layers whose parameters are asked for, where each kind may have its own.
        base: where the settings don't say.

    Raises:
        ValueError: an unknown kind of scaling, a parameter that is missing or that its kind doesn't have, or no number.
    """
    found = parameters(settings, layers)
    theta, fraction = found.pop("rope_theta", None), found.pop("partial_rotary_factor", None)
    theta = settings.get("rope_theta", base) if theta is None else theta
    fraction = settings.get("partial_rotary_factor") if fraction is None else fraction
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    options: dict[str, Any] = {"rotary_base": _number("rope_theta", base if theta is None else theta)}
    if fraction is not None and fraction != 1.0:
        options["rotary_fraction"] = _number("partial_rotary_factor", fraction)
    kind = _OTHER_NAMES.get(kind, kind)
    if kind == "default":
        return options
    if kind not in KINDS:
        raise ValueError(f"expected a rope_type out of {('default', *KINDS)}, got {kind!r}")
    own = settings.get("original_max_position_embeddings")
    if own is not None:  # Phi-3's, which comes first
        found["original_max_position_embeddings"] = own
    limit = settings.get("max_position_embeddings")
    found = {name: value for name, value in found.items() if value is not None}
    if "original_max_position_embeddings" not in found:
        found["original_max_position_embeddings"] = limit
    if kind in ("yarn", "longrope") and "factor" not in found:
        found["factor"] = _number("max_position_embeddings", limit) / found["original_max_position_embeddings"]
    needed, others = KINDS[kind]
    if missing := [name for name in needed if found.get(name) is None]:
        raise ValueError(f"expected rope_type {kind!r} to have a {missing[0]}, got {found}")
    if kind == "dynamic":  # it grows from there
        found["original_max_position_embeddings"] = limit
    elif kind == "linear":
        del found["original_max_position_embeddings"]
    allowed = {*needed, *others, *(("original_max_position_embeddings",) if kind == "dynamic" else ())}
    if unknown := found.keys() - allowed:
        raise ValueError(f"expected rope_type {kind!r} with {sorted(allowed)}, got {min(unknown)} as well")
    options["rotary_scaling"] = {"kind": kind, **found}
    return options


def longest(settings: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """The number of positions that a model is meant for: with some kinds of scaling, more than its settings say.

    Args:
        settings: of the model.
        options: `read_rope` of them.

    Raises:
        ValueError: a max_position_embeddings that is no integer.
    """
    said = settings.get("max_position_embeddings")
    if not isinstance(said, int) or isinstance(said, bool):
        raise ValueError(f"expected max_position_embeddings to be an integer, got {said!r}")
    scaling = options.get("rotary_scaling") or {}
    if scaling.get("kind") not in _GROWS:
        return said
    return max(said, int(scaling.get("original_max_position_embeddings", said) * scaling["factor"]))


def parameters(settings: Mapping[str, Any], layers: str | None = None) -> dict[str, Any]:
    """The mapping of parameters, of whichever generation; of one kind of layers, where each kind has its own.

    Raises:
        ValueError: something else than a mapping.
    """
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"expected {name} to be a mapping, got {value!r:.60}")
        nested = value.get(layers) if layers is not None else None
        found = {**(nested if isinstance(nested, Mapping) else value), **found}
    return found


def write_rope(config: Any) -> dict[str, Any]:
    """The settings of a config's rotary positions, as both generations read them."""
    scaling = dict(getattr(config, "rotary_scaling", None) or {})
    kind = scaling.pop("kind", "default")
    fraction = getattr(config, "rotary_fraction", 1.0)
    partial = {} if fraction == 1.0 else {"partial_rotary_factor": fraction}
    if kind == "dynamic":
        scaling.pop("original_max_position_embeddings", None)
    return {
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": kind, "rope_theta": config.rotary_base, **scaling, **partial},
        **({"rope_scaling": {"rope_type": kind, **scaling}} if kind != "default" else {}),
        **partial,
    }


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"expected {name} to be a number, got {value!r}")
    return value
