"""The folder of a BART as transformers saves it: read without transformers.

tokenizer.json               a byte-level BPE; or vocab.json and merges.txt, as older folders have it

`run_folder.hugging_face` says what else there is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastformer.data.bart import BartTokenizer, byte_level_bpe
from fastformer.data.marian import check_vocab
from fastformer.data.tokenizer import TOKENIZER, read_backend
from fastformer.files import read_json
from fastformer.models import Transformer
from fastformer.models.foreign import flag_of
from fastformer.models.pretrained import CONFIG
from fastformer.run_folder.hugging_face import (
    generation_settings,
    load_weights,
    read_file,
    special_tokens,
)

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger("fastformer")

_NAMES = {"unk": "<unk>", "eos": "</s>", "pad": "<pad>", "bos": "<s>"}
# What a search may be asked for that changes what is said, with the values that ask for nothing.
_ASKED = {"forced_bos_token_id": None, "no_repeat_ngram_size": 0, "min_length": 0, "repetition_penalty": 1.0}


def load_bart(
    folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, BartTokenizer]:
    """The model and the tokenizer.

    What its generation_config.json asks of a search has to be given to `generate`; the log names it.

    Args:
        folder: see above.
        device, dtype: see `load_weights`.

    Raises:
        ImportError: safetensors or tokenizers is not installed.
        ValueError: a file that is missing or damaged, or files that don't belong together.
    """
    settings = read_json(folder / CONFIG)
    backend = _tokenizer(folder)
    special = special_tokens(folder, settings, backend.get_vocab(), _NAMES, ["unk"])
    try:
        model = load_weights(folder, settings, unk=special["unk"], device=device, dtype=dtype)
        config = model.config
        tokenizer = BartTokenizer(backend, config.vocab_size, config.special_ids, special["bos"], str(folder))
    except (ValueError, IndexError) as error:
        raise ValueError(f"{folder}: {error}") from error
    _tell(folder, generation_settings(folder, settings))
    return model, tokenizer


def _tokenizer(folder: Path) -> tokenizers.Tokenizer:
    if (folder / TOKENIZER).is_file():
        return read_backend(folder / TOKENIZER, read_json(folder / TOKENIZER))
    vocab = check_vocab(folder / "vocab.json", read_json(folder / "vocab.json"))
    merges = read_file(folder / "merges.txt")
    file = folder / "tokenizer_config.json"
    has_space = file.is_file() and flag_of(read_json(file), "add_prefix_space", False)
    return byte_level_bpe(folder / "merges.txt", vocab, merges, add_prefix_space=has_space)


def _tell(folder: Path, asked: Mapping[str, Any]) -> None:
    found = [f"{name}={asked[name]}" for name, none in _ASKED.items() if asked.get(name) not in (None, none)]
    if found:
        logger.warning("%s asks a search for %s: give generate what you want of it", folder, ", ".join(found))
