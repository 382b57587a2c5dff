"""generation_config.json, the options of a saved model's search; in older folders they are among its settings.

The ids among them belong to the model that is loaded. The options of a decoder are the defaults of its requests
(`generation.folder_options`). A translator's rules of search are other ones, so that its options have to be asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastformer.files import read_json
from fastformer.models.pretrained import CONFIG
from fastformer.special_ids import SpecialIds

logger = logging.getLogger("fastformer")

GENERATION = "generation_config.json"
FORCED = "forced_bos_token_id"
_PAD, _EOS, _START = "pad_token_id", "eos_token_id", "decoder_start_token_id"
# What changes the output of a translator's search, each with the value that changes nothing. Those of beams and lengths
# are not among them: nearly every folder has some.
_OPTIONS = {FORCED: None, "no_repeat_ngram_size": 0, "min_length": 0, "repetition_penalty": 1.0, "min_new_tokens": 0,
            "begin_suppress_tokens": None, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
            "sequence_bias": None, "exponential_decay_length_penalty": None}  # fmt: skip


def search_settings(folder: Path, settings: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Returns the options of a search, from their own file or, in older folders, from the model's settings.

    Args:
        folder: the folder.
        settings: the model's settings; None: they are read.
    """
    file = folder / GENERATION
    if file.is_file():
        return read_json(file)
    return read_json(folder / CONFIG) if settings is None else settings


def generation_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns a saved folder's options of a search; `generate` takes them as its generation_config.

    Args:
        folder: has a generation_config.json. The result is empty if it has none, as a run folder does.

    Raises:
        ValueError: the file is damaged.
    """
    file = Path(folder) / GENERATION
    if not file.is_file():
        return {}
    return {name: value for name, value in read_json(file).items() if value is not None and not name.startswith("_")}


def with_search_ids(
    settings: Mapping[str, Any], search: Mapping[str, Any], *, reads_sources: bool = False
) -> dict[str, Any]:
    """Returns a model's settings with the special ids of its search, which may differ if the model was trained further.

    Args:
        settings: the model's config.json.
        search: the model's generation_config.json.
        reads_sources: for a model with an encoder, whose pad and eos are those of its sources too: these stay. The
            search's start of the decoder replaces that of the settings, and its other ids of eos are added.
    """
    if not reads_sources:
        ids = {name: search.get(name) for name in (_PAD, _EOS)}
    else:
        own, ends, start = settings.get(_EOS), _ends(search), search.get(_START)
        is_added = isinstance(own, int) and own in ends
        ids = {_EOS: [own, *(end for end in ends if end != own)] if is_added and len(ends) > 1 else None}
        ids[_START] = None if isinstance(start, list) else start
    return {**settings, **{name: value for name, value in ids.items() if value is not None}}


def forbidden_ids(folder: Path, search: Mapping[str, Any]) -> list[int]:
    """Returns the ids that a model must never generate, as transformers reads them: of bad words, no id of eos is one.

    Raises:
        ValueError: they are not ids.
    """
    words, never = (search.get(name) or [] for name in ("bad_words_ids", "suppress_tokens"))
    if not isinstance(words, list) or not all(isinstance(word, list) and all(map(_is_id, word)) for word in words):
        raise ValueError(f"expected bad_words_ids to be lists of ids, got {words!r:.60}")
    if not isinstance(never, list) or not all(map(_is_id, never)):
        raise ValueError(f"expected suppress_tokens to be a list of ids, got {never!r:.60}")
    if any(len(word) != 1 for word in words):
        logger.warning("%s forbids sequences of tokens, which is not applied: pass bad_words_ids to generate", folder)
    ends = _ends(search)
    return sorted({word[0] for word in words if len(word) == 1 and word[0] not in ends}.union(never))


def warn_of_unapplied(folder: Path, search: Mapping[str, Any], ids: SpecialIds, *, has_languages: bool) -> None:
    """Names the options of a translator's search that have to be asked for.

    Args:
        folder: the folder.
        search: its options.
        ids: those of the loaded model.
        has_languages: whether the tokenizer chooses the first token of a translation.
    """
    unapplied = [
        name
        for name, none in _OPTIONS.items()
        if search.get(name) not in (None, none) and not (name == FORCED and has_languages)
    ]
    if (ends := _ends(search)) and {*map(str, ends)} != {*map(str, ids.eos)}:
        unapplied.append(_EOS)
    if search.get(_START) not in (None, ids.start):
        unapplied.append(_START)
    if unapplied:
        shown = ", ".join(f"{name}={search[name]}" for name in unapplied)
        logger.warning("%s has search options that are not applied: pass %s to generate", folder, shown)


def _ends(search: Mapping[str, Any]) -> list[Any]:
    ends = search.get(_EOS)
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
