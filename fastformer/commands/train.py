"""`fastformer train`."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, cast, get_args, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser

from fastformer.commands import _words, command_line
from fastformer.commands._parsing import Help, explain
from fastformer.settings import choices, suggestion, why_not
from fastformer.training.build import start
from fastformer.training.config import check_names, merged, unused, whole_numbers
from fastformer.training.interrupts import Interrupts
from fastformer.training.run_config import run_config
from fastformer.training.sections import ARCHITECTURES, OF_TOKENIZER, SECTIONS, SEVERAL, Architecture, Model
from fastformer.training.world import World, restarts
from fastformer.training.yaml_file import read_yaml

logger = logging.getLogger("fastformer")

# The short flags, with the flags that they stand for.
SHORT = {"--model": "--model.name", "--preset": "--model.preset"}
TEXTS = ("user_tokens",)
LISTED = frozenset(SEVERAL - {"tokenizer"})  # usually there is one tokenizer
# The settings that the tokenizer decides.
NO_FLAGS = OF_TOKENIZER
NUM_TOKENS = 1000  # the vocabulary size of a model that is only described
USAGE = "fastformer train RUN [--config FILE] [--resume] [--SETTING VALUE ...]"


def train(run: str, *, config: str | None = None, resume: bool | Literal["auto"] = False, **settings: Any) -> int:
    """Trains on text files or on the built-in task; writes a run folder.

    Args:
        run: the run folder
        config: a YAML file with settings; flags override it
        resume: resume the run in the folder from its last checkpoint; auto: resume if there is one, else begin. To
            start again from its best model instead, name it with --init_from and give another folder
        settings: the given flags, as `TrainConfig.from_dict` reads them
    """
    with Interrupts() as interrupts:
        given = merged(read_settings(config), settings) if config else settings
        resume = resume or ("auto" if restarts() else False)  # torchrun starts the same command anew
        known = run_config(run, given, resume)
        with World.join(known.device, known.rank_timeout) as world:
            interrupts.ignores_second = world.is_launched
            # Machines may have restarted different numbers of times; if one of them resumes, all do.
            resume = next(filter(None, world.gather(resume)), False)
            known = world.run_on_rank0(lambda: run_config(run, given, resume))
            trainer = start(known, run, resume=resume, interrupts=interrupts, world=world)
            for sentence in unused(trainer.config, given):
                logger.warning(sentence)
            trainer.train()
    if trainer.interrupted:
        return interrupts.exit_code
    if world.rank:
        return 0
    command = "generate" if trainer.config.model == "gpt" else "translate"
    print(f"the model is in {run}: {command_line(command, run)} 'some text'")
    return 0


def read_settings(path: str) -> dict[str, Any]:
    """Reads the settings in a YAML file, each as its type.

    Raises:
        ValueError: the file does not exist, is no YAML, or has an unknown setting or a value of another type.
    """
    values = merged(read_yaml(path), {})
    parser = ArgumentParser(exit_on_error=False)
    hints = add_settings(parser)
    try:
        check_names(values)
        values = _checked(values, hints)
        return dict(parser.parse_object(values, defaults=False).as_dict())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except argparse.ArgumentError as error:
        raise ValueError(f"{path}: {explain(str(error), hints, flag='')}") from error


def _checked(values: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    """Returns the values; refuses those that jsonargparse would read as something else.

    Raises:
        ValueError: a text stands for true or false, or the tokenizer decides a setting.
    """
    values = whole_numbers(values)
    model = dict(values.get("model", {}))
    if model.get("source_vocab_size", 0) is None:  # the form in the config.yaml of a run
        del model["source_vocab_size"]
    for name in NO_FLAGS & model.keys():
        advice = "; give vocab_size outside of the model's settings" if name.endswith("vocab_size") else ""
        raise ValueError(f"expected no {name} among the model's settings, because the tokenizer determines it{advice}")
    flat = {**values, **{f"model.{name}": value for name, value in model.items()}}
    for name, value in flat.items():
        hint = hints.get(name)
        if not isinstance(value, str) or hint is None or _words.is_text(hint) or value in choices(hint):
            continue
        # A text may spell a number, but jsonargparse would read more texts than that as numbers.
        plain = None if bool in (hint, *get_args(hint)) else _words.plain(value, hint)
        if plain is None:
            quotes = ": leave the quotes out" if value.lower() in _words.SWITCH else ""
            raise ValueError(
                f"expected {name} {why_not(value, hint)}, got {value!r}{suggestion(value, choices(hint))}{quotes}"
            )
        flat[name] = plain
    model = {name: flat[f"model.{name}"] for name in model}
    return {**{name: flat[name] for name in values}, **({"model": model} if model else {})}


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Adds a flag to a parser for every setting, in sections. Returns the type of each, by its flag's name."""
    hints: dict[str, Any] = {}
    for section in SECTIONS:
        if section is Model:
            hints |= _add_model(parser)
        else:
            parser.add_class_arguments(section)
            hints |= get_type_hints(section, include_extras=True)
    return hints


def _add_model(parser: ArgumentParser) -> dict[str, Any]:
    """Adds --model gpt, --preset tiny, and --model.X for each setting X of any architecture."""
    group = parser.add_argument_group(
        "The model",
        "--model and --preset choose it; --model.X sets X over the preset's value. The defaults are those of preset "
        f"{Model.preset}; `--model.help gpt` shows what a gpt has and what its presets are.",
    )
    group.add_argument("--model.help", action=_ModelHelp, metavar="NAME", help="show an architecture and its presets")
    kinds = get_type_hints(Model)
    texts = {"model.name": "the architecture, also --model", "model.preset": "the sizes to begin from, also --preset"}
    hints = {"model.help": kinds["model"], "model.name": kinds["model"], "model.preset": kinds["preset"]}
    for name, default in (("model.name", Model.model), ("model.preset", Model.preset)):
        group.add_argument(f"--{name}", type=hints[name], default=default, help=texts[name])
    # Architectures may have different choices for a setting: the flag accepts all of them, and the config of the
    # architecture that is trained refuses those of others.
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
            text = texts[key] + _described_defaults(key.removeprefix("model."))
            group.add_argument(f"--{key}", type=hint, default=argparse.SUPPRESS, help=text)
    return hints


@functools.cache
def _defaults(architecture: str) -> dict[str, Any]:
    """Returns the values of a model's settings without flags: those of the default preset."""
    config_class, presets = ARCHITECTURES[cast(Architecture, architecture)]
    values = asdict(config_class(vocab_size=NUM_TOKENS, **presets[Model.preset]))
    # The longest example decides max_len.
    return {name: value for name, value in values.items() if name not in NO_FLAGS | {"max_len"}}


def _described_defaults(name: str) -> str:
    """Returns "; by default 128 (gpt 64)": the first architecture's default, and those of others if they differ."""
    defaults = {kind: values[name] for kind in ARCHITECTURES if name in (values := _defaults(kind))}
    shown = {kind: _shown(value) for kind, value in defaults.items() if value is not None}
    if not shown:
        return ""
    first = next(iter(shown.values()))
    others = [f"{kind} {text}" for kind, text in shown.items() if text != first]
    return f"; by default {first}" + (f" ({', '.join(others)})" if others else "")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class _ModelHelp(argparse.Action):
    """--model.help gpt: prints the settings of an architecture and what its presets change."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(
            option_strings, dest, nargs="?", default=argparse.SUPPRESS, choices=list(ARCHITECTURES), **options
        )

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: Any, *__: object) -> None:
        for name in [values] if values else ARCHITECTURES:
            config_class, presets = ARCHITECTURES[name]
            shown = ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=Help)
            shown.add_class_arguments(config_class, "model", as_group=False, skip=NO_FLAGS)
            for action in shown._actions:
                action.help = (action.help or "").rstrip(".")  # the type and the default follow
            defaults = _defaults(name)
            shown.set_defaults({f"model.{key}": value for key, value in {**defaults, "max_len": None}.items()})
            print(f"--model {name}; the defaults are those of --preset {Model.preset}\n")
            print(f"{shown.format_help().strip()}\n\npresets (--preset):")
            varied = [key for key in defaults if any(key in changes for changes in presets.values())]
            for preset in presets:
                config = asdict(config_class(vocab_size=NUM_TOKENS, **presets[preset]))
                print(f"  {preset:<12} {', '.join(f'{key} {_shown(config[key])}' for key in varied) or 'as above'}")
            print()
        parser.exit()
