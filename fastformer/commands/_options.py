"""Flags made from the fields of `GenerationConfig`, which alone define their types, bounds, defaults and help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser

# The flags of every command that decodes, in the order of its help.
OPTIONS = (
    "num_beams",
    "beam_rules",
    "length_penalty",
    "early_stopping",
    "num_beam_groups",
    "diversity_penalty",
    "min_new_tokens",
    "max_new_tokens",
    "max_time",
    "prompt_lookup_num_tokens",
    "cache_dtype",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "temperature",
    "top_k",
    "top_p",
    "seed",
)


def add_options(parser: ArgumentParser, names: Sequence[str]) -> dict[str, Any]:
    """Adds a flag to a parser for each of some fields of `GenerationConfig`. Returns their types by name."""
    from fastformer.generation.config import GenerationConfig  # imports PyTorch, which transcribing doesn't need

    return add_fields(parser, GenerationConfig, names)


def add_fields(parser: ArgumentParser, kind: type[Any], names: Sequence[str]) -> dict[str, Any]:
    """Adds a flag to a parser for each of some fields of a dataclass: type, default, and help from its docstring.

    Returns:
        The type of each flag, with its bounds, by name.
    """
    hints, texts = get_type_hints(kind, include_extras=True), _help(kind)  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in fields(kind)}
    for name in names:
        parser.add_argument(f"--{name}", type=hints[name], default=defaults[name], help=texts[name])
    return {name: hints[name] for name in names}


@cache
def _help(kind: Any) -> dict[str, str]:
    """Returns the first sentence about each field, without its period."""
    texts = {p.arg_name: p.description or "" for p in parse_docstring(kind.__doc__ or "").params}
    return {name: " ".join(text.split()).partition(". ")[0].rstrip(".") for name, text in texts.items()}


def constraint_options(
    schema: str | None, regex: str | None, choices: Sequence[str] | None, grammar: str | None
) -> dict[str, Any]:
    """Returns the options of a text's constraint from flags, of which schema and grammar are the paths of files.

    Raises:
        ValueError: a file doesn't exist, or isn't a text.
    """
    options: dict[str, Any] = {"regex": regex, "choices": choices or None}
    for name, path in (("schema", schema), ("grammar", grammar)):
        try:
            options[name] = None if path is None else Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected --{name} to be a file of text, got {path} ({error})") from error
    return {name: value for name, value in options.items() if value is not None}


def given_options(path: str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that flags set, merged over those of a YAML file.

    Raises:
        ValueError: the file does not exist, is no YAML, or has a name that is no option.
    """
    if path is None:
        return dict(flags)
    from fastformer.generation.config import OPTIONS as KNOWN
    from fastformer.generation.foreign_options import check_names
    from fastformer.training.yaml_file import read_yaml

    values = read_yaml(path)
    try:
        check_names(values, KNOWN)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {**values, **flags}
