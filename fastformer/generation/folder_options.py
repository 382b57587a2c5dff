"""The defaults of a request to a folder that transformers saved: the options in its generation_config.json.

Older folders have the options among the settings of the model, in config.json.

The file decides defaults and nothing else. An option means the same for every folder, whether its file has options, has
none, or doesn't exist; an option that neither the request nor the file has gets transformers' default.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from fastformer.checkpoints import generation_settings, gguf, load_model, model_bin
from fastformer.checkpoints.hf import model_type
from fastformer.checkpoints.hf.adapters import load_adapter
from fastformer.checkpoints.hf.search_file import GENERATION, search_settings
from fastformer.generation.config import OPTIONS, GenerationConfig, Precision
from fastformer.generation.engines import Engine, rounded_for_steps
from fastformer.generation.model_protocols import DTYPES, asked_precision, check_precision

logger = logging.getLogger("fastformer")

# The ids are in the model's config already; the other options change no token.
_OF_THE_MODEL = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version",
                 "use_cache", "cache_implementation")  # fmt: skip
# Options that fastformer doesn't have, with the values that change nothing. False changes nothing in any option.
_NEUTRAL = {"typical_p": 1.0, "min_p": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0,
            "guidance_scale": 1.0, "top_h": 1.0, "num_assistant_tokens": 20}  # fmt: skip
_SAMPLING = ("temperature", "top_k", "top_p")
_OWN = ("beam_rules", "engine", "precision", "seed", "shortlist", "window")  # options that transformers doesn't have


def folder_options(folder: str | os.PathLike[str], unused: Collection[str] = ()) -> dict[str, Any] | None:
    """Returns the decoding options of a folder's requests: the `saved_options` that fastformer has and the caller uses.

    Options that the caller doesn't use, or that fastformer doesn't have, are dropped; a warning names them.

    Args:
        folder: see `saved_options`.
        unused: the names of options that the caller doesn't use.

    Returns:
        The options by name. None: see `saved_options`.

    Raises:
        ValueError: the file is damaged.
    """
    if (settings := saved_options(folder)) is None:
        return None
    options = {name: value for name, value in settings.items() if name not in _OF_THE_MODEL}
    known = {name: value for name, value in options.items() if name in OPTIONS and name not in unused}
    dropped = [
        f"{name}={value!r:.40}"
        for name, value in options.items()
        if name not in known and value is not False and value != _neutral(name)
    ]
    if dropped:
        logger.warning("%s has search options that are not applied: %s", folder, ", ".join(dropped))
    return known


def saved_options(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns all decoding options that a model's files have.

    Args:
        folder: a folder that transformers saved or CTranslate2 converted, what `fastformer quantize` wrote of one, or a
            GGUF file.

    Returns:
        The options by name. None: the folder is another, so that the defaults of its requests are those of
        `GenerationConfig`.

    Raises:
        ValueError: the file is damaged.
    """
    if gguf.is_gguf(folder):
        return gguf.search_options(folder)
    if Path(folder, GENERATION).is_file() or model_bin.is_folder(folder):
        return generation_settings(folder)
    if model_type(Path(folder)) is None:
        return None
    settings = search_settings(Path(folder))
    names = {name for name in OPTIONS if name not in _OWN}.union(_NEUTRAL)
    return {name: value for name, value in settings.items() if name in names and value is not None}


def _neutral(name: str) -> Any:
    """Returns the value of an option that changes nothing."""
    return getattr(GenerationConfig, name) if name in OPTIONS else _NEUTRAL.get(name)


def with_folder_options(
    of_folder: Mapping[str, Any] | None, options: Mapping[str, Any], max_len: int
) -> GenerationConfig:
    """Returns a config of given options and a folder's, as transformers combines them. The log names the folder's.

    Args:
        of_folder: the result of `folder_options`.
        options: fields of `GenerationConfig`, which override the folder's. An option that shapes sampling implies
            do_sample if that isn't given.
        max_len: the model's max_len. A max_length in the folder beyond it is ignored.

    Raises:
        ValueError: an unknown option, or one that is out of its range.
    """
    given = dict(options)
    if "do_sample" not in given and any(given.get(name) is not None for name in _SAMPLING):
        given["do_sample"] = True
    if of_folder is None:
        return GenerationConfig.from_options(given)
    usable = {name: value for name, value in of_folder.items() if name not in given}
    if given.get("max_new_tokens") is not None or _is_beyond(usable.get("max_length"), max_len):
        usable.pop("max_length", None)
    config = GenerationConfig.from_options({**given, "generation_config": usable})
    applied = [f"{name}={value!r:.40}" for name, value in usable.items() if config.do_sample or name not in _SAMPLING]
    if applied:
        logger.info("defaults of the model's files: %s", ", ".join(applied))
    return config


# A text by which tokenizers differ.
_SAMPLE = "The quick brown fox's 12,345 jumps: über naïve 日本語 emoji 🙂\n\tdef f(x): return {'a': x**2} <end> "


def load_language_model(
    folder: str | os.PathLike[str],
    options: Mapping[str, Any],
    unused: Collection[str],
    device: torch.device | str | None,
    precision: Precision | None,
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the model and the tokenizer of a folder, and the config and precision of its decoding, by these names."""
    check_precision(precision)
    file_options = folder_options(folder, unused)
    model, tokenizer = load_model(folder, ("GPT",), device=device, dtype=DTYPES.get(precision or ""))
    model = rounded_for_steps(model, precision)
    config = with_folder_options(file_options, options, model.config.max_len)
    return model, tokenizer, {"config": config, "precision": asked_precision(model, precision)}


def load_draft_model(
    folder: str | os.PathLike[str], tokenizer: Any, device: torch.device | str | None, precision: Precision | None
) -> Any:
    """Returns the language model of a folder that is to draft tokens for another one.

    Args:
        folder, device, precision: see `AsyncGenerator.from_pretrained`.
        tokenizer: the other model's tokenizer.

    Raises:
        ValueError: the folder has no language model, or another tokenizer.
    """
    model, own = load_model(folder, ("GPT",), device=device, dtype=DTYPES.get(precision or ""))
    if own.encode(_SAMPLE) != tokenizer.encode(_SAMPLE):
        raise ValueError(f"expected a draft model with the model's tokenizer, got another one in {folder}")
    return model


def load_adapters(engine: Engine, model: object, folders: Mapping[str, str | os.PathLike[str]]) -> None:
    """Gives an engine the LoRA adapters of folders that peft saved.

    Args:
        engine: the engine of the model.
        model: the model that the adapters change.
        folders: the folder of each adapter, by the name by which requests choose it.

    Raises:
        ValueError: see `Generator.load_adapter`.
    """
    for name, folder in folders.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"expected the name of an adapter, got {name!r:.60}")
        engine.add_adapter(name, load_adapter(folder, model))


def _is_beyond(length: object, max_len: int) -> bool:
    return isinstance(length, int) and length > max_len
