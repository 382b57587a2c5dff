"""The command `fastformer`: finds the command that the user typed, makes its flags and help, and runs it.

Nothing heavy is imported here: `fastformer --help` and `fastformer doctor` work in a bare installation.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import logging
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence

from fastformer import __version__, console
from fastformer.settings import suggestion

# The function of a command has the command's name, in the module of the same name in fastformer/commands/.
COMMANDS = {
    "prepare": "Tokenizes text that doesn't fit in memory into shards on disk, to train on.",
    "train": "Trains on text files or on the built-in task; writes a run folder.",
    "translate": "Translates a text, a file, or standard input line by line.",
    "transcribe": "Writes down speech, or translates it into English, as text or subtitles.",
    "generate": "Continues a prompt with a language model.",
    "chat": "Chats with a language model.",
    "embed": "Computes the embeddings of a text, or of texts, a line each, with an encoder.",
    "rank": "Ranks passages by how well they answer a query, with a cross-encoder.",
    "serve": "Serves a model over HTTP, to many clients at once.",
    "score": "Scores translations: against references, or by their probability in a model.",
    "report": "Writes a page about a run: curves, scores, samples, attention, settings.",
    "average": "Averages the weights of a run's last checkpoints into its model.",
    "quantize": "Rounds a model's weights to int8 or int4, into a folder of its own.",
    "warmup": "Prepares the GPU kernels that a model launches, so that its first calls don't wait for a compiler.",
    "demo": "Trains a number translator on this machine and shows it.",
    "doctor": "Says which versions are installed, and which backend each op gets here and why.",
}

# Commands whose results are in a folder: they finish even if standard output closes.
SAVING = {"prepare", "train", "report", "average", "quantize", "demo"}

# The extra of the installation that has a package; packages that are not here are in "train".
EXTRAS = {
    "matplotlib": "plot",
    "transformers": "hf",
    "jinja2": "chat",
    **dict.fromkeys(["fastapi", "starlette", "pydantic", "uvicorn", "httptools"], "serve"),
    **dict.fromkeys(["av", "onnxruntime"], "audio"),
    **dict.fromkeys(["prometheus_client", "python_multipart", "py3langid"], "serve"),
}
# What a command needs beyond "train", so that a user installs once.
EXTRAS_OF_COMMANDS = {"serve": "serve", "prepare": "train,parquet", "chat": "train,chat"}
OUT_OF_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the words of the command line; by default those of this process.

    Returns:
        The exit code: 0; 1 for a mistake of the user or of this program; 2 for flags that don't exist or don't fit;
        after a signal 128 plus its number, so 130 for Ctrl-C. If standard output accepts no more text, a command that
        saves its work continues, and its code says how the work went; for others it is 0 if their reader went away, as
        `head` does, and 1 if a disk is full or the stream was closed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    if arguments is None:  # this process ends with the command: nothing has to search torch's objects for garbage
        atexit.register(gc.freeze)
    with warnings.catch_warnings(), _few_collections(), console.standard_streams():
        _quieten(debug)
        try:
            code = _run(words)
            sys.stdout.flush()  # while an error can still be reported
            return code
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, console.OutputLostError) and error.has_left:  # `fastformer translate | head`
                return 0
            if debug:
                traceback.print_exc()
            command = next((word for word in words if not word.startswith("-")), "")
            code, message = _explained(error, command)
            print(f"fastformer: {message}" if code < 128 else message, file=sys.stderr)
            return code


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Makes Python's garbage collection rarer: importing torch makes lasting objects, and takes a tenth less time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _quieten(debug: bool) -> None:
    """Shows fastformer's messages, and only errors of the libraries that it uses."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("fastformer").setLevel(logging.INFO)
    if not debug:
        logging.getLogger("torch").setLevel(logging.ERROR)
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        if not sys.warnoptions:  # python -W asks for warnings
            warnings.simplefilter("ignore")


def _explained(error: BaseException, command: str) -> tuple[int, str]:
    """Returns the exit code for an error of a command, and a message of one line."""
    if isinstance(error, argparse.ArgumentError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):  # or another signal, as training/interrupts.py catches them
        return 128 + getattr(error, "signum", signal.SIGINT), "interrupted"
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror is not None:  # without the number
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "fastformer":
        package = (error.name or "a package").partition(".")[0]
        extra = EXTRAS.get(package) or EXTRAS_OF_COMMANDS.get(command, "train")
        what = package if package == "torch" else f"'fastformer[{extra}]'"
        return 1, f"this needs {package}, which is not installed: pip install {what}"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(text)):
        return 1, f"out of memory: take smaller batches (--max_tokens, --max_batch_size) or a smaller model ({text})"
    # Errors that fastformer raises on purpose are ValueErrors or its own types, except in strict mode.
    strict = isinstance(error, NotImplementedError) and text.startswith("fastformer::")
    if (
        isinstance(error, ValueError | OSError | ImportError)
        or type(error).__module__.startswith("fastformer.")
        or strict
    ):
        return 1, text
    return 1, f"this is a bug, not your mistake: {type(error).__name__}: {text}; --debug shows the traceback"


def _run(words: list[str]) -> int:
    """Runs the command that the words name."""
    top = argparse.ArgumentParser(
        prog="fastformer",
        usage="fastformer [--version] [--debug] COMMAND ...",
        description="Train, translate and measure fast Transformers.",
        epilog="commands:\n" + "".join(f"  {name:<10} {summary}\n" for name, summary in COMMANDS.items())
        + "\n`fastformer COMMAND --help` shows the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"fastformer {__version__}")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    top.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    before = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    parsed, unknown = top.parse_known_args(words[: before + 1])
    if unknown:
        raise argparse.ArgumentError(None, f"unrecognized arguments: {' '.join(unknown)}; see `fastformer --help`")
    if parsed.command not in COMMANDS:
        wrong = "expected a command" if parsed.command is None else f"unknown command {parsed.command!r}"
        raise argparse.ArgumentError(
            None, f"{wrong}{suggestion(parsed.command or '', COMMANDS)}; see `fastformer --help`"
        )
    return _call(parsed.command, words[before + 1 :])


def _call(name: str, words: list[str]) -> int:
    """Parses the words by the signature of the command's function, and calls it."""
    if name == "doctor":  # it has to work in a bare installation
        parser = argparse.ArgumentParser(prog="fastformer doctor", description=COMMANDS[name], exit_on_error=False)
        _, unknown = parser.parse_known_args([word for word in words if word != "--debug"])
        if unknown:
            raise argparse.ArgumentError(None, f"unrecognized arguments: {' '.join(unknown)}")
        values: dict[str, object] = {}
        module = importlib.import_module("fastformer.commands.doctor")
    else:
        module = importlib.import_module(f"fastformer.commands.{name}")
        parsing = importlib.import_module("fastformer.commands._parsing")
        values = parsing.parse(module, name, words)
    if name in SAVING and isinstance(sys.stdout, console.Output):
        sys.stdout.outlived = True
    function: Callable[..., int | None] = getattr(module, name)
    return function(**values) or 0


if __name__ == "__main__":
    sys.exit(main())
