"""The decoding engines, and the choice of one for a model."""

from __future__ import annotations

import logging
from typing import Any, TypeVar, cast

from torch import nn

from fastformer.generation.engines import graph
from fastformer.generation.engines.base import Batch as Batch
from fastformer.generation.engines.base import Candidates as Candidates
from fastformer.generation.engines.base import Engine as Engine
from fastformer.generation.engines.base import KnownPrefix as KnownPrefix
from fastformer.generation.engines.base import Prompt as Prompt
from fastformer.generation.engines.base import Selection as Selection
from fastformer.generation.engines.cpp import CppEngine
from fastformer.generation.engines.ensemble import EnsembleEngine
from fastformer.generation.engines.graph import GraphEngine
from fastformer.generation.engines.kv_cache import KVCacheEngine
from fastformer.generation.engines.recompute import RecomputeEngine
from fastformer.generation.engines.recurrent import RecurrentEngine
from fastformer.generation.model_protocols import (
    Model,
    as_model,
    check_precision,
    device_of,
    dtype_precision,
    is_ensemble,
    own_precision,
)
from fastformer.generation.search import Sample as Sample
from fastformer.models import GPT
from fastformer.models.as_made import why_own_code
from fastformer.models.quantization import QUANTIZED

AnyModel = TypeVar("AnyModel")

# By default the first engine in this order that can decode the model is chosen; "graph" only on a device with graphs.
_ENGINES: tuple[type[CppEngine | KVCacheEngine | RecurrentEngine | RecomputeEngine], ...]
_ENGINES = (CppEngine, GraphEngine, KVCacheEngine, RecurrentEngine, RecomputeEngine)
logger = logging.getLogger("fastformer")
ENGINES = tuple(engine.name for engine in _ENGINES)
_REGISTERED: dict[str, type[Engine]] = {}


def register(engine: type[Engine]) -> None:
    """Makes an engine of your own available by its name, as `engine=` of `generate`, `Translator` and others.

    It decodes only if a call names it. Registering another class of the same name replaces the first one.

    Args:
        engine: the class. It is called as `engine(model, precision)`, if its `why_unsupported` returns None.

    Raises:
        ValueError: not a subclass of `Engine`, or without a name, or with the name of one of fastformer's engines.
    """
    if not isinstance(engine, type) or not issubclass(engine, Engine):
        raise ValueError(f"expected engine to be a subclass of Engine, got {engine!r:.80}")
    name = getattr(engine, "name", None)
    if not isinstance(name, str) or not name or name in ENGINES:
        raise ValueError(f"expected engine to have a name other than {', '.join(ENGINES)}, got {name!r:.80}")
    _REGISTERED[name] = engine


def rounded_for_steps(model: AnyModel, precision: str | None) -> AnyModel:
    """Returns a loaded model in the form in which a GPU decodes in int8 or int4; unchanged for other calls.

    It is rounded by `quantize`, in bf16 if its dtype was fp32.
    """
    quantize = getattr(model, "quantize", None)
    is_on_gpu = precision in QUANTIZED and device_of(cast(Model, model)).type in graph.DEVICES
    if quantize is None or not is_on_gpu or own_precision(model) == precision:
        return model
    if dtype_precision(model) == "fp32":
        cast(nn.Module, model).bfloat16()
    return cast(AnyModel, quantize(precision))


def choose_engine(
    model: Model, name: str | None = None, precision: str | None = None, cache_dtype: str | None = None
) -> Engine:
    """Returns an engine for a model.

    The engine of an ensemble has no name. It consists of one engine for each model of the ensemble; name and precision
    apply to each of these.

    Args:
        model: the model to decode.
        name: one of ENGINES, or a registered engine; None: the fastest engine that can decode the model on its
            device, except registered engines. Where that isn't "graph" on a GPU, the log says why, at level INFO: for
            instance because the model has code of its own, of which a graph holds what its first call did.
        precision: the precision to compute in: "fp32", "bf16", "fp16", "int8" or "int4". None: the model's own, which
            is "int8" or "int4" for a quantised model, else its dtype or autocast's. An engine without int8 and int4
            decodes a quantised model with its rounded weights in their dtype.
        cache_dtype: see `GenerationConfig`.

    Raises:
        ValueError: the engine or the precision doesn't exist, or no engine can decode this model in that precision,
            with that cache_dtype.
    """
    if name is not None and name not in ENGINES and name not in _REGISTERED:
        raise ValueError(f"expected an engine in {', '.join((*ENGINES, *_REGISTERED))}, got {name!r}")
    check_precision(precision)
    if is_ensemble(model):
        return EnsembleEngine(model, lambda member: choose_engine(as_model(member), name, precision, cache_dtype))
    if isinstance(model, GPT):
        model.check_causal()
    reasons: dict[str, list[str]] = {}
    has_graphs, why_no_graph = device_of(model).type in graph.DEVICES, None
    candidates: tuple[Any, ...] = (*_ENGINES, *_REGISTERED.values())
    for engine in candidates:
        if name == engine.name or (name is None and engine in _ENGINES and (engine is not GraphEngine or has_graphs)):
            reason = engine.why_unsupported(model, precision)
            if name is None and engine is GraphEngine:  # a graph holds what the first call of a method did
                reason = reason or why_own_code(model)
            if cache_dtype is not None and cache_dtype not in engine.cache_dtypes:
                reason = reason or f"its keys and values have the dtype of the computation, not {cache_dtype}"
            if reason is None:
                if name is None and why_no_graph is not None:
                    logger.info(
                        "engine %r decodes a %s, not 'graph': %s", engine.name, type(model).__name__, why_no_graph
                    )
                chosen: Engine = engine(model, precision, *([cache_dtype] if engine.cache_dtypes else []))
                return chosen
            why_no_graph = reason if engine is GraphEngine else why_no_graph
            reasons.setdefault(reason, []).append(repr(engine.name))
    what = type(model).__name__ + ("" if precision is None else f" in {precision}")
    what += "" if cache_dtype is None else f" with a cache of {cache_dtype}"
    raise ValueError(
        "; ".join(
            f"engine{'s' if len(names) > 1 else ''} {', '.join(names)} can't decode a {what}: {reason}"
            for reason, names in reasons.items()
        )
    )
