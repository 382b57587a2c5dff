"""The options of decoding in the generation_config.json of a folder that transformers saved."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from fastformer.checkpoints import generation_settings
from fastformer.generation.config import OPTIONS, GenerationConfig

logger = logging.getLogger("fastformer")

# The ids are in the model's config already; the other options change no token.
_OF_THE_MODEL = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version",
                 "use_cache", "cache_implementation")  # fmt: skip
# Options that fastformer doesn't have, with the values that change nothing. False changes nothing in any option.
_NEUTRAL = {"typical_p": 1.0, "min_p": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0,
            "guidance_scale": 1.0, "top_h": 1.0, "num_assistant_tokens": 20}  # fmt: skip
_SAMPLING = ("temperature", "top_k", "top_p")


def folder_options(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the decoding options in a folder's generation_config.json.

    Options that fastformer doesn't have are dropped; a warning names them.

    Args:
        folder: a folder that transformers saved. A run folder has no such options.

    Raises:
        ValueError: the file is damaged.
    """
    found = {name: value for name, value in generation_settings(folder).items() if name not in _OF_THE_MODEL}
    unknown = [
        f"{name}={value!r:.40}"
        for name, value in found.items()
        if name not in OPTIONS and value is not False and value != _NEUTRAL.get(name)
    ]
    if unknown:
        logger.warning("%s has search options that are not applied: %s", folder, ", ".join(unknown))
    return {name: value for name, value in found.items() if name in OPTIONS}


def with_folder_options(theirs: Mapping[str, Any], options: Mapping[str, Any], max_len: int) -> GenerationConfig:
    """Returns a config of given options and a folder's, as transformers combines them.

    Args:
        theirs: the result of `folder_options`.
        options: fields of `GenerationConfig`, which override the folder's. An option that shapes sampling implies
            do_sample if that isn't given.
        max_len: the model's max_len. A max_length in the folder beyond it is ignored.

    Raises:
        ValueError: an unknown option, or one that is out of its range.
    """
    usable, given = dict(theirs), dict(options)
    if given.get("max_new_tokens") is not None or _is_beyond(usable.get("max_length"), max_len):
        usable.pop("max_length", None)
    if "do_sample" not in given and any(given.get(name) is not None for name in _SAMPLING):
        given["do_sample"] = True
    return GenerationConfig.from_options({**given, "generation_config": usable} if usable else given)


def _is_beyond(length: object, max_len: int) -> bool:
    return isinstance(length, int) and length > max_len
