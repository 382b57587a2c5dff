"""From the signature of a command to its parser, and from jsonargparse's messages to one line."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from fastformer.settings import choices, describe, describe_bounds, suggestion, why_not


def parse(module: ModuleType, name: str, words: Sequence[str]) -> dict[str, Any]:
    """What the words give to the function of a command: only what they name, so that its own defaults stay.

    Args:
        module: of the command. `add_settings(parser)`, if it has one, adds flags beyond the function's signature,
            `SHORT` says what is short for which flag, and `USAGE` is the first line of the help where the signature
            doesn't say enough.
        name: of the command and of its function.
        words: of the command line, behind the command.

    Raises:
        argparse.ArgumentError: flags that don't exist or don't fit, in one line.
    """
    function = getattr(module, name)
    parser = ArgumentParser(
        prog=f"fastformer {name}",
        usage=getattr(module, "USAGE", None) or _usage(name, function),
        description=inspect.getdoc(function).partition("\n")[0],  # type: ignore[union-attr]
        formatter_class=Help,
        exit_on_error=False,
        allow_abbrev=False,
    )
    hints = _add_signature(parser, function)
    hints |= module.add_settings(parser) if hasattr(module, "add_settings") else {}
    short = getattr(module, "SHORT", {})
    words = _with_values(_spelled_out(words, short), hints)
    try:
        return dict(parser.parse_args(words, defaults=False).as_dict())
    except argparse.ArgumentError as error:
        message = explain(str(error), hints, short)
        raise argparse.ArgumentError(None, f"{message}; see `fastformer {name} --help`") from error


class Help(DefaultHelpFormatter):
    """The help of flags in plain words: what a value may be and what it is by default, not the types of Python."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.dest == "help":
            return "show this help and exit"
        hint, default = _hint(action), action.default
        notes = ["required"] if action.required and action.option_strings else []
        if hint is not None and not (action.metavar is None and action.choices) and describe(hint) != "text":
            words = describe_bounds(hint)
            notes.append(words.removesuffix(" or null") if default is None else words)
        if default is not None and default != argparse.SUPPRESS:
            notes.append(f"default: {str(default).lower() if isinstance(default, bool) else default}")
        notes = [note for note in notes if note != "text"]
        return (action.help or "") + (f" ({'; '.join(notes)})" if notes else "")

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        hint = _hint(action)
        if hint is bool or bool in get_args(hint):  # such a flag may stand alone
            return "".join(f"[{word}]" for word in choices(hint))
        return str(super()._format_args(action, default_metavar))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return str(super()._format_action_invocation(action)).rstrip()


def _hint(action: argparse.Action) -> Any:
    return getattr(action, "_typehint", None) or action.type


def _usage(name: str, function: Callable[..., Any]) -> str:
    """ "fastformer translate RUN [TEXT] [--FLAG VALUE ...]"."""
    parameters = inspect.signature(function).parameters.values()
    arguments = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    words = [p.name.upper() if p.default is p.empty else f"[{p.name.upper()}]" for p in arguments]
    return " ".join(["fastformer", name, *words, "[--FLAG VALUE ...]"])


def explain(message: str, hints: Mapping[str, Any], short: Iterable[str] = (), flag: str = "--") -> str:
    """jsonargparse's message in one line: what was expected, what came, the nearest name.

    Args:
        message: of the error.
        hints: the type of each setting.
        short: further flags that exist.
        flag: stands before the name of a setting.
    """
    key = re.match(r'Parser key "([^"]+)"', message)
    value = re.search(r"(?:Got|Given) value: (.*)$", message, re.DOTALL)
    if key and value and key[1] in hints:
        hint, given = hints[key[1]], value[1].strip()
        problem = why_not(given, hint) or f"to be {describe(hint)}"
        return f"expected {flag}{key[1]} {problem}, got {given!r}{suggestion(given, choices(hint))}"
    message = " ".join(message.split())
    wrong = re.search(r"unrecognized arguments: (--[^\s=]*)", message)
    return message + (_nearest_flag(wrong[1], hints, short) if wrong else "")


def _nearest_flag(wrong: str, hints: Mapping[str, Any], short: Iterable[str]) -> str:
    inner = f"model.{wrong.removeprefix('--')}"
    if inner in hints:
        return f"; did you mean '--{inner}'?"
    return suggestion(wrong, [*short, *(f"--{name}" for name in hints)])


def _add_signature(parser: ArgumentParser, function: Callable[..., Any]) -> dict[str, Any]:
    """A positional parameter is an argument, a keyword-only one is a flag. Returns the type of each."""
    hints = get_type_hints(function)
    texts = {p.arg_name: p.description or "" for p in parse_docstring(function.__doc__ or "").params}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    # jsonargparse itself makes no arguments that may be missing.
    optional = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty}
    parser.add_function_arguments(function, as_group=False, as_positional=True, skip={*optional})
    for p in parameters:
        if p.name in optional:
            # Words are text, "null" and the like too; only one that is missing is None.
            kind = str if hints[p.name] == str | None else hints[p.name]
            parser.add_argument(p.name, type=kind, nargs="?", default=p.default, help=texts[p.name])
    return {p.name: hints[p.name] for p in parameters}


def _spelled_out(words: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """--max-steps is --max_steps, and what is short for a flag becomes that flag; behind `--` all stays as it is."""
    end = list(words).index("--") if "--" in words else len(words)
    spelled = []
    for word in words[:end]:
        name, equals, value = word.partition("=")
        name = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        spelled.append(short.get(name, name) + equals + value)
    return spelled + list(words[end:])


def _with_values(words: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """The arguments, then each flag in one word with its value.

    `--greedy` alone becomes `--greedy=true`; so does `--resume`, which takes a word of its own too: `--resume auto`.
    argparse itself fails on an argument that may be missing where flags stand before it (`RUN --num_beams 4 TEXT`), and
    takes `-1e-3` behind `--lr` for a flag.
    """
    rest = list(words)
    flags: list[str] = []
    arguments: list[str] = []
    while rest and rest[0] != "--":
        word = rest.pop(0)
        if not _is_flag(word):
            arguments.append(word)
            continue
        hint = hints.get(word.removeprefix("--"))
        if hint is bool or bool in get_args(hint):
            taken = bool(rest) and rest[0] in ("true", "false", "yes", "no", *choices(hint))
            word = f"{word}={rest.pop(0) if taken else 'true'}"
        elif word not in ("-h", "--help") and "=" not in word and rest and not _is_flag(rest[0]):
            word = f"{word}={rest.pop(0)}"
        flags.append(word)
    arguments += rest[1:]
    if any(word.startswith("-") for word in arguments):
        return [*flags, "--", *arguments]
    return arguments + flags


def _is_flag(word: str) -> bool:
    """Whether a word is a flag, as argparse sees it: neither a number nor a text with spaces."""
    if not word.startswith("-") or word == "-" or " " in word.partition("=")[0]:
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False
