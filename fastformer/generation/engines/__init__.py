"""The engines, and which of them decodes a model."""

from __future__ import annotations

from fastformer.generation.decoders import Model
from fastformer.generation.engines.interface import Candidates as Candidates
from fastformer.generation.engines.interface import Draw as Draw
from fastformer.generation.engines.interface import Engine as Engine
from fastformer.generation.engines.interface import Prompt as Prompt
from fastformer.generation.engines.interface import Selection as Selection
from fastformer.generation.engines.kv_cache import KVCacheEngine
from fastformer.generation.engines.recompute import CrossCacheEngine, EncodeOnceEngine, RecomputeEngine
from fastformer.generation.engines.recurrent import RecurrentEngine

# Without a wish the first that can decode the model does.
_ENGINES = (KVCacheEngine, RecurrentEngine, CrossCacheEngine, EncodeOnceEngine, RecomputeEngine)
ENGINES = tuple(engine.name for engine in _ENGINES)


def choose_engine(model: Model, name: str | None = None) -> Engine:
    """An engine for a model.

    Args:
        model: what decodes.
        name: one of ENGINES; None: the fastest that can.

    Raises:
        ValueError: no such engine, or one that can't decode this model.
    """
    if name is not None and name not in ENGINES:
        raise ValueError(f"expected an engine out of {', '.join(ENGINES)}, got {name!r}")
    reasons = []
    for engine in _ENGINES:
        if name in (None, engine.name):
            reason = engine.why_unsupported(model)
            if reason is None:
                return engine(model)
            reasons.append(f"engine {engine.name!r} can't decode a {type(model).__name__}: {reason}")
    raise ValueError("; ".join(reasons))
