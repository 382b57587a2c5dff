"""What the folders have in common that transformers saves: read without transformers.

config.json                  says "model_type"
model.safetensors            or pytorch_model.bin, as older ones have it; or several files, with an index
tokenizer_config.json        what the special tokens are called, if they have other names than usual
generation_config.json       which ids may never be said (bad_words_ids), if any
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.files import read_json, read_small
from fastformer.models import Transformer
from fastformer.models.bart import transformer_from_bart
from fastformer.models.pretrained import CONFIG
from fastformer.models.t5 import NAMES as T5_NAMES
from fastformer.models.t5 import transformer_from_t5
from fastformer.models.weights import (
    WEIGHTS,
    SavedWeights,
    check_finite,
    check_plain,
    check_shard,
    index_of,
    read_index,
)
from fastformer.run_folder.torch_archive import read_archive

logger = logging.getLogger("fastformer")

GENERATION = "generation_config.json"
_OLD_WEIGHTS = "pytorch_model.bin"


def model_type(folder: Path) -> str | None:
    """The family whose model a folder holds, such as "bart"; None where it isn't one of transformers."""
    try:
        values = read_json(folder / CONFIG)
    except (OSError, ValueError):
        return None  # the loader says what is wrong with it
    found = values.get("model_type") if "architecture" not in values else None
    return found if isinstance(found, str) else None


def special_tokens(
    folder: Path, settings: Mapping[str, Any], vocab: Mapping[str, int], names: Mapping[str, str], free: Iterable[str]
) -> dict[str, int | None]:
    """The ids of special tokens, held against the settings of the model.

    Args:
        folder: may name the tokens otherwise.
        settings: of the model, with "pad_token_id" for "pad".
        vocab: the ids of tokens.
        names: what the tokens are called, by their kinds.
        free: kinds that the settings don't mention.

    Raises:
        ValueError: a token that the vocabulary lacks, or an id that isn't the model's.
    """
    named, found = dict(names), {}
    if (folder / "tokenizer_config.json").is_file():
        for key, value in read_json(folder / "tokenizer_config.json").items():
            name = value.get("content") if isinstance(value, dict) else value  # with its options
            if key.removesuffix("_token") in named and key.endswith("_token") and isinstance(name, str):
                named[key.removesuffix("_token")] = name
    for kind, name in named.items():
        found[kind], said = vocab.get(name), settings.get(f"{kind}_token_id")
        if found[kind] is None or (
            kind not in free and found[kind] not in (said if isinstance(said, list) else [said])
        ):
            raise ValueError(
                f"expected the vocabulary of {folder} to have {name!r}"
                + ("" if kind in free else f" with the {kind}_token_id of {CONFIG}, {said!r}")
                + f", got {found[kind]!r}"
            )
    return found


def load_weights(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    unk: int | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Transformer:
    """The model of a folder.

    Ids that its settings never let it say have a bias that nothing outweighs, so that they are not said here either.

    Args:
        folder: see above.
        settings: its config.json.
        unk: the tokenizer's id of the unknown.
        device: where the parameters go; None: the CPU.
        dtype: what they become; None: what they were saved as, but fp32 for fp16 on a CPU, which computes it slowly.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: a file that is missing or damaged, or files that don't belong together.
    """
    state = _weights(folder)
    is_half = any(tensor.dtype == torch.float16 for tensor in state.values())
    if dtype is None and is_half and torch.device(device or "cpu").type == "cpu":
        dtype = torch.float32
    never = _never(folder, settings)
    if settings["model_type"] in T5_NAMES:
        if never:
            logger.warning("%s forbids the ids %s: give bad_words_ids to generate", folder, never)
        return transformer_from_t5(settings, state, unk=unk, device=device, dtype=dtype)
    state = _with_prefix(state)
    return transformer_from_bart(settings, state, unk=unk, never=never, device=device, dtype=dtype)


def _with_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of a model with a head: without one they lack a prefix. Old files of BART hold a version, too."""
    kept = {name: tensor for name, tensor in state.items() if not name.endswith(".version")}
    if any(name.startswith("model.") for name in kept):
        return kept
    return {f"model.{name}": tensor for name, tensor in kept.items()}


def generation_settings(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a search is asked to do: by a file of its own, or in older folders by the model's settings."""
    file = folder / GENERATION
    return read_json(file) if file.is_file() else settings


def _never(folder: Path, settings: Mapping[str, Any]) -> list[int]:
    """The ids that may never be said."""
    words = generation_settings(folder, settings).get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and all(map(_is_id, word)) for word in words):
        raise ValueError(f"expected bad_words_ids to be lists of ids, got {words!r:.60}")
    if any(len(word) != 1 for word in words):
        logger.warning("%s forbids sequences of tokens, which is left out: give bad_words_ids to generate", folder)
    return [word[0] for word in words if len(word) == 1]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _weights(folder: Path) -> dict[str, Tensor]:
    old = folder / _OLD_WEIGHTS
    index = index_of(old)
    if (folder / WEIGHTS).is_file() or index_of(folder / WEIGHTS) or not (old.is_file() or index):
        return SavedWeights.in_folder(folder).read()
    if index is None:
        return _unpickled(old)
    state: dict[str, Tensor] = {}
    for file, names in read_index(index).items():
        found = _unpickled(file)
        check_shard(index, file, names, found)
        state |= found
    return state


def _unpickled(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as data:
        state = read_archive(data, file, "file")
    if not isinstance(state, dict):
        raise ValueError(f"expected {file} to hold tensors by name, got {type(state).__name__}")
    check_plain(file, state)
    check_finite(file, state)
    return state


def read_file(file: Path) -> bytes:
    """The bytes of a small file.

    Raises:
        ValueError: it isn't there, or is far too large.
    """
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which isn't there: was the model saved completely?")
    return read_small(file)
