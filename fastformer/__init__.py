"""fastformer: Transformers made fast, under the names that PyTorch users know.

`fastformer.nn` has the modules of torch.nn; `Transformer` and `GPT` are whole models, `generate` decodes with them, a
`Translator` reads and writes text, an `AsyncTranslator` does so for many tasks at once, and a `Chat` holds a
conversation. A `WhisperModel` transcribes speech. An `Encoder` computes embeddings of texts, a `MultiVectorEncoder` a
vector for each token, a `CrossEncoder` scores pairs of texts, and a `TokenClassifier` finds names in them. `accelerate`
makes a model that already exists compute on the same ops, in place, `report` says how, and `restore` undoes it. These
and the packages below are loaded on first use: importing the package alone stays cheap.
"""

from __future__ import annotations

import importlib
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastformer.audio import BatchedInferencePipeline as BatchedInferencePipeline
    from fastformer.audio import WhisperModel as WhisperModel
    from fastformer.encoding import CrossEncoder as CrossEncoder
    from fastformer.encoding import Encoder as Encoder
    from fastformer.encoding import MultiVectorEncoder as MultiVectorEncoder
    from fastformer.encoding import TokenClassifier as TokenClassifier
    from fastformer.functional import activate as activate
    from fastformer.functional import deactivate as deactivate
    from fastformer.generation import AsyncTranslator as AsyncTranslator
    from fastformer.generation import Chat as Chat
    from fastformer.generation import ChatTemplate as ChatTemplate
    from fastformer.generation import Translator as Translator
    from fastformer.generation.generating import generate as generate
    from fastformer.integrations import accelerate as accelerate
    from fastformer.integrations import report as report
    from fastformer.integrations import restore as restore
    from fastformer.models import GPT as GPT
    from fastformer.models import Transformer as Transformer

__version__ = "0.2.0"

# The names above, by the package that has them.
_NAMES = {
    "audio": ("BatchedInferencePipeline", "WhisperModel"),
    "encoding": ("CrossEncoder", "Encoder", "MultiVectorEncoder", "TokenClassifier"),
    "functional": ("activate", "deactivate"),
    "generation": ("AsyncTranslator", "Chat", "ChatTemplate", "Translator", "generate"),
    "integrations": ("accelerate", "report", "restore"),
    "models": ("GPT", "Transformer"),
}
__all__ = sorted([*chain.from_iterable(_NAMES.values()), "__version__"])
# As torch.nn is there once torch is imported.
_PACKAGES = (*_NAMES, "data", "nn", "ops", "training")


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"fastformer.{name}")
    for package, names in _NAMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"fastformer.{package}"), name)
            return value
    raise AttributeError(f"module 'fastformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
