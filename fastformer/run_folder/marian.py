"""The folder of a Marian as transformers saves it: read without transformers.

config.json                  says "model_type": "marian"
model.safetensors            or pytorch_model.bin, as older ones have it
source.spm, target.spm       SentencePiece models
vocab.json                   the ids of pieces; target_vocab.json where the target has its own
generation_config.json       which ids may never be said (bad_words_ids), if any
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.data.marian import MarianTokenizer, check_vocab, read_sentencepiece
from fastformer.models import Transformer
from fastformer.models.marian import transformer_from_marian
from fastformer.models.pretrained import CONFIG, WEIGHTS, read_weights

logger = logging.getLogger("fastformer")

_OLD_WEIGHTS = "pytorch_model.bin"


def is_marian(folder: Path) -> bool:
    """Whether a folder's config.json is that of a Marian of transformers."""
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # somebody else says what is wrong with it
    return isinstance(values, dict) and values.get("model_type") == "marian" and "architecture" not in values


def load_marian(
    folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, MarianTokenizer]:
    """The model and the tokenizer.

    Ids that its settings never let it say have a bias that nothing outweighs, so that they are not said here either.

    Args:
        folder: see above.
        device: where the parameters go; None: the CPU.
        dtype: what they become; None: what they were saved as, but fp32 for fp16 on a CPU, which computes it slowly.

    Raises:
        ImportError: safetensors or sentencepiece is not installed.
        ValueError: a file that is missing or damaged, or files that don't belong together.
    """
    settings = _read_json(folder / CONFIG)
    # All small files first: they name what is wrong in no time.
    vocab = check_vocab(folder / "vocab.json", _read_json(folder / "vocab.json"))
    own = folder / "target_vocab.json"
    target_vocab = check_vocab(own, _read_json(own)) if own.is_file() else vocab
    source, target = (read_sentencepiece(file, _read(file)) for file in (folder / "source.spm", folder / "target.spm"))
    names = {"unk": "<unk>", "eos": "</s>", "pad": "<pad>"}
    if (folder / "tokenizer_config.json").is_file():
        for key, value in _read_json(folder / "tokenizer_config.json").items():
            name = value.get("content") if isinstance(value, dict) else value  # with its options
            if key.removesuffix("_token") in names and key.endswith("_token") and isinstance(name, str):
                names[key.removesuffix("_token")] = name
    for kind, name in names.items():
        found, said = target_vocab.get(name), settings.get(f"{kind}_token_id")
        if found is None or (kind != "unk" and found not in (said if isinstance(said, list) else [said])):
            raise ValueError(
                f"expected the vocabulary of {folder} to have {name!r}"
                + ("" if kind == "unk" else f" with the {kind}_token_id of {CONFIG}, {said!r}")
                + f", got {found!r}"
            )
    try:
        state = _weights(folder)
        is_half = any(tensor.dtype == torch.float16 for tensor in state.values())
        if dtype is None and is_half and torch.device(device or "cpu").type == "cpu":
            dtype = torch.float32
        model = transformer_from_marian(
            settings, state, unk=target_vocab[names["unk"]], never=_never(folder, settings), device=device,
            dtype=dtype,
        )  # fmt: skip
        config = model.config
        if max(vocab.values()) >= (config.source_vocab_size or config.vocab_size):
            raise ValueError(f"its vocab.json has ids up to {max(vocab.values())}, which the model doesn't have")
        tokenizer = MarianTokenizer(source, target, vocab, target_vocab, config.vocab_size, config.special_ids)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{folder}: {error}") from error
    return model, tokenizer


def _never(folder: Path, settings: dict[str, Any]) -> list[int]:
    """The ids that may never be said."""
    file = folder / "generation_config.json"
    words = (_read_json(file) if file.is_file() else settings).get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and all(map(_is_id, word)) for word in words):
        raise ValueError(f"expected bad_words_ids to be lists of ids, got {words!r:.60}")
    if any(len(word) != 1 for word in words):
        logger.warning("%s forbids sequences of tokens, which is left out: give bad_words_ids to generate", folder)
    return [word[0] for word in words if len(word) == 1]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _weights(folder: Path) -> dict[str, Tensor]:
    file, old = folder / WEIGHTS, folder / _OLD_WEIGHTS
    if file.is_file() or not old.is_file():
        return read_weights(file)
    try:
        state = torch.load(old, map_location="cpu", weights_only=True)
    except Exception as error:  # what the unpickler and the archive's reader raise
        raise ValueError(f"{old} is damaged or holds more than tensors ({type(error).__name__})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"expected {old} to hold tensors by name, got {type(state).__name__}")
    return state


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which isn't there: was the model saved completely?")
    return file.read_bytes()


def _read_json(file: Path) -> dict[str, Any]:
    data = _read(file)
    try:
        values = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON or cut short ({error}): copy it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected {file} to hold a JSON object, got a {type(values).__name__}")
    return values
