"""Splits the words of a command line into arguments and flags. A text stays as it was typed, whatever it looks like.

A word is a flag if it begins with two dashes and a letter, and has only letters, digits, `_`, `-` and `.` up to its end
or its `=`. Everything else is a text: `-red`, `--`, `--Yes, a well-known man`. A word that looks like a flag but
isn't one of the command's is refused, with a hint at `--`: every word after that is a text. The word after a flag is
its value, whatever it looks like, unless it is a flag of the command: then it is refused.

A switch (`--greedy`) is a single word, or has its value in the same word (`--greedy=false`). The next word (`--greedy
false`) is its value only if the command's arguments are complete without that word. A word that may be either an
argument or the value is refused.
"""

from __future__ import annotations

import argparse
import re
import types
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

from fastformer.settings import choices, suggestion

HELP = (
    "A text that looks like a flag goes after --, or into one word with its flag: --FLAG=TEXT. A switch stands alone, "
    "or is --FLAG=true or --FLAG=false; true, false, yes, no, on, off, 1 or 0 as a word of its own is its value only "
    "where the arguments are complete without it."
)
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_.-]*")
# The names of flags in other toolkits, with fastformer's names; the first name that a command has is the one meant.
ELSEWHERE = {
    "batch_size": ("max_batch_size", "max_tokens"),
    "beam": ("num_beams",),
    "beam_size": ("num_beams",),
    "block_size": ("seqlen",),
    "context_length": ("seqlen",),
    "data": ("train_text", "train_tsv"),
    "dropout_rate": ("model.dropout",),
    "gradient_accumulation_steps": ("accumulate",),
    "gradient_clip_val": ("clip",),
    "input": ("file", "train_source"),
    "learning_rate": ("lr",),
    "max_epoch": ("epochs",),
    "max_grad_norm": ("clip",),
    "max_length": ("max_new_tokens", "max_len"),
    "max_len_b": ("max_new_tokens",),
    "max_seq_length": ("max_len",),
    "max_steps": ("steps",),
    "max_update": ("steps",),
    "min_length": ("min_new_tokens",),
    "nbest": ("n_best",),
    "num_return_sequences": ("n_best",),
    "num_train_epochs": ("epochs",),
    "per_device_train_batch_size": ("max_tokens",),
    "resume_from_checkpoint": ("resume",),
    "save_interval": ("save_every",),
    "save_steps": ("save_every",),
    "src": ("file", "train_source"),
    "eval_steps": ("val_every",),
    "logging_steps": ("log_every",),
    "target_prefix": ("prefix",),
    "tgt": ("reference", "train_target"),
    "train_steps": ("steps",),
    "update_freq": ("accumulate",),
    "warmup_steps": ("warmup",),
    "warmup_updates": ("warmup",),
}
_NOT_FLAGS = {
    "model": "the model's folder is RUN, the first argument",
    "model_dir": "the model's folder is RUN, the first argument",
    "model_name_or_path": "the model's folder is RUN, the first argument",
    "output": "the answers go to standard output: > FILE",
    "output_dir": "the folder is RUN, the first argument",
    "output_file": "the answers go to standard output: > FILE",
    "save_dir": "the folder is RUN, the first argument",
}


class Places(NamedTuple):
    """The number of arguments of a command.

    Attributes:
        least, most: the bounds of the number of arguments.
        filled_by: flags that stand in for an argument, as `--file` does for a text.
    """

    least: int
    most: int
    filled_by: frozenset[str] = frozenset()


@dataclass
class Typed:
    """The arguments and flags that the user typed.

    Attributes:
        arguments: the words that are no flags, in order.
        flags: names without dashes, with their values; the value of a flag without one is None.
    """

    arguments: list[str] = field(default_factory=list)
    flags: list[tuple[str, str | None]] = field(default_factory=list)


def split(
    words: Sequence[str],
    hints: Mapping[str, Any],
    short: Mapping[str, str],
    places: Places,
    alone: frozenset[str] = frozenset(),
    hint: str = "",
) -> Typed:
    """Splits words into arguments, and flags with their values.

    Args:
        words: the words of the command line after the command.
        hints: the type of each flag, by its name without dashes.
        short: flags by their short names, both with their dashes.
        places: the number of arguments.
        alone: flags whose value is optional.
        hint: the hint in the message about a word that only looks like a flag.

    Raises:
        argparse.ArgumentError: a flag doesn't exist or lacks its value, a word is ambiguous, or a flag stands in for
            an argument that is there.
    """
    rest, typed = deque(words), Typed()
    # Words after a switch that may be its value: their index among the arguments, and that of the switch.
    unsure: list[tuple[int, int]] = []
    while rest:
        word = rest.popleft()
        if word == "--":
            typed.arguments += rest
            break
        if word == "--debug":  # `main` handles it
            continue
        name = _flag_name(word, hints, short, hint)
        if name is None:
            typed.arguments.append(word)
            continue
        if "=" in word:
            typed.flags.append((name, word.partition("=")[2]))
        elif name == "help":
            typed.flags.append((name, None))
        elif is_switch(hints[name]):
            if rest and _switched(rest[0], hints[name]):
                unsure.append((len(typed.arguments), len(typed.flags)))
                typed.arguments.append(rest.popleft())
            typed.flags.append((name, "true"))
        elif rest and not _ends_value(rest[0], hints, short, is_text(hints[name])):
            typed.flags.append((name, rest.popleft()))
        elif name in alone:
            typed.flags.append((name, None))
        else:
            _refuse_without_value(name, rest)
    _settle(typed, unsure, places)
    filling = [flag for flag in typed.flags if flag[0] in places.filled_by]
    if filling and len(typed.arguments) == places.most:
        name, value = filling[-1]
        _refuse(f"expected the text {typed.arguments[-1]!r:.60} or --{name} {value}, got both")
    return typed


def _flag_name(word: str, hints: Mapping[str, Any], short: Mapping[str, str], hint: str) -> str | None:
    """Returns the name of the flag that a word is, without dashes; None for a text.

    Raises:
        argparse.ArgumentError: the word looks like a flag, but no flag has that name.
    """
    if word == "-h":
        return "help"
    head = word.partition("=")[0]
    if not head.startswith("--"):
        name = head[1:].replace("-", "_")
        if head.startswith("-") and (name in hints or f"--{name}" in short):
            _refuse(f"unrecognized arguments: {head}; did you mean '--{name}'?{hint}")
        return None
    known = _known(head, hints, short)
    if known is not None:
        return known
    looks = _FLAG.match(word)
    whole = looks is not None and looks[0] == head
    # `--num_beams:4` is a typing error, not a text; `--file is a flag`, with its spaces, is a text.
    if looks is None or not (whole or (" " not in head and _known(looks[0], hints, short) is not None)):
        return None
    shown = "--" + head[2:].replace("-", "_")
    _refuse(f"unrecognized arguments: {shown}{nearest(looks[0], hints, short)}{hint}")


def nearest(wrong: str, hints: Mapping[str, Any], short: Mapping[str, str]) -> str:
    """Returns a suggestion for a flag that doesn't exist: "; did you mean '--x'?", or an empty text."""
    name = wrong.removeprefix("--").replace("-", "_")
    meant = [name] if name in hints else [f"model.{name}"] if f"model.{name}" in hints else []
    meant += [other for other in ELSEWHERE.get(name, ()) if other in hints]
    if meant:
        return f"; did you mean '--{meant[0]}'?"
    if name in _NOT_FLAGS:
        return f"; {_NOT_FLAGS[name]}"
    return suggestion(f"--{name}", [*short, *(f"--{known}" for known in hints)])


def kinds(hint: Any) -> list[Any]:
    """Returns the types that a hint is made of; a `Literal` counts as one."""
    if get_origin(hint) is Annotated:
        return kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for option in get_args(hint) for kind in kinds(option)]
    return [hint]


def is_switch(hint: Any) -> bool:
    """Returns whether a flag may come without a value."""
    return bool in kinds(hint)


def is_text(hint: Any) -> bool:
    """Returns whether any word is a value of a flag: a text, or one of several texts of a repeated flag."""
    return is_texts(hint) or {*kinds(hint)} - {type(None)} == {str}


def is_texts(hint: Any) -> bool:
    """Returns whether a flag may be repeated, with a text each time."""
    others = [kind for kind in kinds(hint) if kind is not type(None)]
    return len(others) == 1 and get_origin(others[0]) in (list, tuple, Sequence) and str in get_args(others[0])


def plain(word: str, hint: Any) -> str | None:
    """Spells a value that isn't text in the one way that YAML reads as its type; None if it can't be one.

    Integers are decimal, or numbers without a fraction (1e3, 1_000); leading zeros are ignored. YAML itself would read
    010 as 8, 0x4 as 4, 1:30 as 90, and 1e3 as a text.
    """
    word, options = word.strip(), kinds(hint)
    lower = word.lower()
    if word in choices(hint) or any(get_origin(kind) not in (None, Literal) or kind in (Any, dict) for kind in options):
        return word
    if bool in options and lower in SWITCH:
        return str(SWITCH[lower]).lower()
    if type(None) in options and lower in ("null", "none"):
        return "null"
    if int in options and (number := _integer(word)) is not None:
        return str(number)
    if float in options:
        try:
            return repr(float(word))
        except ValueError:
            return None
    return None


def _integer(word: str) -> int | None:
    try:
        return int(word, 10)
    except ValueError:
        pass
    try:
        number = float(word)
        return int(number) if number.is_integer() else None
    except (ValueError, OverflowError):
        return None


def _known(head: str, hints: Mapping[str, Any], short: Mapping[str, str]) -> str | None:
    name = head[2:].replace("-", "_")
    name = short.get(f"--{name}", f"--{name}")[2:]
    return name if name in hints or name in ("help", "debug") else None


def _switched(word: str, hint: Any) -> bool:
    return word.lower() in SWITCH or word in choices(hint)


def _ends_value(word: str, hints: Mapping[str, Any], short: Mapping[str, str], is_text: bool) -> bool:
    """Returns whether the word after a flag can't be its value: a flag or, unless texts are values, its lookalike."""
    head = word.partition("=")[0]
    return word == "--" or _known(head, hints, short) is not None or (not is_text and _FLAG.fullmatch(head) is not None)


def _settle(typed: Typed, unsure: list[tuple[int, int]], places: Places) -> None:
    """Makes each word after a switch its value if the arguments are complete without it; refuses ambiguous words."""
    sure = len(typed.arguments) - len(unsure)
    filled = any(name in places.filled_by for name, _ in typed.flags)
    if not unsure or places.least - sure >= len(unsure):  # they are needed as arguments
        return
    place, flag = unsure[0]
    if sure < places.most - filled:
        word, name = typed.arguments[place], typed.flags[flag][0]
        _refuse(f"expected --{name}={word}, or {word!r} after -- as an argument: after --{name}, it may be either")
    for place, flag in reversed(unsure):
        typed.flags[flag] = (typed.flags[flag][0], typed.arguments.pop(place))


def _refuse_without_value(name: str, rest: Sequence[str]) -> NoReturn:
    got = f"the flag {rest[0]}; for a text like this write --{name}={rest[0]}" if rest else "nothing"
    _refuse(f"expected one argument after --{name}, got {got}")


def _refuse(message: str) -> NoReturn:
    raise argparse.ArgumentError(None, message)
