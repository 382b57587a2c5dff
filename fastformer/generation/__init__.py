"""Decoding: the searches, the engines that compute their steps, and the Translator, which reads and writes text."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastformer.generation.names import *  # noqa: F403

__all__ = [
    "AsyncGenerator", "AsyncTranslator", "Chat", "ChatTemplate", "Ensemble", "GenerateOutput",  # noqa: F405
    "GenerationConfig", "GenerationSettings", "Generator", "Sentence", "TextStreamer", "Translator",  # noqa: F405
    "draw_attention", "generate", "repack", "score", "split_sentences",  # noqa: F405
]  # fmt: skip


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
