"""Decoding: the searches, the engines that compute their steps, and the Translator, which reads and writes text."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastformer.generation.names import AsyncGenerator as AsyncGenerator
    from fastformer.generation.names import AsyncTranslator as AsyncTranslator
    from fastformer.generation.names import Chat as Chat
    from fastformer.generation.names import ChatTemplate as ChatTemplate
    from fastformer.generation.names import Ensemble as Ensemble
    from fastformer.generation.names import GenerateOutput as GenerateOutput
    from fastformer.generation.names import GenerationConfig as GenerationConfig
    from fastformer.generation.names import GenerationSettings as GenerationSettings
    from fastformer.generation.names import Generator as Generator
    from fastformer.generation.names import Sentence as Sentence
    from fastformer.generation.names import TextStreamer as TextStreamer
    from fastformer.generation.names import Translator as Translator
    from fastformer.generation.names import draw_attention as draw_attention
    from fastformer.generation.names import generate as generate
    from fastformer.generation.names import repack as repack
    from fastformer.generation.names import score as score
    from fastformer.generation.names import split_sentences as split_sentences

__all__ = [
    "AsyncGenerator",
    "AsyncTranslator",
    "Chat",
    "ChatTemplate",
    "Ensemble",
    "GenerateOutput",
    "GenerationConfig",
    "GenerationSettings",
    "Generator",
    "Sentence",
    "TextStreamer",
    "Translator",
    "draw_attention",
    "generate",
    "repack",
    "score",
    "split_sentences",
]


def __getattr__(name: str) -> object:
    """Loads all names on first use of one, by one import: threads that use different ones first would meet in cycles.

    A session of speech and the options of decoding don't need PyTorch, which the names do.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("fastformer.generation.names"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
