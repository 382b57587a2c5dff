"""Loading the model and the tokenizer of a run folder, or of a folder that transformers saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastformer.baseline import LSTMSeq2Seq
from fastformer.baseline.lstm import LSTMConfig
from fastformer.checkpoints import argos, ctranslate2, ctranslate2_decoders, gguf, model_bin
from fastformer.checkpoints.hf import FAMILIES, load_folder, model_type, why_unsupported
from fastformer.data import PairTokenizer, Tokenizer, load_tokenizer
from fastformer.data.pair import contents
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import read_json
from fastformer.models import BERT, GPT, Transformer, read_architecture
from fastformer.models.pretrained import CONFIG, config_from_dict, load_saved
from fastformer.special_ids import SpecialIds

_ARCHITECTURE = {"seq2seq": "Transformer", "decoder": "GPT", "encoder": "BERT"}  # of each kind of family
ARCHITECTURES = ("Transformer", "GPT", "LSTMSeq2Seq")  # that are trained in runs
_HINTS = {
    **dict.fromkeys(ARCHITECTURES, "; see `fastformer translate`"),
    "GPT": "; see `fastformer generate`",
    "BERT": "; it is an encoder: see `fastformer embed` and `fastformer rank`",
    "Whisper": "; see `fastformer transcribe`",
}
_SPECIFICATIONS = {ctranslate2.SPECIFICATION: "Transformer", ctranslate2_decoders.SPECIFICATION: "GPT",
                   model_bin.SPEECH: "Whisper"}  # fmt: skip


def load_model(
    run: str | os.PathLike[str],
    expected: tuple[str, ...] = (),
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, Tokenizer]:
    """Loads the model and the tokenizer of a run folder.

    Args:
        run: the folder, or a GGUF file. If a "Transformer" is expected, the folder may hold a BART, a Marian or a T5
            that transformers saved or CTranslate2 converted; if a "GPT" is expected, a decoder, such as a Llama.
        expected: the architectures that the caller accepts, such as "Transformer"; empty: any.
        device: the device of the parameters; None: the CPU.
        dtype: the dtype of the parameters; None: as saved.

    Raises:
        ValueError: another architecture, or a folder that is damaged or whose files don't belong together.
    """
    if expected and (load := _other_program(run)) is not None:
        if architecture_of(run) in (*expected, None):
            return load(Path(run), device=device, dtype=dtype)
        raise ValueError(f"expected a model of {' or '.join(expected)}, got {described(run)}")
    kind = model_type(Path(run)) if expected else None
    if kind is not None:
        return _load_foreign(Path(run), kind, expected, device, dtype)
    tokenizer, architecture = load_tokenizer(run), read_architecture(run)
    if architecture not in (expected or ARCHITECTURES):
        raise ValueError(
            f"expected a folder of {' or '.join(expected or ARCHITECTURES)}, got one of {architecture!r}: {run}"
            + _HINTS.get(architecture, "")
        )
    model: Any = _load(architecture, run, device, dtype)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"expected a tokenizer of {model.config.vocab_size} ids next to the model in {run}, got one of "
            f"{tokenizer.vocab_size}: {TOKENIZER} is from another run"
        )
    read = getattr(model.config, "source_vocab_size", None) or model.config.vocab_size
    has = tokenizer.source_vocab_size if isinstance(tokenizer, PairTokenizer) else read
    if has != read:
        raise ValueError(
            f"expected a tokenizer of {read} source ids next to the model in {run}, got one of {has}: {TOKENIZER} is "
            "from another run"
        )
    SpecialIds.of(model.config).check_tokenizer(tokenizer.special_ids, f"the model in {run}")
    return model, tokenizer


def architecture_of(run: str | os.PathLike[str]) -> str | None:
    """Returns the architecture of a folder, such as "GPT"; None: loading it is an error.

    `load_model` doesn't load a "Whisper", nor an encoder that CTranslate2 converted.
    """
    if gguf.is_gguf(run):
        return gguf.architecture_of(run)
    if argos.is_package(run):
        return "Transformer"
    if model_bin.is_folder(run):
        name = model_bin.specification(Path(run))
        return _SPECIFICATIONS.get(name, name or None)
    kind = model_type(Path(run))
    if kind is not None:
        if kind == "whisper":
            return "Whisper"
        family = FAMILIES.get(kind)
        return None if family is None else _ARCHITECTURE[family.kind]
    try:
        return read_architecture(run)
    except ValueError:
        return None


def described(run: str | os.PathLike[str]) -> str:
    """Returns what a folder or a file holds and the command that takes it, for the message of an error."""
    name = architecture_of(run)
    return f"{'a damaged one' if name is None else f'one of {name!r:.60}'}: {run}{_HINTS.get(str(name), '')}"


def why_refused(folder: Path) -> str:
    """Returns the end of a message: why no model here computes that of a folder, or the command that takes it."""
    reason = why_unsupported(read_json(folder / CONFIG))
    return _HINTS.get(str(architecture_of(folder)), "") if reason is None else f"; {reason}"


def check_saved(run: str | os.PathLike[str], expected: str) -> None:
    """Raises a ValueError for what another program than transformers wrote: GGUF, Argos, CTranslate2."""
    if _other_program(run) is not None:
        raise ValueError(f"expected {expected}, got {described(run)}")


def _other_program(run: str | os.PathLike[str]) -> Callable[..., tuple[Any, Tokenizer]] | None:
    """Returns what loads a file of llama.cpp, a package of Argos or a folder of CTranslate2; None for others."""
    if gguf.is_gguf(run):
        return gguf.load_file
    if argos.is_package(run):
        return argos.load_package
    if not model_bin.is_folder(run):
        return None
    is_decoder = architecture_of(run) == "GPT"
    return ctranslate2_decoders.load_folder if is_decoder else ctranslate2.load_folder


def load_models(
    runs: Sequence[str | os.PathLike[str]],
    expected: tuple[str, ...] = (),
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[list[Any], Tokenizer]:
    """Loads the models of several folders, and the tokenizer that they share; see `load_model`.

    Raises:
        ValueError: see `load_model`; no folders, or tokenizers that encode or decode differently.
    """
    if not runs:
        raise ValueError("expected at least one run folder, got none")
    loaded = [load_model(run, expected, device=device, dtype=dtype) for run in runs]
    tokenizer = loaded[0][1]
    expected_contents = contents(tokenizer)
    for run, (_, other) in zip(runs[1:], loaded[1:], strict=True):
        if other.vocab_size != tokenizer.vocab_size or contents(other) != expected_contents:
            what = f"one of {other.vocab_size} ids" if other.vocab_size != tokenizer.vocab_size else "another one"
            raise ValueError(
                f"expected runs of one tokenizer: {runs[0]} has one of {tokenizer.vocab_size} ids, {run} has {what}; "
                "train the second run with --tokenizer and the folder of the first"
            )
    return [model for model, _ in loaded], tokenizer


def _load_foreign(
    folder: Path, kind: str, expected: tuple[str, ...], device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[Any, Tokenizer]:
    """Loads the model and the tokenizer of a folder that transformers saved."""
    family = FAMILIES.get(kind)
    wanted = [family_kind for family_kind, architecture in _ARCHITECTURE.items() if architecture in expected]
    if family is not None and family.kind in wanted:
        return load_folder(folder, family, device=device, dtype=dtype)
    known = ", ".join(f.name for f in FAMILIES.values() if f.kind in wanted)
    end = why_refused(folder)
    raise ValueError(f"expected a run folder, or transformers' folder of a {known}, got a {kind!r}: {folder}{end}")


def _load(
    architecture: str,
    run: str | os.PathLike[str],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    for kind in (Transformer, GPT, BERT):
        if kind.__name__ == architecture:
            return kind.from_pretrained(run, device=device, dtype=dtype)

    def make(values: dict[str, Any], device: torch.device | str | None, dtype: torch.dtype | None) -> LSTMSeq2Seq:
        with torch.device(device or "cpu"):
            return LSTMSeq2Seq(**asdict(config_from_dict(LSTMConfig, values))).to(dtype=dtype)

    return load_saved(run, architecture, make, device=device, dtype=dtype)
