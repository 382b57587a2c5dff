"""`fastformer train`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any, Literal, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser

from fastformer.commands import command_line
from fastformer.commands._parsing import Help, explain
from fastformer.training.build import start
from fastformer.training.config import ARCHITECTURES, OF_TOKENIZER, SECTIONS, Model, check_names, merged, unused
from fastformer.training.interrupts import Interrupts
from fastformer.training.settings import read_yaml, run_config

logger = logging.getLogger("fastformer")

# What is short to type, and what it stands for.
SHORT = {"--model": "--model.name", "--preset": "--model.preset"}
# The tokenizer decides on these.
NO_FLAGS = OF_TOKENIZER
USAGE = "fastformer train RUN [--config FILE] [--resume] [--SETTING VALUE ...]"


def train(run: str, *, config: str | None = None, resume: bool | Literal["auto"] = False, **settings: Any) -> int:
    """Trains on text files or on the built-in task; writes a run folder.

    Args:
        run: the run folder
        config: a YAML file with settings; flags override it
        resume: go on with the run in the folder; auto: go on if there is one, else begin
        settings: those that flags gave, as `TrainConfig.from_dict` reads them
    """
    with Interrupts() as interrupts:
        given = merged(read_settings(config), settings) if config else settings
        trainer = start(run_config(run, given, resume), run, resume=resume, interrupts=interrupts)
        for sentence in unused(trainer.config, given):
            logger.warning(sentence)
        trainer.train()
    if trainer.interrupted:
        return interrupts.exit_code
    command = "generate" if trainer.config.model == "gpt" else "translate"
    print(f"the model is in {run}: {command_line(command, run)} 'some text'")
    return 0


def read_settings(path: str) -> dict[str, Any]:
    """The settings that a person wrote down in a YAML file, each as its type.

    Raises:
        ValueError: no such file, no YAML, an unknown setting, or a value of another type.
    """
    values = merged(read_yaml(path), {})
    parser = ArgumentParser(exit_on_error=False)
    hints = add_settings(parser)
    try:
        check_names(values)
        return dict(parser.parse_object(values, defaults=False).as_dict())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except argparse.ArgumentError as error:
        raise ValueError(f"{path}: {explain(str(error), hints, flag='')}") from error


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Gives a parser a flag for every setting, in sections. Returns the type of each, by its flag's name."""
    hints: dict[str, Any] = {}
    for section in SECTIONS:
        if section is Model:
            hints |= _add_model(parser)
        else:
            parser.add_class_arguments(section)
            hints |= get_type_hints(section, include_extras=True)
    return hints


def _add_model(parser: ArgumentParser) -> dict[str, Any]:
    """--model gpt, --preset tiny, and --model.X for each setting X of any architecture."""
    group = parser.add_argument_group(
        "The model",
        "--model and --preset choose it; --model.X sets X over the preset's value. `--model.help gpt` shows what a gpt "
        "has and what its presets are.",
    )
    group.add_argument("--model.help", action=_ModelHelp, metavar="NAME", help="show an architecture and its presets")
    kinds = get_type_hints(Model)
    texts = {"model.name": "the architecture, also --model", "model.preset": "the sizes to begin from, also --preset"}
    hints = {"model.help": kinds["model"], "model.name": kinds["model"], "model.preset": kinds["preset"]}
    for name, default in (("model.name", Model.model), ("model.preset", Model.preset)):
        group.add_argument(f"--{name}", type=hints[name], default=default, help=texts[name])
    # An architecture may have other choices for a setting than another one has: the flag takes all of them, and the
    # settings of the architecture that is trained say which of them are its own.
    for config_class, _ in ARCHITECTURES.values():
        described = {
            p.arg_name: (p.description or "").rstrip(".") for p in parse_docstring(config_class.__doc__).params
        }
        for name, hint in get_type_hints(config_class, include_extras=True).items():
            if name not in NO_FLAGS:
                key, text = f"model.{name}", described[name]
                hints[key] = hints[key] | hint if key in hints else hint
                texts[key] = (
                    texts[key] if text in texts.get(key, "") else "; or ".join(filter(None, (texts.get(key), text)))
                )
    for key, hint in hints.items():
        if key not in ("model.help", "model.name", "model.preset"):
            group.add_argument(f"--{key}", type=hint, default=argparse.SUPPRESS, help=texts[key])
    return hints


class _ModelHelp(argparse.Action):
    """--model.help gpt: prints the settings of an architecture and what its presets change."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(
            option_strings, dest, nargs="?", default=argparse.SUPPRESS, choices=list(ARCHITECTURES), **options
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for name in [values] if values else ARCHITECTURES:
            config_class, presets = ARCHITECTURES[name]
            shown = ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=Help)
            shown.add_class_arguments(config_class, "model", as_group=False, skip=NO_FLAGS)
            print(f"--model {name}\n\n{shown.format_help().strip()}\n\npresets (--preset), over the defaults above:")
            for preset, changes in presets.items():
                print(f"  {preset:<12} {', '.join(f'{key} {value}' for key, value in changes.items()) or '-'}")
            print()
        parser.exit()
