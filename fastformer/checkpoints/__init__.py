"""Models on disk: the run folder of a training, and the folders of other programs.

RUN/config.json, model.safetensors   the model (`fastformer.models.pretrained`)
RUN/tokenizer.json                   its tokenizer (`fastformer.data.tokenizer_files`)
RUN/config.yaml                      the settings of the training
RUN/checkpoints/step-*.pt            the state that a training resumes from (`training_state.py`)
RUN/.lock                            the process that trains in the folder (`lock.py`)
RUN/metrics.jsonl                    losses and scores

`run.py` loads a model from the folder of a run or from one that transformers wrote. `hf/` has one file for each family
of transformers' models: its settings, the names of its weights, its tokenizer. To add a family, write that file and its
line in `hf/__init__.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastformer.checkpoints.hf import generation_settings as generation_settings
    from fastformer.checkpoints.run import load_model as load_model
    from fastformer.checkpoints.run import load_models as load_models

# Loaded on first use: to read speech's folders needs neither PyTorch nor the models.
_NAMES = {"generation_settings": "hf", "load_model": "run", "load_models": "run"}


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
