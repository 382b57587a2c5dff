"""The options of decoding that a folder of transformers asks for in its generation_config.json."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from fastformer.checkpoints import generation_settings
from fastformer.generation.config import OPTIONS, GenerationConfig

logger = logging.getLogger("fastformer")

# The ids are in the model's config by then, and the others change no token.
_OF_THE_MODEL = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version",
                 "use_cache", "cache_implementation")  # fmt: skip
# Options that aren't known here, with the values that change nothing; False changes nothing in any of them.
_NEUTRAL = {"typical_p": 1.0, "min_p": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0,
            "guidance_scale": 1.0, "top_h": 1.0, "num_assistant_tokens": 20}  # fmt: skip
_SAMPLING = ("temperature", "top_k", "top_p")


def folder_options(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of decoding that a folder's generation_config.json asks for.

    Options that aren't known here are left out, and named in a warning.

    Args:
        folder: as transformers saves it; of a run folder there are none.

    Raises:
        ValueError: a damaged file.
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
    """The options that were given, and behind them those of a folder, as transformers applies them.

    Args:
        theirs: from `folder_options`.
        options: fields of `GenerationConfig`. One that shapes sampling asks for it, where do_sample isn't given.
        max_len: of the model; a max_length beyond it says nothing.

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
