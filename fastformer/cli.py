"""The command `fastformer`: finds the command that was typed, makes flags and help from its signature, and runs it.

Nothing heavy is imported here: `fastformer --help` and `fastformer doctor` work with what a bare installation has.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args, get_type_hints

from fastformer import __version__

# The function of a command has its name and stands in fastformer/commands/ under the same one.
COMMANDS = {
    "train": "Trains on text files or on the built-in task; writes a run folder.",
    "translate": "Translates a text, a file, or standard input line by line.",
    "generate": "Continues a prompt with a language model.",
    "average": "Averages the weights of a run's last checkpoints into its model.",
    "demo": "Trains a number translator on this machine and shows it.",
    "doctor": "Says which versions are installed, and which backend each op gets here and why.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0, 1 for a user's error, 2 for a wrong flag, and after a signal 128
    plus its number: 130 for Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except argparse.ArgumentError as error:
        print(f"fastformer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # or another signal, as training/interrupts.py catches them
        print("interrupted", file=sys.stderr)
        return 128 + getattr(error, "signum", signal.SIGINT)
    except BrokenPipeError:  # `fastformer translate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"fastformer: {error}", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    """Runs the command that the words name."""
    top = argparse.ArgumentParser(
        prog="fastformer",
        usage="fastformer [--version] COMMAND ...",
        description="Train, translate and measure fast Transformers.",
        epilog="commands:\n" + "".join(f"  {name:<10} {summary}\n" for name, summary in COMMANDS.items())
        + "\n`fastformer COMMAND --help` shows the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"fastformer {__version__}")
    top.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    before = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    known, unknown = top.parse_known_args(words[: before + 1])
    if unknown:
        raise argparse.ArgumentError(None, f"unrecognized arguments: {' '.join(unknown)}; see `fastformer --help`")
    if known.command not in COMMANDS:
        wrong = "expected a command" if known.command is None else f"unknown command {known.command!r}"
        raise argparse.ArgumentError(None, f"{wrong}{_suggestion(known.command, COMMANDS)}; see `fastformer --help`")
    function = getattr(importlib.import_module(f"fastformer.commands.{known.command}"), known.command)
    return _call(known.command, function, [_underscored(word) for word in words[before + 1 :]])


def _call(name: str, function: Callable[..., int | None], words: list[str]) -> int:
    """Parses the words by the function's signature, and calls it."""
    if not inspect.signature(function).parameters and set(words) <= {"-h", "--help"}:
        # `doctor` has to work where nothing else does.
        parser = argparse.ArgumentParser(prog=f"fastformer {name}", description=COMMANDS[name])
        parser.parse_args(words)
        return function() or 0
    parser = _parser(name, function)
    words = _with_values(words, function)
    try:
        values = vars(parser.parse_args(words))
        given = vars(parser.parse_args(words, defaults=False)) if name == "train" else {}
    except argparse.ArgumentError as error:
        raise argparse.ArgumentError(None, _explained(str(error), name, parser)) from error
    if name == "train":  # a flag that is given, be it as its default, wins over the YAML file
        own = ("run", "config", "resume")
        values = {key: values[key] for key in own} | {
            "settings": {key: value for key, value in given.items() if key not in own}
        }
    return function(**values) or 0


def _parser(name: str, function: Callable[..., int | None]) -> Any:
    """The parser of a command: a positional parameter is an argument, a keyword-only one is a flag."""
    try:
        from docstring_parser import parse
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise ImportError(f"`fastformer {name}` needs jsonargparse: pip install 'fastformer[train]'") from error
    parser = ArgumentParser(prog=f"fastformer {name}", description=COMMANDS[name], exit_on_error=False)
    texts = {p.arg_name: p.description or "" for p in parse(function.__doc__ or "").params}
    types = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    # jsonargparse knows neither arguments that may be missing nor switches without a value.
    optional = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty}
    switches = {p.name for p in parameters if types[p.name] is bool}
    skip: set[str | int] = {"settings", *optional, *switches}
    parser.add_function_arguments(function, as_group=False, as_positional=True, skip=skip)
    for p in parameters:
        if p.name in optional:
            parser.add_argument(p.name, type=types[p.name], nargs="?", default=p.default, help=texts[p.name])
        elif p.name in switches:
            parser.add_argument(f"--{p.name}", action="store_true", help=texts[p.name])
    if name == "train":
        from fastformer.training.config import TrainConfig, descriptions

        types, texts = get_type_hints(TrainConfig), descriptions()
        for key, default in TrainConfig().to_dict().items():
            parser.add_argument(f"--{key}", type=types[key], default=default, help=texts[key])
    return parser


def _with_values(words: list[str], function: Callable[..., int | None]) -> list[str]:
    """A flag that is a switch and takes a word too (`--resume`, `--resume auto`) gets its value: true, if alone."""
    words = list(words)
    for name, kind in get_type_hints(function).items():
        choices = [word for part in get_args(kind) for word in get_args(part)]
        if bool not in get_args(kind) or not choices:
            continue
        for i, word in enumerate(words):
            if word == f"--{name}":
                alone = i + 1 == len(words) or words[i + 1] not in (*choices, "true", "false")
                words[i] = f"{word}=true" if alone else f"{word}={words.pop(i + 1)}"
    return words


def _underscored(word: str) -> str:
    """--max-steps is --max_steps."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def _explained(message: str, name: str, parser: Any) -> str:
    """What is wrong with the flags, with the nearest one that exists."""
    wrong = next((word for word in message.split() if word.startswith("--")), None)
    known = [option for action in parser._actions for option in action.option_strings]
    hint = _suggestion(wrong.partition("=")[0], known) if wrong else ""
    return f"{message}{hint}; see `fastformer {name} --help`"


def _suggestion(word: str | None, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word or "", list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
