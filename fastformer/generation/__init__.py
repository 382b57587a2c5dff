"""Decoding: the searches, the engines that compute their steps, and the Translator, which reads and writes text."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastformer.engine.frozen import repack as repack
    from fastformer.generation.async_generator import AsyncGenerator as AsyncGenerator
    from fastformer.generation.async_translator import AsyncTranslator as AsyncTranslator
    from fastformer.generation.chat import Chat as Chat
    from fastformer.generation.chat_template import ChatTemplate as ChatTemplate
    from fastformer.generation.config import GenerationConfig as GenerationConfig
    from fastformer.generation.config import GenerationSettings as GenerationSettings
    from fastformer.generation.ensemble import Ensemble as Ensemble
    from fastformer.generation.generating import GenerateOutput as GenerateOutput
    from fastformer.generation.generating import generate as generate
    from fastformer.generation.generator import Generator as Generator
    from fastformer.generation.scoring import score as score
    from fastformer.generation.sentences import Sentence as Sentence
    from fastformer.generation.sentences import split_sentences as split_sentences
    from fastformer.generation.streaming import TextStreamer as TextStreamer
    from fastformer.generation.translator import Translator as Translator
    from fastformer.plots import draw_attention as draw_attention

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

# Loaded on first use: a session of speech and the options of decoding don't need PyTorch.
_NAMES = {
    "repack": "engine.frozen",
    "AsyncGenerator": "generation.async_generator",
    "AsyncTranslator": "generation.async_translator",
    "Chat": "generation.chat",
    "ChatTemplate": "generation.chat_template",
    "GenerationConfig": "generation.config",
    "GenerationSettings": "generation.config",
    "Ensemble": "generation.ensemble",
    "GenerateOutput": "generation.generating",
    "generate": "generation.generating",
    "Generator": "generation.generator",
    "score": "generation.scoring",
    "Sentence": "generation.sentences",
    "split_sentences": "generation.sentences",
    "TextStreamer": "generation.streaming",
    "Translator": "generation.translator",
    "draw_attention": "plots",
}


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"fastformer.{_NAMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
