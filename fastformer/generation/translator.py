"""Text in, text out: a model, its tokenizer, and batches by length."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn

from fastformer.generation.bad_texts import BadTexts, TextError
from fastformer.generation.decoders import Model, as_model, device_of, is_decoder_only
from fastformer.generation.generate import RequestMaker, most_new_tokens, new_scheduler
from fastformer.generation.inputs import pad
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import run
from fastformer.generation.settings import GenerationSettings
from fastformer.special_ids import SpecialIds

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
READ_AHEAD = 1000  # texts of a stream that are sorted by length together


class TextCodec(Protocol):
    """What a translator asks of a tokenizer; those of `fastformer.data` have it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        ...

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as a readable string."""
        ...


class Scored(NamedTuple):
    """A translation and its score: the log-probability, for beams divided by the length penalty."""

    text: str
    score: float


class Translator:
    """Translates texts with a trained model.

    Args:
        model: a `models.Transformer`, a `baseline.LSTMSeq2Seq`, or a model with the methods of one of them. It is set
            to evaluation while it translates.
        tokenizer: of both sides.
        max_batch_size: rows that are decoded together: texts times beams or samples. None: 256 on a CPU, 1,024 on a
            GPU.
        max_batch_bytes: what the caches of those may take, about; the more beams and tokens, the fewer texts at a time.
            One text is translated whatever it takes. None: 512 MiB on a CPU, a quarter of the free memory on a GPU.
    """

    def __init__(
        self,
        model: Model | nn.Module,
        tokenizer: TextCodec,
        *,
        max_batch_size: int | None = None,
        max_batch_bytes: int | None = None,
    ) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_batch_bytes", max_batch_bytes)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"expected {name} to be an integer of at least 1, got {value!r}")
        if not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode", "tokens")):
            raise ValueError(f"expected a tokenizer with encode, decode and tokens, got {type(tokenizer).__name__}")
        self.model, self.tokenizer = as_model(model), tokenizer
        if is_decoder_only(self.model):
            raise ValueError(
                f"expected a model that reads a source, got {type(model).__name__}: see fastformer.generate"
            )
        self.max_batch_size, self.max_batch_bytes = max_batch_size, max_batch_bytes

    @classmethod
    def from_pretrained(
        cls,
        run: str | os.PathLike[str],
        tokenizer: TextCodec | None = None,
        *,
        device: torch.device | str | None = None,
        precision: str | None = None,
        max_batch_size: int | None = None,
        max_batch_bytes: int | None = None,
    ) -> Translator:
        """The translator of a run folder, whichever architecture it holds.

        Args:
            run: the folder.
            tokenizer: None: the folder's own.
            device: where it runs; None: the CPU.
            precision: the dtype that the weights are loaded as, which the caches follow: "fp32", "bf16" or "fp16";
                None: as they were saved. Logits and scores are fp32 always.
            max_batch_size, max_batch_bytes: see the class.

        Raises:
            ValueError: a folder that holds no translator, or is damaged; no such device or precision.
        """
        from fastformer.run_folder import load_model

        if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
            raise ValueError(f"expected precision fp32, bf16 or fp16, got {precision!r}")
        dtype = None if precision is None else PRECISIONS[precision]
        model, own = load_model(run, ("Transformer", "LSTMSeq2Seq"), device=device, dtype=dtype)
        return cls(model, tokenizer or own, max_batch_size=max_batch_size, max_batch_bytes=max_batch_bytes)

    @overload  # a str is an iterable of str as well: the first that fits counts
    def translate(  # type: ignore[overload-overlap]
        self, texts: str, *, on_error: str = ..., skip_long: bool = ..., return_scores: Literal[False] = ...
    ) -> str: ...

    @overload
    def translate(
        self, texts: Iterable[str], *, on_error: str = ..., skip_long: bool = ..., return_scores: Literal[False] = ...
    ) -> list[str]: ...

    @overload
    def translate(
        self,
        texts: str | Iterable[str],
        *,
        on_error: str = ...,
        skip_long: bool = ...,
        return_scores: bool = ...,
        **options: Any,
    ) -> Any: ...

    def translate(
        self,
        texts: str | Iterable[str],
        *,
        on_error: str = "stop",
        skip_long: bool = False,
        return_scores: bool = False,
        **options: Any,
    ) -> Any:
        """Translates a text or many; the order is kept.

        Args:
            texts: a text, or texts: a list, an array, a column, a generator, ...
            on_error: "stop", or "skip": a text that can't be translated (empty, or longer than the model's max_len)
                gets an empty translation and a warning that names it by its number.
            skip_long: skip what is only too long.
            return_scores: give `Scored(text, score)` in place of each translation.
            options: of `generate`: num_beams, length_penalty, do_sample, max_new_tokens, num_return_sequences, ...

        Returns:
            A str for a str, else a list with an item for each text. With num_return_sequences > 1 each item is a list:
            the n best of a beam search, best first, or so many samples; it is shorter where fewer hypotheses exist, and
            empty for a text that was skipped.

        Raises:
            ValueError: an unknown option (the nearest is suggested), something that is no text, a text that can't be
                translated (named by its number, from 1).
        """
        settings, bad = self.settings(options), BadTexts(on_error, skip_long)
        items = [texts] if isinstance(texts, str) else list(_checked(texts))
        for number, text in enumerate(items, 1):
            if not _text(text, number).strip():
                bad.meet(TextError(f"text {number}: expected something to translate, got an empty text"))
        found = [answer for group in self.translate_groups([items], settings, bad) for answer in group]
        bad.report(len(items))
        answers = [_shaped(answer, settings, return_scores) for answer in found]
        return answers[0] if isinstance(texts, str) else answers

    @overload
    def stream(
        self,
        texts: Iterable[str],
        *,
        read_ahead: int = ...,
        on_error: str = ...,
        skip_long: bool = ...,
        return_scores: Literal[False] = ...,
    ) -> Iterator[str]: ...

    @overload
    def stream(
        self,
        texts: Iterable[str],
        *,
        read_ahead: int = ...,
        on_error: str = ...,
        skip_long: bool = ...,
        return_scores: bool = ...,
        **options: Any,
    ) -> Iterator[Any]: ...

    def stream(
        self,
        texts: Iterable[str],
        *,
        read_ahead: int = READ_AHEAD,
        on_error: str = "stop",
        skip_long: bool = False,
        return_scores: bool = False,
        **options: Any,
    ) -> Iterator[Any]:
        """Translates as texts come, in order; an empty text stays empty.

        Args:
            texts: what to translate.
            read_ahead: how many are read before the first is translated; those are batched by length together.
            on_error, skip_long, return_scores, options: see `translate`.

        Raises:
            ValueError: see `translate`; a read_ahead below 1.
        """
        settings, bad = self.settings(options), BadTexts(on_error, skip_long)
        if not isinstance(read_ahead, int) or read_ahead < 1:
            raise ValueError(f"expected read_ahead of at least 1, got {read_ahead!r}")
        if isinstance(texts, str):
            raise ValueError("expected texts to stream, got one str: give it to translate")
        rest = iter(_checked(texts))
        groups = iter(lambda: list(itertools.islice(rest, read_ahead)), [])

        def answers() -> Iterator[Any]:
            total = 0
            for group in self.translate_groups(groups, settings, bad):
                total += len(group)
                yield from (_shaped(answer, settings, return_scores) for answer in group)
            bad.report(total)

        return answers()

    def translate_groups(
        self, groups: Iterable[Sequence[str]], settings: GenerationSettings, bad: BadTexts
    ) -> Iterator[list[list[Scored]]]:
        """Translates group by group: what `translate` and `stream` are made of.

        Args:
            groups: texts that are batched by length together.
            settings: of the search, from `settings`.
            bad: what becomes of texts that can't be translated.

        Yields:
            For each group, for each of its texts, the hypotheses, best first; none for an empty or skipped text.
        """
        maker = RequestMaker(self.model, settings)
        scheduler = new_scheduler(maker.engine, self.max_batch_size, self.max_batch_bytes)
        first = 1
        for group in groups:
            requests: list[Request | None] = []
            for number, text in enumerate(group, first):
                try:
                    ids = self.encode(text, number) if _text(text, number).strip() else []
                except TextError as error:
                    bad.meet(error)
                    ids = []
                requests.append(maker.make(ids) if ids else None)
            with evaluating(self.model):
                # The longest first: at the end, few rows are left alone.
                waiting = [request for request in requests if request is not None]
                run(scheduler, sorted(waiting, key=lambda request: -len(request.prompt.source or ())))
            yield [
                [] if request is None else [Scored(self.tokenizer.decode(h.tokens), h.score) for h in request.results]
                for request in requests
            ]
            first += len(group)

    def settings(self, options: Mapping[str, Any]) -> GenerationSettings:
        """The settings that options of `generate` ask for, held against the model.

        Raises:
            ValueError: an unknown option, or one that is out of its range.
        """
        if "return_dict_in_generate" in options:
            raise ValueError("a Translator returns texts: give return_scores=True instead of return_dict_in_generate")
        settings = GenerationSettings.from_options(options)
        settings.check_model(self.model.config.vocab_size)
        most_new_tokens(self.model, 1, settings)
        return settings

    def encode(self, text: str, number: int = 1) -> list[int]:
        """The source ids of a text, EOS at the end.

        Raises:
            TextError: an empty text, one longer than the model's max_len, or one that the tokenizer can't encode.
        """
        if not _text(text, number).strip():
            raise TextError(f"text {number}: expected something to translate, got an empty text")
        try:
            ids = [*self.tokenizer.encode(text), SpecialIds.of(self.model.config).first_eos]
        except ValueError as error:  # a lone surrogate, or what a foreign tokenizer has no token for
            raise TextError(f"text {number}: {error}") from error
        max_len = self.model.config.max_len
        if len(ids) > max_len:
            raise TextError(
                f"text {number}: expected at most {max_len} tokens, got {len(ids)}: split it into sentences",
                is_long=True,
            )
        return ids

    def attention(self, text: str) -> tuple[list[str], list[str], Tensor]:
        """Which source tokens each token of the translation looked at.

        Returns:
            Source tokens, target tokens, and (num_layers, num_heads, target, source) fp32 weights of cross-attention.

        Raises:
            ValueError: a text that can't be translated, or a model without `attention_maps`.
        """
        attention_maps = getattr(self.model, "attention_maps", None)
        if attention_maps is None:
            raise ValueError(f"expected a model with attention_maps, which {type(self.model).__name__} doesn't have")
        source = self.encode(_text(text, 1))
        with evaluating(self.model), torch.inference_mode():
            ids = pad([source]).to(device_of(self.model))
            request = (maker := RequestMaker(self.model, GenerationSettings())).make(source)
            run(new_scheduler(maker.engine), [request])
            target = request.results[0].tokens
            shifted = torch.tensor([[maker.ids.start, *target[:-1]]], device=ids.device)
            weights: Tensor = attention_maps(ids, shifted)["cross"][:, 0]
        return self.tokenizer.tokens(source), self.tokenizer.tokens(target), weights.float().cpu().clone()


@contextlib.contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Sets a model to evaluation; behind it each of its modules is as it was."""
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _checked(texts: Iterable[str]) -> Iterable[str]:
    if isinstance(texts, bytes | bytearray | Mapping) or not isinstance(texts, Iterable):
        raise ValueError(f"expected a text, or a list of texts, got {type(texts).__name__}")
    return texts


def _text(text: object, number: int) -> str:
    if not isinstance(text, str):
        raise ValueError(f"texts[{number - 1}]: expected a str, got {type(text).__name__} {text!r:.40}")
    return text


def _shaped(answer: list[Scored], settings: GenerationSettings, return_scores: bool) -> Any:
    """An answer as the caller wants it: one or several, with its score or without."""
    if settings.num_return_sequences == 1:
        best = answer[0] if answer else Scored("", -math.inf)
        return best if return_scores else best.text
    return answer if return_scores else [hypothesis.text for hypothesis in answer]
