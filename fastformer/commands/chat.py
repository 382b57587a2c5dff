"""`fastformer chat`."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from fastformer.commands._options import add_options, constraint_options, given_options
from fastformer.console import is_terminal, shown, typed
from fastformer.generation.config import Precision

if TYPE_CHECKING:
    from fastformer.generation.chat import Chat

logger = logging.getLogger("fastformer")

TEXTS = ("system", "stop", "regex", "choices")
_OPTIONS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed",
    "prompt_lookup_num_tokens", "cache_dtype",
)  # fmt: skip
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"  # of a terminal
_HELP = "/reset begins anew, /quit or Ctrl-D leaves, Ctrl-C ends an answer; // begins a line that begins with /"


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Gives the command's parser the flags of decoding."""
    return add_options(parser, _OPTIONS)


def chat(
    run: str,
    *,
    system: str | None = None,
    greedy: bool = False,
    stop: list[str] | None = None,
    schema: str | None = None,
    regex: str | None = None,
    choices: list[str] | None = None,
    grammar: str | None = None,
    drop_oldest: bool = False,
    draft: str | None = None,
    adapter: str | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    config: str | None = None,
    **options: Any,
) -> None:
    """Chats with a language model.

    Each line is what you say, and its answer is printed as it is made. Ctrl-C ends an answer, and Ctrl-D the
    conversation; a line of /reset begins a new one. A terminal also shows the model's reasoning, dimmed. If standard
    input is not a terminal, its lines are the turns of one conversation, and only the answers are printed.

    Args:
        run: the folder of a model that was trained to chat, as transformers saves it: with a chat template
        system: the text that the conversation begins with, such as "You are brief."; by default the template's
        greedy: take the best token always, without sampling; by default the folder's generation_config.json decides
        stop: a text that ends an answer and isn't printed; repeat the flag for several
        schema: a file with a JSON schema, which the answer matches as JSON
        regex: a regular expression that the answer matches as a whole
        choices: a text that the answer may be; repeat the flag for several
        grammar: a file with a context-free grammar, in Lark's syntax, that the answer matches
        drop_oldest: if the conversation fills the model's positions, omit its oldest turns instead of stopping
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        draft: the folder of a smaller model with the same tokenizer, which drafts tokens; the answers are the same
        adapter: the folder of a LoRA adapter, as peft saves it, with which the model answers
        precision: convert the weights to this (auto runs int8 and int4 on a CPU); by default they stay as they were
        config: a YAML file with options of decoding, such as top_k: 40; flags override it
        options: the flags of decoding
    """
    from fastformer.devices import choose_device
    from fastformer.generation.chat import Chat

    given = constraint_options(schema, regex, choices, grammar) | ({"stop_strings": stop} if stop else {})
    given |= {} if adapter is None else {"adapter": adapter}
    decoding = given_options(config, {**options, **given})
    of_file = decoding.pop("precision", None)
    precision = precision or of_file
    adapter = decoding.get("adapter")
    if greedy:
        for name in ("temperature", "top_k", "top_p"):
            if name in options:
                raise ValueError(
                    f"expected --greedy or --{name} {options[name]}, got both: {name} only affects sampling"
                )
        decoding["do_sample"] = False
    talk = Chat.from_pretrained(
        run,
        device=choose_device(device, precision),
        precision=precision,
        system=system,
        drop_oldest=drop_oldest,
        draft=draft,
        adapters=None if adapter is None else {adapter: adapter},
        **decoding,
    )
    is_shown = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    if is_shown:
        print(_HELP, file=sys.stderr)
    for line in _lines(is_shown):
        if line.strip() in ("/quit", "/exit"):
            return
        if line.strip() == "/reset":
            talk.reset()
        elif line.startswith("/") and not line.startswith("//"):
            print(_HELP, file=sys.stderr)
        elif line.strip():
            _answer(talk, line[1:] if line.startswith("//") else line, is_shown)


def _lines(is_shown: bool) -> Iterator[str]:
    """Yields the lines that the user types; on a terminal after a prompt, where Ctrl-C discards the line."""
    from fastformer.commands._lines import each_line

    if not is_shown:
        yield from each_line(None)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines, and knows the last ones
    while True:
        try:
            yield typed(input("> ").removesuffix("\r"))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D leaves", file=sys.stderr)


def _answer(talk: Chat, text: str, is_shown: bool) -> None:
    """Prints the answer while it is made. On a terminal an error of one turn doesn't end the conversation."""
    is_dim = False
    try:
        parts = talk.parts(text)
        with _interrupts(is_shown) as was_pressed:
            for part in parts:
                if is_shown and is_dim != (part.kind == "reasoning"):
                    is_dim = not is_dim
                    print(_DIM if is_dim else f"{_PLAIN}\n\n", end="")
                if is_shown or part.kind == "content":
                    print(shown(part.text, sys.stdout), end="", flush=True)
                if was_pressed.is_set():
                    parts.close()
                    break
        print(flush=True)
    except KeyboardInterrupt:  # pressed twice, or while a long prompt was read
        if not is_shown:
            raise
        print(flush=True)
    except ValueError as error:
        if not is_shown:
            raise
        print(f"fastformer: {error}", file=sys.stderr)
    finally:
        if is_dim:
            print(_PLAIN, end="", flush=True)


@contextlib.contextmanager
def _interrupts(are_noted: bool) -> Iterator[threading.Event]:
    """Sets an event at the first Ctrl-C, so that no step of the model is cut in two; a second one interrupts."""
    pressed = threading.Event()
    if not are_noted or threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def note(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
