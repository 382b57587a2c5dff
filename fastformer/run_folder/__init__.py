"""A run folder: what a trained model is on disk, for training and for translating alike. Loading one stands here.

RUN/config.json, model.safetensors   the model (`fastformer.models.pretrained`)
RUN/tokenizer.json                   its tokenizer
RUN/config.yaml                      the settings of the training
RUN/checkpoints/step-*.pt            what training goes on from (`checkpoint.py`)
RUN/.lock                            who trains in it (`lock.py`)
RUN/metrics.jsonl                    losses and scores
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastformer.baseline import LSTMSeq2Seq
from fastformer.baseline.lstm import LSTMConfig
from fastformer.data import PairTokenizer, Tokenizer, load_tokenizer
from fastformer.data.tokenizer import TOKENIZER
from fastformer.models import GPT, Transformer, read_architecture
from fastformer.models.pretrained import config_from_dict, load_saved
from fastformer.run_folder.bart import load_bart
from fastformer.run_folder.hugging_face import model_type
from fastformer.run_folder.marian import load_marian
from fastformer.run_folder.t5 import load_t5
from fastformer.special_ids import SpecialIds

_LOADERS: dict[str | None, Callable[..., tuple[Transformer, Tokenizer]]] = {
    "bart": load_bart,
    "marian": load_marian,
    "t5": load_t5,
    "mt5": load_t5,
}
ARCHITECTURES = ("Transformer", "GPT", "LSTMSeq2Seq")


def choose_device(name: str) -> torch.device:
    """ "auto" is the GPU if there is one.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).cpu()  # "meta" can be allocated on and holds nothing
    except (RuntimeError, AssertionError) as error:  # what a build without CUDA raises is an AssertionError
        raise ValueError(f"expected a device that this PyTorch can use, got {name!r}: give cpu or auto") from error
    return torch.device(name)


def load_model(
    run: str | os.PathLike[str],
    expected: tuple[str, ...] = (),
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, Tokenizer]:
    """The model and the tokenizer of a run folder.

    Args:
        run: the folder. Where a "Transformer" is expected, that of a BART, a Marian or a T5 will do, as transformers
            saves it.
        expected: the architectures that will do, such as "Transformer"; empty: any.
        device: where the parameters go; None: the CPU.
        dtype: what they become; None: what they were saved as.

    Raises:
        ValueError: another architecture, or a folder that is damaged or whose files don't belong together.
    """
    kind = model_type(Path(run)) if "Transformer" in expected else None
    if kind in _LOADERS:
        return _LOADERS[kind](Path(run), device=device, dtype=dtype)
    if kind is not None:
        raise ValueError(
            f"expected a run folder, or that of a BART, a Marian or a T5, got one of {kind!r}: {run}; some others can "
            "be converted, see fastformer.integrations.from_huggingface"
        )
    tokenizer, architecture = load_tokenizer(run), read_architecture(run)
    if architecture not in (expected or ARCHITECTURES):
        hint = "fastformer generate" if architecture == "GPT" else "fastformer translate"
        raise ValueError(
            f"expected a folder of {' or '.join(expected or ARCHITECTURES)}, got one of {architecture!r}: {run}"
            + (f"; see `{hint}`" if architecture in ARCHITECTURES else "")
        )
    model: Any = _load(architecture, run, device, dtype)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"expected a tokenizer of {model.config.vocab_size} ids beside the model in {run}, got one of "
            f"{tokenizer.vocab_size}: {TOKENIZER} is of another run"
        )
    read = getattr(model.config, "source_vocab_size", None) or model.config.vocab_size
    has = tokenizer.source_vocab_size if isinstance(tokenizer, PairTokenizer) else read
    if has != read:
        raise ValueError(
            f"expected a tokenizer of {read} source ids beside the model in {run}, got one of {has}: {TOKENIZER} is of "
            "another run"
        )
    SpecialIds.of(model.config).check_tokenizer(tokenizer.special_ids, f"the model in {run}")
    return model, tokenizer


def _load(
    architecture: str,
    run: str | os.PathLike[str],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    if architecture == "Transformer":
        return Transformer.from_pretrained(run, device=device, dtype=dtype)
    if architecture == "GPT":
        return GPT.from_pretrained(run, device=device, dtype=dtype)

    def make(values: dict[str, Any], device: torch.device | str | None, dtype: torch.dtype | None) -> LSTMSeq2Seq:
        with torch.device(device or "cpu"):
            return LSTMSeq2Seq(**asdict(config_from_dict(LSTMConfig, values))).to(dtype=dtype)

    return load_saved(run, architecture, make, device=device, dtype=dtype)
