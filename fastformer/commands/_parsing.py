"""Makes a command's parser from its signature, and one line from a message of jsonargparse."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from fastformer import console
from fastformer.commands import _words
from fastformer.settings import choices, describe, describe_bounds, suggestion, why_not


def parse(module: ModuleType, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Parses the words into arguments of a command's function; it keeps its defaults for those that no word names.

    Args:
        module: the command's module. These names in it are optional: `add_settings(parser)` adds flags beyond the
            function's signature; `SHORT` maps short names to flags; `USAGE` is the first line of the help if the
            signature doesn't say enough; `FILLED_BY` are flags that exclude an optional argument; `TEXTS` are the
            parameters that are texts, not names of files; `REST` is the last argument, if it takes all
            further words; `LISTED` are the flags that accept several values,
            separated by commas.
        name: the name of the command and of its function.
        words: the words of the command line after the command.

    Raises:
        argparse.ArgumentError: a flag doesn't exist or its value doesn't fit; the message is one line.
    """
    function = getattr(module, name)
    parser, hints = make_parser(module, name)
    short = getattr(module, "SHORT", {})
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = getattr(module, "REST", None)
    places = _words.Places(
        sum(p.default is p.empty for p in parameters),
        1 << 30 if rest else len(parameters),
        frozenset(getattr(module, "FILLED_BY", ())),
    )
    flags = {key: hint for key, hint in hints.items() if key not in {p.name for p in parameters}}
    alone = frozenset(flag[2:] for action in parser._actions if action.nargs == "?" for flag in action.option_strings)
    written = getattr(module, "TEXTS", ())
    hint = "; put a text that begins with - after --" if any(p.name in written for p in parameters) else ""
    try:
        typed = _words.split(words, flags, short, places, alone, hint)
        _check_listed(typed.flags, getattr(module, "LISTED", ()))
        texts: dict[str, Any] = {}
        spelled = [_spelled(key, value, flags, texts) for key, value in typed.flags]
        place = len(parameters) - 1 if rest else len(typed.arguments)
        typed.arguments, further = typed.arguments[:place], typed.arguments[place:]
        # jsonargparse would parse a text as YAML, so it receives a placeholder instead.
        for place, word in enumerate(typed.arguments):
            if place < len(parameters) and _words.is_text(hints[parameters[place].name]):
                texts[parameters[place].name], word = word, "text"
            spelled.append(word)
        if any(word.startswith("-") for word in spelled[len(typed.flags) :]):
            spelled.insert(len(typed.flags), "--")
        values = dict(parser.parse_args(spelled, defaults=False).as_dict())
    except argparse.ArgumentError as error:
        message = explain(str(error), hints)
        raise argparse.ArgumentError(None, f"{message}; see `fastformer {name} --help`") from error
    if rest is not None:
        values[rest] = further
    for key, text in texts.items():
        if key in written:
            text = list(map(console.typed, text)) if isinstance(text, list) else console.typed(text)
        _put(values, key, text)
    return values


def make_parser(module: ModuleType, name: str) -> tuple[ArgumentParser, dict[str, Any]]:
    """Makes the parser of a command, as `parse` describes it, and returns the type of each argument and flag too."""
    function = getattr(module, name)
    parser = ArgumentParser(
        prog=f"fastformer {name}",
        usage=getattr(module, "USAGE", None) or _usage(name, function),
        description=inspect.getdoc(function).partition("\n")[0],  # type: ignore[union-attr]
        formatter_class=Help,
        epilog=_words.HELP,
        exit_on_error=False,
        allow_abbrev=False,
    )
    hints = _add_signature(parser, function)
    hints |= module.add_settings(parser) if hasattr(module, "add_settings") else {}
    return parser, hints


def _check_listed(flags: Sequence[tuple[str, str | None]], listed: Collection[str]) -> None:
    """Refuses a repeated list flag: its last value would count, as for other flags, and the rest would be lost unseen.

    Raises:
        argparse.ArgumentError: a flag that takes a list is repeated with another value.
    """
    given: dict[str, str | None] = {}
    for name, value in flags:
        if name in listed and given.setdefault(name, value) != value:
            raise argparse.ArgumentError(
                None,
                f"expected --{name} once, got it with {given[name]!r} and {value!r}: put commas between the values",
            )


def _spelled(name: str, value: str | None, hints: Mapping[str, Any], texts: dict[str, Any]) -> str:
    """Returns a flag as jsonargparse reads it; the value of a text flag goes into `texts` instead."""
    if value is None:
        return f"--{name}"
    hint = hints.get(name, str)
    if _words.is_texts(hint):
        texts.setdefault(name, []).append(value)
        return f"--{name}=[]"
    if _words.is_text(hint):
        texts[name] = value
        return f"--{name}=text"
    plain = _words.plain(value, hint)
    if plain is None:
        raise argparse.ArgumentError(
            None, f"expected --{name} to be {describe(hint)}, got {value!r}{suggestion(value.strip(), choices(hint))}"
        )
    return f"--{name}={plain}"


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets values["a"]["b"] for the key "a.b"."""
    *outer, last = key.split(".")
    for name in outer:
        values = values[name]
    values[last] = value


class Help(DefaultHelpFormatter):
    """The help of flags in plain words: the allowed values and the default, without the types of Python."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.dest == "help":
            return "show this help and exit"
        hint, default = _hint(action), action.default
        notes = ["required"] if action.required and action.option_strings else []
        is_plain = hint is None or _words.is_texts(hint) or describe(hint) == "text"
        if not is_plain and not (action.metavar is None and action.choices):
            words = describe_bounds(hint)
            notes.append(words.removesuffix(" or null") if default is None else words)
        if default is not None and default != argparse.SUPPRESS:
            notes.append(f"default: {str(default).lower() if isinstance(default, bool) else default}")
        notes = [note for note in notes if note != "text"]
        return (action.help or "") + (f" ({'; '.join(notes)})" if notes else "")

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        hint = _hint(action)
        if hint is bool or bool in get_args(hint):  # such a flag needs no value
            return "".join(f"[{word}]" for word in choices(hint))
        return str(super()._format_args(action, default_metavar))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # jsonargparse's own way to append to a list, which these flags do without it. Python 3.13 and newer write the
        # placeholder of a value once, at the end, and older ones after each name.
        return re.sub(r"(?: \S+)?, --\w+\+( \S+)?", r"\1", str(super()._format_action_invocation(action))).rstrip()


def _hint(action: argparse.Action) -> Any:
    return getattr(action, "_typehint", None) or action.type


def _usage(name: str, function: Callable[..., Any]) -> str:
    """ "fastformer translate RUN [TEXT] [--FLAG VALUE ...]"."""
    parameters = inspect.signature(function).parameters.values()
    arguments = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    words = [p.name.upper() if p.default is p.empty else f"[{p.name.upper()}]" for p in arguments]
    return " ".join(["fastformer", name, *words, "[--FLAG VALUE ...]"])


def explain(message: str, hints: Mapping[str, Any], flag: str = "--") -> str:
    """Shortens jsonargparse's message to one line: the expected value, the given one, and the nearest name.

    Args:
        message: the error's message.
        hints: the type of each setting.
        flag: the prefix of a setting's name in the message.
    """
    key = re.match(r'Parser key "([^"]+)"', message)
    value = re.search(r"(?:Got|Given) value: ([^\n]*)", message)
    if key and value and key[1] in hints:
        hint, given = hints[key[1]], value[1].strip()
        problem = why_not(given, hint) or f"to be {describe(hint)}"
        return f"expected {flag}{key[1]} {problem}, got {given!r}{suggestion(given, choices(hint))}"
    return " ".join(message.split())


def _add_signature(parser: ArgumentParser, function: Callable[..., Any]) -> dict[str, Any]:
    """Adds an argument for each positional parameter and a flag for each keyword-only one. Returns the type of each."""
    hints = get_type_hints(function)
    texts = {p.arg_name: p.description or "" for p in parse_docstring(function.__doc__ or "").params}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    # jsonargparse itself makes no optional arguments.
    optional = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty}

    # Of the function itself, jsonargparse would run the imports that its module makes for type checkers alone, and look
    # for its name in the package: either imports PyTorch.
    def typed() -> None: ...

    typed.__doc__ = function.__doc__
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=hints[p.name]) for p in parameters]
    )
    parser.add_function_arguments(typed, as_group=False, as_positional=True, skip={*optional})
    for p in parameters:
        if p.name in optional:
            parser.add_argument(p.name, type=hints[p.name], nargs="?", default=p.default, help=texts[p.name])
    return {p.name: hints[p.name] for p in parameters}
