"""`fastformer generate`."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jsonargparse import ArgumentParser

from fastformer.commands._options import OPTIONS, add_options, constraint_options, given_options
from fastformer.console import shown
from fastformer.generation.config import GenerationConfig, Precision

if TYPE_CHECKING:
    from fastformer.data import Tokenizer
    from fastformer.generation.requests import Request
    from fastformer.generation.text_io import Item, Source
    from fastformer.models import GPT

logger = logging.getLogger("fastformer")

FILLED_BY = ("file",)  # a prompt or a file, not both
TEXTS = ("prompt", "stop", "regex", "choices")
_MANY = 512  # new tokens of a prompt if neither a flag nor the folder of another program sets their number


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Gives the command's parser the flags of decoding."""
    return add_options(parser, ("num_return_sequences", "window", *OPTIONS))


def generate(
    run: str,
    prompt: str | None = None,
    *,
    file: str | None = None,
    stop: list[str] | None = None,
    schema: str | None = None,
    regex: str | None = None,
    choices: list[str] | None = None,
    grammar: str | None = None,
    adapter: str | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    device: str = "auto",
    precision: Precision | None = None,
    config: str | None = None,
    greedy: bool = False,
    cut: bool = False,
    parse_special: bool = True,
    **options: Any,
) -> None:
    """Continues a prompt with a language model.

    It samples, unless a flag says otherwise; for a folder of transformers, if its generation_config.json says so. The
    continuation of one prompt is printed as it is made; several, with a line
    of --- between them, or those of beams, at the end.

    With --file, or without a prompt, each line is a prompt, of the file or of standard input. All are decoded
    together, and there is a line of output for each, in order: the prompt and its continuation, in which a line end is
    written as \\n. With --num_return_sequences there are as many lines, each after the number of its prompt and a tab.
    Empty lines stay empty.

    Args:
        run: the run folder, or a folder with a language model, such as a Llama, that transformers saved
        prompt: the text to continue; without it, or with -, the lines of standard input are prompts, as with --file
        file: a UTF-8 file, one prompt a line (- is standard input). Each prompt has a line of output, in order, in
            which line ends are written as \\n; with --num_return_sequences several lines, each after the prompt's
            number and a tab
        stop: a text that ends the continuation and isn't printed; repeat the flag for several. In most shells
            $'\\n' is a line end
        schema: a file with a JSON schema, which the continuation matches as JSON
        regex: a regular expression that the continuation matches as a whole
        choices: a text that the continuation may be; repeat the flag for several
        grammar: a file with a context-free grammar, in Lark's syntax, that the continuation matches
        adapter: the folder of a LoRA adapter, as peft saves it, with which the model decodes
        on_error: at a line that is too long or not UTF-8, stop, or skip it with an empty line instead and a warning
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        precision: convert the weights to this (auto runs int8 and int4 on a CPU); by default they stay as they were
        config: a YAML file with options of decoding, such as top_k: 40; flags override it
        greedy: always choose the best token, without sampling; --num_beams above 1 searches without sampling
        cut: if a prompt leaves no room in the model's positions, use only its end, instead of raising an error
        parse_special: special tokens that a prompt spells become their ids, as in completions of the server; false:
            they are ordinary text
        options: the flags of decoding
    """
    from fastformer.checkpoints import load_model
    from fastformer.devices import choose_device
    from fastformer.generation.engines import rounded_for_steps
    from fastformer.generation.folder_options import folder_options, with_folder_options
    from fastformer.generation.model_protocols import DTYPES, asked_precision

    given = {"precision": precision, "stop_strings": stop or None, "adapter": adapter}
    given |= constraint_options(schema, regex, choices, grammar)
    values = given_options(config, {**options, **{name: value for name, value in given.items() if value is not None}})
    samples = not greedy and GenerationConfig(num_beams=values.get("num_beams", 1)).num_beams == 1
    _check_sampling(greedy, values)
    file_options = folder_options(run)
    is_foreign = file_options is not None
    if greedy:
        values |= {"do_sample": False, "num_beams": 1}
    elif not is_foreign or not samples:  # else the folder decides
        values.setdefault("do_sample", samples)
    decoding = GenerationConfig.from_options({"do_sample": samples, **values})
    place = choose_device(device, decoding.precision)
    model, tokenizer = load_model(run, ("GPT",), device=place, dtype=DTYPES.get(decoding.precision or ""))
    model = rounded_for_steps(model, decoding.precision)
    if is_foreign:
        decoding = with_folder_options(file_options, values, model.config.max_len)
    decoding = replace(decoding, precision=asked_precision(model, decoding.precision))
    is_open = is_foreign and decoding.max_new_tokens is None and decoding.max_length is None
    limit = _MANY if is_open else None
    say = _Sayings(tokenizer, decoding, model.config.max_len, limit=limit, cuts=cut, parses=parse_special)
    if prompt is None or prompt == "-":
        _continue_lines(model, decoding, say, "-" if file is None else file, on_error)
    else:
        _continue_one(model, decoding, say, prompt)
    say.report(decoding.max_new_tokens)


def _continue_one(model: GPT, config: GenerationConfig, say: _Sayings, prompt: str) -> None:
    """Prints the continuation of a prompt, or several continuations."""
    from torch import Tensor

    from fastformer.generation import Generator
    from fastformer.generation import generate as search

    ids = say.encode(prompt)
    if say.limit is not None and len(ids) < model.config.max_len:
        config = replace(config, max_new_tokens=min(say.limit, model.config.max_len - len(ids)))
    if not ids:
        raise ValueError("expected a prompt of at least one token, got an empty one")
    say.warn_of_unknown()
    # A single row is printed token by token; the results of beams and of several samples are known only at the end.
    streamer = say.streamer(prompt) if max(config.num_beams, config.num_return_sequences) == 1 else None
    out: object
    if config.adapter is None:
        out = search(model, [ids], config, streamer=streamer, tokenizer=say.tokenizer)
    else:
        adapters = {config.adapter: config.adapter}
        generator = Generator(model, precision=config.precision, engine=config.engine, adapters=adapters)
        out = generator.generate([ids], config, streamer=streamer, tokenizer=say.tokenizer)
    assert isinstance(out, Tensor)
    new = [row[len(ids) :] for row in out.tolist()]
    if streamer is None:
        print(shown("\n---\n".join(say.text(prompt, ids, tokens) for tokens in new), sys.stdout))
    for tokens in new:
        say.note_end(ids, tokens)


def _check_sampling(greedy: bool, options: Mapping[str, Any]) -> None:
    """Refuses flags of sampling if the command doesn't sample."""
    num_beams, returned = options.get("num_beams", 1), options.get("num_return_sequences", 1)
    if greedy and num_beams != 1:
        raise ValueError(f"expected --greedy or --num_beams {num_beams}, got both")
    if greedy and returned != 1:
        raise ValueError(f"expected --greedy, which gives one continuation, or --num_return_sequences {returned}")
    for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
        if options.get(name, neutral) != neutral and (greedy or num_beams != 1):
            other = "--greedy" if greedy else f"--num_beams {num_beams}"
            raise ValueError(f"expected {other} or --{name} {options[name]}, got both: {name} only affects sampling")


class _Sayings:
    """Encodes prompts, makes the texts of their continuations, and reports at the end.

    Args:
        tokenizer: the model's tokenizer.
        config: the search's config.
        max_len: the number of the model's positions.
        limit: the most new tokens if the config sets none.
        cuts: whether a prompt that leaves no room is cut to its end.
        parses: whether special tokens in prompts become their ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: GenerationConfig,
        max_len: int,
        *,
        limit: int | None,
        cuts: bool,
        parses: bool,
    ) -> None:
        self.tokenizer, self._stop, self._max_len, self.limit = tokenizer, config.stop_strings, max_len, limit
        self._tokens = self._unknown = self._cut = self._limited = self._shortened = 0
        self._encode = tokenizer.encode_prompt if parses else tokenizer.encode
        # A cut prompt leaves room for the new tokens that were asked for, else for a quarter of the positions.
        self._room = config.max_new_tokens or min(limit or max_len, max(1, max_len // 4)) if cuts else 0

    def encode(self, prompt: str) -> list[int]:
        """Returns the ids of a prompt."""
        ids = self._encode(prompt)
        if self._room and len(ids) + self._room > self._max_len:
            begin = self.tokenizer.encode("")  # BOS, if the tokenizer adds one
            begin = begin if ids[: len(begin)] == begin else []
            length = self._max_len - self._room - len(begin)
            if length > 0:
                ids = [*begin, *ids[-length:]]
                self._shortened += 1
        unk = self.tokenizer.special_ids.unk
        self._tokens += len(ids)
        self._unknown += 0 if unk is None else ids.count(unk)
        return ids

    def text(self, prompt: str, ids: Sequence[int], tokens: Sequence[int]) -> str:
        """Returns a prompt, as it was typed, with its continuation."""
        from fastformer.generation.streaming import text_before_stop

        whole, again = text_before_stop(self.tokenizer, ids, tokens, self._stop), self.tokenizer.decode(ids)
        # A tokenizer may not give back a prompt exactly, a line end say.
        return prompt + whole[len(again) :] if whole.startswith(again) else whole

    def streamer(self, prompt: str) -> Any:
        """Makes a streamer that prints a continuation while it is made."""
        from fastformer.generation.streaming import TextStreamer

        class Streamer(TextStreamer):
            def write(self, text: str) -> None:
                super().write(shown(text, sys.stdout))

        return Streamer(self.tokenizer, prompt=prompt, stop=self._stop)

    def note_end(self, ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Records whether a continuation ended because the model has no more positions."""
        special = self.tokenizer.special_ids
        is_ended = any(token in special.eos or token == special.pad for token in tokens)
        self._cut += not is_ended and len(ids) + len(tokens) == self._max_len
        self._limited += not is_ended and len(tokens) == self.limit

    def warn_of_unknown(self) -> None:
        """Warns of the share of the prompts that the tokenizer doesn't know."""
        if self._unknown:
            logger.warning("the tokenizer doesn't know %d of the prompt's %d tokens", self._unknown, self._tokens)

    def report(self, max_new_tokens: int | None) -> None:
        """Reports cut prompts, and tells the user how to get longer texts if texts ended at a limit."""
        if self._shortened:
            logger.warning("cut the beginning of %d prompts: %d positions are too few", self._shortened, self._max_len)
        if self._limited:
            logger.info("stopped after %d new tokens; --max_new_tokens N continues", self.limit)
        elif self._cut and max_new_tokens is None:
            logger.info(
                "stopped at the last of the model's %d positions; --window slide --max_new_tokens N continues",
                self._max_len,
            )


class _Prompt(NamedTuple):
    """A prompt in the queue: its number, its text, and the number of its sample (None: all samples)."""

    number: int
    text: str
    sample: int | None


def _continue_lines(model: GPT, config: GenerationConfig, say: _Sayings, file: str, on_error: str) -> None:
    """Prints a line for each prompt of a file, or of standard input."""
    import torch

    from fastformer.commands._lines import Texts, file_lines, typed
    from fastformer.generation.engines import choose_engine
    from fastformer.generation.folder_options import load_adapters
    from fastformer.generation.request_builder import RequestBuilder
    from fastformer.generation.scheduler import new_scheduler
    from fastformer.generation.session import Session
    from fastformer.generation.text_io import ErrorPolicy, IterableSource, TextError
    from fastformer.requests import failure

    engine = None  # of the builder's own choice
    if config.adapter is not None:
        engine = choose_engine(model, config.engine, config.precision)
        load_adapters(engine, model, {config.adapter: config.adapter})
    builder = RequestBuilder(model, config, log_probs=False, engine=engine, tokenizer=say.tokenizer)
    errors = ErrorPolicy(on_error, left=("its line empty", "their lines are empty"))
    name = "standard input" if file == "-" else file
    if file != "-":
        texts = Texts(IterableSource(file_lines(file)), name, errors, None)
    else:
        texts = typed("continues", name, errors)
    # With a sliding window the samples of a prompt move apart, so that each is a request.
    slides = config.window == "slide" and config.samples > 1
    prompts = _Prompts(texts, list(range(config.samples)) if slides else [None])
    ids: dict[int, list[int]] = {}

    def build(prompt: _Prompt) -> Request | None:
        if not prompt.text.strip():
            return None
        try:
            row = ids[prompt.number] = ids.get(prompt.number) or say.encode(prompt.text)
            checked = builder.check(row)
            if say.limit is not None:
                checked = checked._replace(limit=min(say.limit, checked.limit))
            return builder.build(checked, place=prompt.number - 1, sample=prompt.sample)
        except ValueError as error:
            if not prompt.sample:  # the first sample has reported it
                errors.handle(TextError(f"{name}, line {prompt.number}: {error}"))
            return None

    total = 0
    session: Session[Request] = Session(model, lambda: new_scheduler(builder.engine, is_endless=True))
    with torch.inference_mode():
        for ready in session.map(prompts, build):
            lines: list[str] = []
            for prompt, request in ready:
                if request is None:
                    if not prompt.sample:
                        total += 1
                        lines.append(_numbered(prompt, "", config.num_return_sequences))
                    continue
                total += not prompt.sample
                if request.error is not None:
                    _print_lines(lines)
                    raise failure(f"{name}, line {prompt.number}", request.error) from request.error
                row = ids[prompt.number]
                for result in request.results:
                    text = say.text(prompt.text, row, result.tokens)
                    lines.append(_numbered(prompt, text, config.num_return_sequences))
                    say.note_end(row, result.tokens)
                if prompt.sample in (None, config.samples - 1):
                    del ids[prompt.number]
            _print_lines(lines)
    say.warn_of_unknown()
    errors.report(total)


class _Prompts:
    """A source of prompts from a source of lines, each for some samples."""

    def __init__(self, texts: Source[Item], samples: Sequence[int | None]) -> None:
        self._texts, self._samples, self._numbers = texts, samples, itertools.count(1)
        self._ready: Iterator[_Prompt] = iter(())

    def get(self, wait: bool) -> _Prompt | None:
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
    """Formats a text as a line of the output."""
    line = text.replace("\r", "\\r").replace("\n", "\\n")
    return f"{prompt.number}\t{line}" if count > 1 else line


def _print_lines(lines: Sequence[str]) -> None:
    if lines:
        print(shown("\n".join(lines), sys.stdout), flush=True)
