"""Replacements for encoder-only models of transformers other than BERT, which the engine computes in evaluation.

Otherwise their own modules compute them. `checkpoints.hf` lists these models. Their classes are made when `accelerate`
asks for them, or when pickle looks them up in this module by their names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fastformer.checkpoints.hf import ENCODER_FORMS, FAMILIES
from fastformer.integrations.engine_encode import EncoderStack
from fastformer.integrations.heads import EncoderHead, KeepsPadding, TokenLabels, derive
from fastformer.integrations.known import register
from fastformer.integrations.padding import Owner
from fastformer.integrations.positionwise import register_parts
from fastformer.integrations.replace import Replacement

_TOKENS = (EncoderHead, TokenLabels)
# The role of a class (see `heads`), by the ending of its name.
_TABLE: dict[str, tuple[type, ...]] = {
    "Model": (EncoderStack,),
    "ForSequenceClassification": (Owner,),
    "ForMultipleChoice": (Owner,),
    "ForMaskedLM": _TOKENS,
    "ForPreTraining": _TOKENS,
    "ForTokenClassification": _TOKENS,
    "ForQuestionAnswering": (EncoderHead, KeepsPadding),
}
# An ELECTRA's head may summarize all positions.
_OTHERS = frozenset({"ElectraForMultipleChoice"})
# Parts of heads that read one position at a time, or the first one.
_PARTS = (
    *("Pooler", "LMHead", "ClassificationHead", "DiscriminatorPredictions", "GeneratorPredictions", "PredictionHead"),
)


def replacements() -> Iterator[Replacement]:
    """Returns a replacement for each encoder-only class of the families that were imported."""
    for kind, classes in _classes():
        source = sys.modules.get(FAMILIES[kind].source(kind))
        if source is None:
            continue
        register(source)  # a forward that was foreign at the first call may be transformers' again
        for end in _TABLE:
            original = getattr(source, classes + end, None)
            if original is not None and original.__name__ not in _OTHERS:
                yield Replacement(original, _derived(source, classes, end))


def _classes() -> Iterator[tuple[str, str]]:
    """Returns the model_types except BERT (which has its own file), each with the prefix of its classes' names."""
    return ((kind, form.classes) for kind, form in ENCODER_FORMS.items() if kind != "bert")


def _derived(source: ModuleType, classes: str, end: str) -> Any:
    name = classes + end
    if name not in globals():
        register(source)
        parts = (getattr(source, classes + part, None) for part in _PARTS)
        register_parts(*(part for part in parts if part is not None))
        globals()[name] = derive(__name__, getattr(source, name), *_TABLE[end])
    return globals()[name]


def __getattr__(name: str) -> Any:
    for kind, classes in _classes():
        end = name.removeprefix(classes)
        if end != name and end in _TABLE and name not in _OTHERS:
            return _derived(importlib.import_module(FAMILIES[kind].source(kind)), classes, end)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
