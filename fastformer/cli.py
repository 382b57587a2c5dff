"""The command `fastformer`: finds the command that was typed, makes flags and help from its signature, and runs it.

Nothing heavy is imported here: `fastformer --help` and `fastformer doctor` work with what a bare installation has.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from fastformer import __version__
from fastformer.settings import suggestion

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
        raise argparse.ArgumentError(None, f"{wrong}{suggestion(known.command, COMMANDS)}; see `fastformer --help`")
    return _call(known.command, words[before + 1 :])


def _call(name: str, words: list[str]) -> int:
    """Parses the words by the signature of the command's function, and calls it."""
    if name == "doctor":  # it has to work where nothing else does
        parser = argparse.ArgumentParser(prog="fastformer doctor", description=COMMANDS[name], exit_on_error=False)
        parser.parse_args(words)
        values: dict[str, object] = {}
        module = importlib.import_module("fastformer.commands.doctor")
    else:
        try:
            module = importlib.import_module(f"fastformer.commands.{name}")
            parsing = importlib.import_module("fastformer.commands._parsing")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "fastformer":
                raise
            raise ImportError(f"`fastformer {name}` needs {error.name}: pip install 'fastformer[train]'") from error
        values = parsing.parse(module, name, words)
    function: Callable[..., int | None] = getattr(module, name)
    return function(**values) or 0


if __name__ == "__main__":
    sys.exit(main())
