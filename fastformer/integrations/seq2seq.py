"""Replacements for encoder-decoders whose layers stay transformers'; in evaluation the engine computes their encoders.

Their classes are made when `accelerate` asks for them, or when pickle looks them up in this module by their names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fastformer.checkpoints.hf import FAMILIES
from fastformer.integrations.engine_encode import EncoderStack
from fastformer.integrations.heads import Seq2SeqModel, derive
from fastformer.integrations.known import register
from fastformer.integrations.padding import Owner, PackingStack
from fastformer.integrations.replace import Replacement


class DecoderStack(PackingStack):
    """A decoder that computes padding. It reads an encoder's output only at positions that no mask hides."""

    def is_causal_stack(self) -> bool:
        """See `PackingStack`."""
        return True

    def has_known_layers(self) -> bool:
        """See `PackingStack`."""
        return False


# The prefix of the classes' names, by the model_type.
_CLASSES = {"mbart": "MBart", "pegasus": "Pegasus", "m2m_100": "M2M100"}
# The role of a class, by the ending of its name.
_TABLE: dict[str, type] = {
    "Encoder": EncoderStack,
    "Decoder": DecoderStack,
    "Model": Owner,
    "ForConditionalGeneration": Seq2SeqModel,
}


def replacements() -> Iterator[Replacement]:
    """Returns a replacement for each encoder-decoder class of the families that were imported."""
    for kind, classes in _CLASSES.items():
        source = sys.modules.get(FAMILIES[kind].source(kind))
        if source is None:
            continue
        register(source)  # a forward that was foreign at the first call may be transformers' again
        for end in _TABLE:
            yield Replacement(getattr(source, classes + end), _derived(source, classes, end))


def _derived(source: ModuleType, classes: str, end: str) -> Any:
    name = classes + end
    if name not in globals():
        register(source)
        globals()[name] = derive(__name__, getattr(source, name), _TABLE[end])
    return globals()[name]


def __getattr__(name: str) -> Any:
    for kind, classes in _CLASSES.items():
        end = name.removeprefix(classes)
        if end != name and end in _TABLE:
            return _derived(importlib.import_module(FAMILIES[kind].source(kind)), classes, end)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
