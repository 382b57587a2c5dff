"""Replacements for the classes of transformers' families that have no file here.

Their layers stay transformers'. The engine runs `generate` of those that generate text, and in evaluation it computes
encoders. `checkpoints.hf` lists these models. Their classes are made when `accelerate` asks for them, or when pickle
looks them up in this module by their names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS, FAMILIES
from fastformer.integrations.engine_encode import DecoderOnEncoder, EncoderStack
from fastformer.integrations.heads import (
    EncoderHead,
    KeepsPadding,
    LanguageModel,
    LastToken,
    Seq2SeqModel,
    TokenLabels,
    derive,
)
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


Roles = dict[str, tuple[type, ...]]
_TOKENS = (EncoderHead, TokenLabels)
# The roles of an encoder's classes (see `heads`), by the endings of their names.
_ENCODER: Roles = {
    "Model": (EncoderStack,),
    "ForSequenceClassification": (Owner,),
    "ForMultipleChoice": (Owner,),
    "ForMaskedLM": _TOKENS,
    "ForPreTraining": _TOKENS,
    "ForTokenClassification": _TOKENS,
    "ForQuestionAnswering": (EncoderHead, KeepsPadding),
}
# Those of an encoder-decoder's classes.
_SEQ2SEQ: Roles = {
    "Encoder": (EncoderStack,),
    "Decoder": (DecoderStack,),
    "Model": (Owner,),
    "ForConditionalGeneration": (Seq2SeqModel,),
}
# The beginning of the names of an encoder-decoder's classes, by the model_type.
_SEQ2SEQ_CLASSES = {"mbart": "MBart", "pegasus": "Pegasus", "m2m_100": "M2M100"}
# Decoder-only families whose classes are in a file here.
_OWN_FILES = frozenset({"gpt2", "llama"})
# An ELECTRA's head may summarize all positions.
_OTHERS = frozenset({"ElectraForMultipleChoice"})


def replacements() -> Iterator[Replacement]:
    """Returns a replacement for each class of the families that were imported."""
    for kind, family in FAMILIES.items():
        source = sys.modules.get(family.source(kind))
        for name, bases in _roles(kind).items():
            original = getattr(source, name, None)
            if source is not None and original is not None:
                yield Replacement(original, _derived(source, name, bases))


def _roles(kind: str) -> Roles:
    """Returns the roles of a family's classes, by their names; none for BERT, which has its own file."""
    if kind in _SEQ2SEQ_CLASSES:
        classes, table = _SEQ2SEQ_CLASSES[kind], _SEQ2SEQ
    elif FAMILIES[kind].generates:
        family = FAMILIES[kind]
        if kind not in DECODER_FORMS or kind in _OWN_FILES:
            return {family.model_class: ()}
        stack = {family.headless: (DecoderOnEncoder, EncoderStack)}
        labels = family.headless.removesuffix("Model") + "ForSequenceClassification"
        return {family.model_class: (LanguageModel,), labels: (LastToken,), **stack}
    else:
        classes, table = ENCODER_FORMS[kind].classes, {} if kind == "bert" else _ENCODER
    return {classes + end: bases for end, bases in table.items() if classes + end not in _OTHERS}


def _derived(source: ModuleType, name: str, bases: tuple[type, ...]) -> Any:
    if name not in globals():
        globals()[name] = derive(__name__, getattr(source, name), *bases)
    return globals()[name]


def __getattr__(name: str) -> Any:
    for kind, family in FAMILIES.items():
        if name in (roles := _roles(kind)):
            return _derived(importlib.import_module(family.source(kind)), name, roles[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
