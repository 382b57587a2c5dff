"""Replacements for models of transformers whose `generate` runs on the engine and whose family has no file here.

`checkpoints.hf` lists these models. Their classes are made when `accelerate` asks for them, or when pickle looks them
up in this module by their names.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from fastformer.checkpoints.hf import FAMILIES
from fastformer.integrations.engine_models import loaded_classes
from fastformer.integrations.heads import derive
from fastformer.integrations.replace import Replacement


def replacements() -> Iterator[Replacement]:
    """Returns a replacement for each decoder-only class of the families that were imported."""
    for original in loaded_classes():
        yield Replacement(original, _derived(original))


def _derived(original: Any) -> Any:
    name = original.__name__
    if name not in globals():
        globals()[name] = derive(__name__, original)
    return globals()[name]


def __getattr__(name: str) -> Any:
    for kind, family in FAMILIES.items():
        if family.generates and family.model_class == name:
            source = importlib.import_module(family.source(kind))
            return _derived(getattr(source, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
