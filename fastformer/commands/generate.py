"""`fastformer generate`."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastformer.console import is_terminal, shown

if TYPE_CHECKING:
    from fastformer.data import Tokenizer
    from fastformer.generation.input_errors import ErrorPolicy
    from fastformer.generation.ordered_stream import Source
    from fastformer.generation.request_builder import RequestBuilder
    from fastformer.generation.requests import Request
    from fastformer.generation.text_io import Item

logger = logging.getLogger("fastformer")

FILLED_BY = ("file",)  # a prompt or a file, not both
TEXTS = ("prompt", "stop")
_READ_AHEAD = 4096  # prompts of a file that are held at a time


def generate(
    run: str,
    prompt: str | None = None,
    *,
    file: str | None = None,
    stop: list[str] | None = None,
    window: Literal["stop", "slide"] = "stop",
    on_error: Literal["stop", "skip"] = "stop",
    device: str = "auto",
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = None,
    greedy: bool = False,
    num_beams: int = 1,
    num_return_sequences: int = 1,
    beam_rules: Literal["tensor2tensor", "transformers"] = "tensor2tensor",
    length_penalty: float | None = None,
    early_stopping: bool | Literal["never"] = False,
    num_beam_groups: int = 1,
    diversity_penalty: float = 0.0,
    min_new_tokens: int = 0,
    max_new_tokens: int | None = None,
    max_time: float | None = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> None:
    """Continues a prompt with a language model.

    It samples, if no flag says otherwise. The continuation of one prompt is printed as it is made; several, or those of
    beams, at the end.

    With --file, or without a prompt, each line is a prompt, of the file or of standard input. All are decoded
    together, and there is a line of output for each, in order: the prompt and its continuation, in which a line end is
    written as \\n. With --num_return_sequences there are as many lines, each behind the number of its prompt and a tab.
    Empty lines stay empty.

    Args:
        run: the run folder
        prompt: the text to continue; without it, or with -, the lines of standard input as those of --file
        file: a UTF-8 file, one prompt a line (- is standard input); for each a line of output, in order, in which line
            ends are written as \\n, with --num_return_sequences so many, each behind the number of the prompt and a tab
        stop: a text that ends the continuation and isn't printed; it may stand there several times. In most shells
            $'\\n' is a line end
        window: what becomes of a text that fills the model's positions: stop ends it there; slide forgets the older
            half of what the model sees and goes on, up to --max_new_tokens, and takes a longer prompt by its end
        on_error: at a line that is too long or no UTF-8, stop, or skip it with an empty line in its place and a warning
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        precision: what the weights become; int8 is for a CPU alone; without it they stay as they were saved
        greedy: take the best token always, without sampling
        num_beams: above 1, search with so many beams instead of sampling
        num_return_sequences: so many continuations, with a line of --- between them
        beam_rules: whose beam search; transformers is that of Hugging Face's generate
        length_penalty: alpha of ((5 + length) / 6) ** alpha, by transformers' rules of length ** alpha, which divides
            the score of beams; by default 0.6, by transformers' rules 1.0
        early_stopping: stop when num_beams hypotheses are finished, better ones possible or not; never, of
            transformers' rules alone, goes on while a better one is possible
        num_beam_groups: so many groups of beams, which avoid each other's tokens; with --diversity_penalty
        diversity_penalty: what a token costs for each time that an earlier group has just chosen it
        min_new_tokens: the shortest continuation
        max_new_tokens: the longest continuation; by default as much as the model's positions allow
        max_time: seconds after which it ends with what there is
        repetition_penalty: above 1 discourages tokens that were there
        no_repeat_ngram_size: no n-gram of this length comes twice; 0 is off
        temperature: of the sampling; below 1 sharpens the distribution
        top_k: draw from the k best tokens; 0 is all
        top_p: draw from the smallest set of tokens that holds this probability
        seed: of the sampling
    """
    from torch import Tensor

    from fastformer.checkpoints import load_model
    from fastformer.devices import choose_device
    from fastformer.generation import GenerationConfig
    from fastformer.generation import generate as search
    from fastformer.generation.input_errors import ErrorPolicy
    from fastformer.generation.precisions import DTYPES, asked_precision
    from fastformer.generation.request_builder import RequestBuilder

    if prompt is not None and file is not None:
        raise ValueError(f"expected a prompt or --file, got both: {prompt!r:.60} and {file}")
    _check_sampling(
        greedy, num_beams, num_return_sequences, {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    )
    place = choose_device("cpu" if (device, precision) == ("auto", "int8") else device)
    model, tokenizer = load_model(run, ("GPT",), device=place, dtype=DTYPES.get(precision or ""))
    options: dict[str, Any] = {
        "num_beams": num_beams,
        "num_return_sequences": num_return_sequences,
        "beam_rules": beam_rules,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "num_beam_groups": num_beam_groups,
        "diversity_penalty": diversity_penalty,
        "min_new_tokens": min_new_tokens,
        "max_new_tokens": max_new_tokens,
        "max_time": max_time,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "do_sample": not greedy and num_beams == 1,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "precision": asked_precision(model, precision),
        "stop_strings": tuple(stop or ()),
        "window": window,
    }
    say = _Sayings(tokenizer, options["stop_strings"], model.config.max_len)
    if prompt is None or prompt == "-":
        builder = RequestBuilder(model, GenerationConfig(**options), log_probs=False, tokenizer=tokenizer)
        errors = ErrorPolicy(on_error, left=("its line empty", "their lines are empty"))
        _continue_lines(builder, say, "-" if file is None else file, errors)
        say.report(max_new_tokens)
        return
    ids = say.encode(prompt)
    if not ids:
        raise ValueError("expected a prompt of at least one token, got an empty one")
    say.warn_of_unknown()
    # What is sampled or greedy comes token by token; beams and several samples are known at the end.
    streamer = say.streamer(prompt) if max(num_beams, num_return_sequences) == 1 else None
    out = search(model, [ids], streamer=streamer, tokenizer=tokenizer, **options)
    assert isinstance(out, Tensor)
    new = [row[len(ids) :] for row in out.tolist()]
    if streamer is None:
        print(shown("\n---\n".join(say.text(prompt, ids, tokens) for tokens in new), sys.stdout))
    for tokens in new:
        say.note_end(ids, tokens)
    say.report(max_new_tokens)


def _check_sampling(greedy: bool, num_beams: int, num_return_sequences: int, sampling: dict[str, float]) -> None:
    if greedy and num_beams > 1:
        raise ValueError(f"expected --greedy or --num_beams {num_beams}, got both")
    if greedy and num_return_sequences > 1:
        raise ValueError(
            f"expected --greedy or --num_return_sequences {num_return_sequences}, got both: "
            "the best token always makes one continuation"
        )
    for name, value in sampling.items():
        if value != (0 if name == "top_k" else 1.0) and (greedy or num_beams > 1):
            other = "--greedy" if greedy else f"--num_beams {num_beams}"
            raise ValueError(f"expected {other} or --{name} {value}, got both: it is sampling that a {name} changes")


class _Sayings:
    """What prompts become, and what there is to say of them at the end.

    Args:
        tokenizer: of the model.
        stop: texts that end a continuation.
        max_len: of the model.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], max_len: int) -> None:
        self._tokenizer, self._stop, self._max_len = tokenizer, stop, max_len
        self._tokens = self._unknown = self._cut = 0

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt."""
        ids = self._tokenizer.encode(prompt)
        unk = self._tokenizer.special_ids.unk
        self._tokens += len(ids)
        self._unknown += 0 if unk is None else ids.count(unk)
        return ids

    def text(self, prompt: str, ids: Sequence[int], tokens: Sequence[int]) -> str:
        """A prompt, as it was typed, and its continuation."""
        from fastformer.generation.streaming import before_stop

        said, again = self._tokenizer.decode([*ids, *tokens]), self._tokenizer.decode(ids)
        said = before_stop(said, self._stop, len(again))
        # A tokenizer may give back a prompt that it doesn't hold quite as it was, a line end say.
        return prompt + said[len(again) :] if said.startswith(again) else said

    def streamer(self, prompt: str) -> Any:
        """Prints a continuation as it is made."""
        from fastformer.generation.streaming import TextStreamer

        class Streamer(TextStreamer):
            def write(self, text: str) -> None:
                super().write(shown(text, sys.stdout))

        return Streamer(self._tokenizer, prompt=prompt, stop=self._stop)

    def note_end(self, ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Notes whether a continuation ended because the model has no more positions."""
        special = self._tokenizer.special_ids
        is_ended = any(token in special.eos or token == special.pad for token in tokens)
        self._cut += not is_ended and len(ids) + len(tokens) == self._max_len

    def warn_of_unknown(self) -> None:
        """Says how much of the prompts the tokenizer doesn't know."""
        if self._unknown:
            logger.warning("the tokenizer doesn't know %d of the prompt's %d tokens", self._unknown, self._tokens)

    def report(self, max_new_tokens: int | None) -> None:
        """Says how to go on, where texts ended with the model's positions and nothing else was asked for."""
        if self._cut and max_new_tokens is None:
            logger.info(
                "ended where the model's %d positions do: --window slide --max_new_tokens N goes on", self._max_len
            )


class _Prompt(NamedTuple):
    """A prompt on its way: its number, its text, and which of its samples is asked for (None: all)."""

    number: int
    text: str
    sample: int | None


def _continue_lines(builder: RequestBuilder, say: _Sayings, file: str, errors: ErrorPolicy) -> None:
    """Prints a line for each prompt of a file, or of standard input."""
    import torch

    from fastformer.commands._lines import Texts, arriving, file_lines
    from fastformer.generation.generate import new_scheduler
    from fastformer.generation.input_errors import TextError, failure
    from fastformer.generation.ordered_stream import IterableSource, ordered_stream

    settings, name = builder.config, "standard input" if file == "-" else file
    if file != "-":
        texts = Texts(IterableSource(file_lines(file)), name, errors, None)
    else:
        if is_terminal(sys.stdin):
            print("continues each line that you type; Ctrl-D ends", file=sys.stderr)
        texts = Texts(arriving(), name, errors, None)
    # Samples of one prompt slide apart: then each is a request.
    slides = settings.window == "slide" and settings.samples > 1
    prompts = _Prompts(texts, list(range(settings.samples)) if slides else [None])
    ids: dict[int, list[int]] = {}

    def begin(prompt: _Prompt) -> Request | None:
        if not prompt.text.strip():
            return None
        try:
            row = ids[prompt.number] = ids.get(prompt.number) or say.encode(prompt.text)
            return builder.build(builder.check(row), place=prompt.number - 1, sample=prompt.sample)
        except ValueError as error:
            if not prompt.sample:  # else it was met with the first
                errors.handle(TextError(f"{name}, line {prompt.number}: {error}"))
            return None

    total, scheduler = 0, new_scheduler(builder.engine, is_endless=True)
    with torch.inference_mode():
        for ready in ordered_stream(scheduler, prompts, begin, model=builder.model, read_ahead=_READ_AHEAD):
            lines: list[str] = []
            for prompt, request in ready:
                if request is None:
                    if not prompt.sample:
                        total += 1
                        lines.append(_numbered(prompt, "", settings.num_return_sequences))
                    continue
                total += not prompt.sample
                if request.error is not None:
                    _print_lines(lines)
                    raise failure(f"{name}, line {prompt.number}", request.error) from request.error
                row = ids[prompt.number]
                for found in request.results:
                    text = say.text(prompt.text, row, found.tokens)
                    lines.append(_numbered(prompt, text, settings.num_return_sequences))
                    say.note_end(row, found.tokens)
                if prompt.sample in (None, settings.samples - 1):
                    del ids[prompt.number]
            _print_lines(lines)
    say.warn_of_unknown()
    errors.report(total)


class _Prompts:
    """A source of lines as one of prompts, each for some samples."""

    def __init__(self, texts: Source[Item], samples: Sequence[int | None]) -> None:
        self._texts, self._samples, self._numbers = texts, samples, itertools.count(1)
        self._ready: Iterator[_Prompt] = iter(())

    def get(self, wait: bool) -> _Prompt | None:
        """See `Source.get`."""
        for prompt in self._ready:
            return prompt
        item = self._texts.get(wait)
        if item is None:
            return None
        number = next(self._numbers)
        samples = self._samples if item.text.strip() else [None]
        self._ready = iter([_Prompt(number, item.text, sample) for sample in samples])
        return next(self._ready)


def _numbered(prompt: _Prompt, text: str, count: int) -> str:
    """A text as a line of the output."""
    line = text.replace("\r", "\\r").replace("\n", "\\n")
    return f"{prompt.number}\t{line}" if count > 1 else line


def _print_lines(lines: Sequence[str]) -> None:
    if lines:
        print(shown("\n".join(lines), sys.stdout), flush=True)
