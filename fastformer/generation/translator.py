"""Text in, text out: a model, its tokenizer, and a batch that is kept full."""

from __future__ import annotations

import itertools
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from fastformer.generation.alignment import check_attention, cross_attention
from fastformer.generation.config import GenerationConfig, Precision
from fastformer.generation.engines import Engine
from fastformer.generation.ensemble import Ensemble, Mean
from fastformer.generation.judge import Judge
from fastformer.generation.model_protocols import (
    DTYPES,
    Model,
    as_model,
    asked_precision,
    check_precision,
    evaluating,
    is_decoder_only,
)
from fastformer.generation.ordered_stream import IterableSource, Source, ordered_stream
from fastformer.generation.paragraphs import check_split, joined, translated_parts
from fastformer.generation.request_builder import CheckedInput, RequestBuilder, most_new_tokens
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, new_scheduler, run
from fastformer.generation.streaming import TextPieces
from fastformer.generation.text_io import (
    Answer,
    ErrorPolicy,
    ForEach,
    Form,
    Item,
    TextCodec,
    TextError,
    as_form,
    as_items,
    check_request,
    expect_text,
)
from fastformer.generation.text_io import Scored as Scored
from fastformer.generation.text_io import TokenScored as TokenScored
from fastformer.languages import LanguageIds
from fastformer.settings import Positive, check_value
from fastformer.special_ids import SpecialIds

READ_AHEAD = 4096  # texts of a stream in memory: several batches, because an answer may have to wait for its turn

# Options of `generate` that have other names here.
_INSTEAD = {
    "return_dict_in_generate": "return_scores=True",
    "streamer": "Translator.stream",
    "decoder_input_ids": "target_prefix",
}


class Translator(Judge):
    """Translates texts with a trained model.

    Args:
        model: a `models.Transformer`, a `baseline.LSTMSeq2Seq`, an `Ensemble` of these, or a model with the methods of
            one of them. It is set to evaluation while it translates.
        tokenizer: the tokenizer of both sides.
        max_batch_size: the most rows that are decoded together: texts times beams or samples. None: 512 on a CPU, 1,024
            on a GPU.
        max_batch_bytes: the approximate memory of the rows' caches: the more beams and tokens, the fewer texts at a
            time. A single text may use more. None: 512 MiB on a CPU, a quarter of the free memory on a GPU.
        precision: the default precision of the computation: "fp32", "bf16", "fp16", "int8" or "int4"; None: the model's
            own. See `fastformer.generate`.
        source_lang, target_lang: the default languages of texts and translations, for a model of many languages (NLLB,
            M2M100, mBART, MADLAD): the model's names, such as "eng_Latn", or short ones, such as "en". None: those in
            the tokenizer's folder, if any.

    Raises:
        ValueError: the model reads no source, a language is unknown (the nearest names are suggested), or a language is
            given and the model's languages can't be chosen.
    """

    def __init__(
        self,
        model: Model | nn.Module,
        tokenizer: TextCodec,
        *,
        max_batch_size: int | None = None,
        max_batch_bytes: int | None = None,
        precision: Precision | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> None:
        check_precision(precision)
        for name, value in (("max_batch_size", max_batch_size), ("max_batch_bytes", max_batch_bytes)):
            check_value(name, value, Positive | None)
        if not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode", "tokens")):
            raise ValueError(f"expected a tokenizer with encode, decode and tokens, got {type(tokenizer).__name__}")
        self.model, self.tokenizer = as_model(model), tokenizer
        if is_decoder_only(self.model):
            raise ValueError(
                f"expected a model that reads a source, got {type(model).__name__}: see fastformer.generate"
            )
        self.max_batch_size, self.max_batch_bytes = max_batch_size, max_batch_bytes
        self.precision = precision
        self.source_lang, self.target_lang = source_lang, target_lang
        self.check_languages(source_lang, target_lang)

    @classmethod
    def from_pretrained(
        cls,
        run: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: TextCodec | None = None,
        *,
        device: torch.device | str | None = None,
        precision: Precision | None = None,
        ensemble_weights: Sequence[float] | None = None,
        ensemble_mean: Mean = "probabilities",
        max_batch_size: int | None = None,
        max_batch_bytes: int | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> Translator:
        """Loads the translator of a run folder, of any architecture; or of several folders, as an ensemble.

        Args:
            run: the folder, or a folder with a BART, a Marian, an NLLB or a T5, say, that transformers saved. Or a list
                of folders, whose tokenizers must be the same: see `Ensemble`.
            tokenizer: None: the folder's own.
            device: the device of the model; None: the CPU.
            precision: the dtype of the loaded weights and the caches: "fp32", "bf16" or "fp16". With "int8" or "int4"
                they are loaded as they were saved, and the C++ engine rounds them, on a CPU. None: as they were saved,
                including int8 and int4 (`model.quantize()`). Logits and scores are always fp32.
            ensemble_weights, ensemble_mean: for several folders; see `Ensemble`.
            max_batch_size, max_batch_bytes, source_lang, target_lang: see the class.

        Raises:
            ValueError: a folder has no translator, or is damaged; an unknown device or precision.
        """
        from fastformer.checkpoints import load_models

        check_precision(precision)
        dtype, is_one = DTYPES.get(precision or ""), isinstance(run, str | os.PathLike)
        if not isinstance(run, str | os.PathLike | Sequence):
            raise ValueError(f"expected a folder, or a list of folders, got {type(run).__name__}")
        runs = [run] if isinstance(run, str | os.PathLike) else list(run)
        if ensemble_weights is not None and is_one:
            raise ValueError("expected ensemble_weights for several folders, got one folder")
        models, own = load_models(runs, ("Transformer", "LSTMSeq2Seq"), device=device, dtype=dtype)
        model = models[0] if is_one else Ensemble(models, ensemble_weights, ensemble_mean)
        return cls(
            model,
            tokenizer or own,
            max_batch_size=max_batch_size,
            max_batch_bytes=max_batch_bytes,
            precision=next(filter(None, (asked_precision(one, precision) for one in models)), None),
            source_lang=source_lang,
            target_lang=target_lang,
        )

    @overload  # a str is also an iterable of str: the first overload that fits counts
    def translate(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        target_prefix: str | None = ...,
        source_lang: str | None = ...,
        target_lang: str | None = ...,
        on_error: str = ...,
        skip_long: bool = ...,
        split: bool = ...,
        return_scores: Literal[False] = ...,
        return_token_scores: Literal[False] = ...,
    ) -> str: ...

    @overload
    def translate(
        self,
        texts: Iterable[str],
        *,
        target_prefix: Iterable[str | None] | None = ...,
        source_lang: ForEach = ...,
        target_lang: ForEach = ...,
        on_error: str = ...,
        skip_long: bool = ...,
        split: bool = ...,
        return_scores: Literal[False] = ...,
        return_token_scores: Literal[False] = ...,
    ) -> list[str]: ...

    @overload
    def translate(
        self,
        texts: str | Iterable[str],
        *,
        target_prefix: ForEach = ...,
        source_lang: ForEach = ...,
        target_lang: ForEach = ...,
        on_error: str = ...,
        skip_long: bool = ...,
        split: bool = ...,
        return_scores: bool = ...,
        return_token_scores: bool = ...,
        config: GenerationConfig | None = ...,
        **options: Any,
    ) -> Any: ...

    def translate(
        self,
        texts: str | Iterable[str],
        *,
        target_prefix: ForEach = None,
        source_lang: ForEach = None,
        target_lang: ForEach = None,
        on_error: str = "stop",
        skip_long: bool = False,
        split: bool = False,
        return_scores: bool = False,
        return_token_scores: bool = False,
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Any:
        """Translates a text, or several in their order.

        Args:
            texts: a text, or texts: a list, an array, a column, a generator, ...
            target_prefix: the beginning of the translation of a text; for texts one for each, "" or None for no prefix.
                The end of the prefix is the end of a token: the translation continues with the next word, not within
                the last one. Scores are those of the tokens after it.
            source_lang, target_lang: the languages, for a model of many: one for all texts, or one for each, with None
                for the object's. The target's token is not part of the translation. With beam_rules="transformers",
                lengths and their penalty count it as the first token, as in transformers.
            on_error: "stop", or "skip": a text that can't be translated (empty, or longer than the model's max_len)
                gets an empty translation, and a warning with its number.
            skip_long: skip texts that are only too long.
            split: split each text into sentences (`split_sentences`), translate each of them, and join the translations
                with the white space that was between the sentences. An empty text stays unchanged. It can't be combined
                with several translations, scores or a target_prefix.
            return_scores: return `Scored(text, score)` instead of each translation.
            return_token_scores: return `TokenScored(text, score, tokens)`, where tokens are pairs of a new token and
                its log-probability.
            config: the options of the search; options that are given by name override it.
            options: fields of `GenerationConfig`, such as num_beams and max_new_tokens; max_time applies to the whole
                call.

        Returns:
            A str for a str, else a list with an item for each text. With num_return_sequences > 1 each item is a list:
            the n best of a beam search, best first, or n samples. It is shorter if fewer hypotheses exist, and empty
            for a text that was skipped.

        Raises:
            ValueError: an unknown option (the nearest is suggested), an item that isn't a text, or a text that can't be
                translated (the message has its number, from 1).
        """
        config, errors = self.settings(options, config), ErrorPolicy(on_error, skip_long)
        self.check_languages(source_lang, target_lang)
        form = as_form(config, return_scores, return_token_scores)
        check_split(split, form, target_prefix)
        builder, began = self._builder(config, form.log_probs), time.monotonic()
        is_one = isinstance(texts, str)
        if split:
            deadline = None if config.max_time is None else began + config.max_time
            items = IterableSource(as_items(texts, None, source_lang, target_lang))
            parts = translated_parts(self, items, builder, errors, read_ahead=READ_AHEAD, deadline=deadline)
            said = [form.of(answer) for ready in joined(parts) for answer in ready]
            return said[0] if is_one else said
        # All texts are read first, so that an invalid one is reported before any work. Only their ids stay, in few
        # bytes each.
        inputs: list[CheckedInput | None] = []
        for number, item in enumerate(as_items(texts, target_prefix, source_lang, target_lang), 1):
            try:
                found = self.encode_item(item, number, builder)
                inputs.append(found._replace(row=array("q", found.row)))
            except TextError as error:
                errors.handle(error)
                inputs.append(None)

        def begin(index: int) -> Request | None:
            found = inputs[index]
            if found is None:
                return None
            request = builder.build(found, place=index)
            if config.max_time is not None:
                request.deadline = began + config.max_time
            return request

        # The longest texts come first, so that few rows are left to decode alone at the end.
        order = sorted(range(len(inputs)), key=lambda index: -len((inputs[index] or ((),))[0]))
        source = IterableSource(order)
        answers: list[Any] = [None] * len(inputs)
        scheduler = self.new_scheduler(builder.engine, is_endless=False)
        for ready in ordered_stream(scheduler, source, begin, model=self.model, read_ahead=READ_AHEAD):
            for index, request in ready:
                check_request(request, index + 1)
                answers[index] = form.of(Answer(self.tokenizer, request))
        errors.report(len(inputs))
        return answers[0] if is_one else answers

    @overload
    def stream(
        self,
        texts: str | Iterable[str],
        *,
        target_prefix: ForEach = ...,
        source_lang: ForEach = ...,
        target_lang: ForEach = ...,
        read_ahead: int = ...,
        on_error: str = ...,
        skip_long: bool = ...,
        split: bool = ...,
        return_scores: Literal[False] = ...,
        return_token_scores: Literal[False] = ...,
    ) -> Iterator[str]: ...

    @overload
    def stream(
        self,
        texts: str | Iterable[str],
        *,
        target_prefix: ForEach = ...,
        source_lang: ForEach = ...,
        target_lang: ForEach = ...,
        read_ahead: int = ...,
        on_error: str = ...,
        skip_long: bool = ...,
        split: bool = ...,
        return_scores: bool = ...,
        return_token_scores: bool = ...,
        config: GenerationConfig | None = ...,
        **options: Any,
    ) -> Iterator[Any]: ...

    def stream(
        self,
        texts: str | Iterable[str],
        *,
        target_prefix: ForEach = None,
        source_lang: ForEach = None,
        target_lang: ForEach = None,
        read_ahead: int = READ_AHEAD,
        on_error: str = "stop",
        skip_long: bool = False,
        split: bool = False,
        return_scores: bool = False,
        return_token_scores: bool = False,
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Translates texts as they arrive; or returns one text's translation piece by piece, as it is generated.

        Many texts are translated together. They are read when there is room for them, and no faster than their
        translations are consumed. Translations come in order; that of an empty text is empty.

        Args:
            texts: texts, for whole translations; or one text, for pieces. The pieces, one after another, are the result
                of `translate`. They can't come from beams or several samples. With split the pieces are sentences,
                which may come from beams.
            target_prefix, source_lang, target_lang: see `translate`; iterables are read along with the texts.
            read_ahead: the most texts that are read before the first of them is answered. An iterable can't tell
                whether its next text has arrived: if texts arrive slowly, 1 answers each before the next is read.
            on_error, skip_long, split, return_scores, return_token_scores: see `translate`.
            config, options: see `translate`; max_time applies to each text, or with split to each sentence, from the
                time when it is read.

        Raises:
            ValueError: see `translate`; or a read_ahead below 1. A text that can't be translated stops the stream after
                the translations before it have been returned.
        """
        config, errors = self.settings(options, config), ErrorPolicy(on_error, skip_long)
        self.check_languages(source_lang, target_lang)
        form = as_form(config, return_scores, return_token_scores)
        check_value("read_ahead", read_ahead, Positive)
        check_split(split, form, target_prefix)
        items = as_items(texts, target_prefix, source_lang, target_lang)
        if isinstance(texts, str) and split:
            builder = self._builder(config, False)
            parts = translated_parts(self, IterableSource(items), builder, errors, read_ahead=read_ahead)
            return (text for ready in parts for text, _ in ready if text)
        if isinstance(texts, str):
            check_one_stream(form, config)
            return self._pieces(next(iter(items)), config, errors)
        source = IterableSource(items)
        answers = self.answers(source, config, errors, log_probs=form.log_probs, read_ahead=read_ahead, split=split)
        return (form.of(answer) for ready in answers for answer in ready)

    def answers(
        self,
        source: Source[Item],
        settings: GenerationConfig,
        errors: ErrorPolicy,
        *,
        log_probs: bool,
        read_ahead: int = READ_AHEAD,
        split: bool = False,
    ) -> Iterator[list[Answer]]:
        """Translates the texts of a source, in order; `stream` and the command use this.

        Args:
            source: the texts.
            settings: the config of the search, a result of `settings`.
            errors: the policy for texts that can't be translated; it reports at the end.
            log_probs: whether to compute scores.
            read_ahead: see `stream`.
            split: see `translate`; the caller has called `check_split`.

        Yields:
            The answers that come next in the order, as soon as they are complete.
        """
        builder, numbers = self._builder(settings, log_probs), itertools.count(1)
        if split:
            return joined(translated_parts(self, source, builder, errors, read_ahead=read_ahead))

        def begin(item: Item) -> Request | None:
            number = next(numbers)
            if isinstance(item.text, str) and not item.text.strip():
                return None
            try:
                return builder.build(self.encode_item(item, number, builder), place=number - 1)
            except TextError as error:
                errors.handle(error)
                return None

        def answers() -> Iterator[list[Answer]]:
            total = 0
            scheduler = self.new_scheduler(builder.engine, is_endless=True)
            for ready in ordered_stream(scheduler, source, begin, model=self.model, read_ahead=read_ahead):
                found: list[Answer] = []
                for _, request in ready:
                    total += 1
                    if found and request is not None and request.error is not None:
                        yield found  # the answers before the error
                    check_request(request, total)
                    found.append(Answer(self.tokenizer, request))
                yield found
            errors.report(total)

        return answers()

    def _pieces(self, item: Item, config: GenerationConfig, errors: ErrorPolicy) -> Iterator[str]:
        """Yields the translation of a text, piece by piece."""
        builder = self._builder(config, False)
        try:
            checked = self.encode_item(item, 1, builder)
        except TextError as error:
            errors.handle(error)
            errors.report(1)
            return iter(())

        def pieces() -> Iterator[str]:
            tokens: list[int] = []
            request = builder.build(checked, on_token=tokens.append)
            found = TextPieces(self.tokenizer, checked.prefix, stop=config.stop_strings)
            scheduler = self.new_scheduler(builder.engine, is_endless=False)
            scheduler.submit([request])
            while not request.is_done:
                with evaluating(self.model):
                    scheduler.step()
                if piece := found.add(tokens):
                    yield piece
                tokens.clear()
            check_request(request, 1)
            if piece := found.end():
                yield piece

        return pieces()

    def _builder(self, config: GenerationConfig, log_probs: bool) -> RequestBuilder:
        # The engine is chosen in evaluation mode, in which the model will decode.
        with evaluating(self.model):
            return RequestBuilder(self.model, config, log_probs=log_probs, tokenizer=self.tokenizer)

    def new_scheduler(self, engine: Engine, *, is_endless: bool) -> Scheduler:
        """Makes a scheduler within this translator's limits; see `Scheduler`."""
        return new_scheduler(engine, self.max_batch_size, self.max_batch_bytes, is_endless=is_endless)

    def settings(self, options: Mapping[str, Any], config: GenerationConfig | None = None) -> GenerationConfig:
        """Returns the config of a call, checked against the model.

        Args:
            options: fields of `GenerationConfig` by name.
            config: the config that the options change; None: the defaults.

        Raises:
            ValueError: an unknown option, or one that is out of its range.
        """
        for name, instead in _INSTEAD.items():
            if name in options:
                raise ValueError(f"a Translator returns texts: expected {instead} instead of {name}")
        found = GenerationConfig.from_options(options, config)
        if found.precision is None and self.precision is not None:
            found = replace(found, precision=self.precision)
        found.check_model(self.model.config.vocab_size)
        most_new_tokens(self.model, 1, found)
        return found

    def encode(self, text: str, number: int | str = 1, languages: LanguageIds | None = None) -> list[int]:
        """Returns the source ids of a text, with EOS at the end and the ids that tell the model the language.

        Args:
            text: the text to translate.
            number: the name of the text in messages.
            languages: a result of `language_ids`; None: the object's languages.

        Raises:
            TextError: the text is empty, longer than the model's max_len, or can't be encoded by the tokenizer.
        """
        if not expect_text("texts", number, text).strip():
            raise TextError(f"text {number}: expected something to translate, got an empty text")
        told = self.language_ids() if languages is None else languages
        eos = SpecialIds.of(self.model.config).first_eos
        try:
            ids = [*told.front, *self.tokenizer.encode(text), eos, *told.behind]
        except ValueError as error:  # a lone surrogate, or text for which the tokenizer has no token
            raise TextError(f"text {number}: {error}") from error
        max_len = self.model.config.max_len
        if len(ids) > max_len:
            advice = "cut it" if isinstance(number, str) else "split it into sentences"  # the name of a sentence
            raise TextError(
                f"text {number}: expected at most {max_len} tokens, got {len(ids)}: {advice}",
                is_long=True,
            )
        return ids

    def encode_prefix(self, prefix: str | None, number: int | str = 1) -> list[int]:
        """Returns the ids that a translation begins with, without EOS.

        Raises:
            TextError: the tokenizer can't encode the text.
        """
        if prefix is None or prefix == "":
            return []
        if not isinstance(prefix, str):
            raise ValueError(
                f"target_prefix[{number - 1}]: expected a str or None, got {type(prefix).__name__} {prefix!r:.40}"
            )
        if getattr(self.tokenizer, "words_begin_with_space", False):
            prefix = prefix.rstrip(" ")  # else the next word would add a second space
        try:
            return self.encode_target(prefix)
        except ValueError as error:
            raise TextError(f"text {number}: its target_prefix: {error}") from error

    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of a translation, or of its beginning, without EOS.

        Raises:
            ValueError: the tokenizer can't encode the text.
        """
        # A tokenizer may have a separate vocabulary for the target.
        return list(getattr(self.tokenizer, "encode_target", self.tokenizer.encode)(text))

    def encode_item(self, item: Item, number: int | str, builder: RequestBuilder) -> CheckedInput:
        """Encodes a text and its prefix, and checks them against the model.

        Raises:
            TextError: see `language_ids`, `encode`, `encode_prefix`, `RequestBuilder.check`.
        """
        try:
            told = self.language_ids(item.source_lang, item.target_lang)
        except ValueError as error:
            raise TextError(f"text {number}: {error}") from error
        ids, prefix = self.encode(item.text, number, told), self.encode_prefix(item.prefix, number)
        try:
            return builder.check(ids, [*told.begin, *prefix], told=len(told.begin))
        except ValueError as error:
            raise TextError(f"text {number}: {error}") from error

    def attention(self, text: str) -> tuple[list[str], list[str], Tensor]:
        """Returns the cross-attention of each token of a translation to the source tokens.

        Returns:
            The source tokens, the target tokens, and the weights, (num_layers, num_heads, target, source) fp32.

        Raises:
            ValueError: the text can't be translated, or the model has no `attention_maps`.
        """
        check_attention(self.model)
        source = self.encode(text)
        with evaluating(self.model), torch.inference_mode():
            builder = self._builder(self.settings({}), False)
            begin = self.language_ids().begin
            request = builder.build(builder.check(source, begin, told=len(begin)))
            run(new_scheduler(builder.engine), [request])
        target = [*begin, *request.results[0].tokens]
        (weights,) = cross_attention(self.model, [(source, target)])
        source_tokens = getattr(self.tokenizer, "source_tokens", self.tokenizer.tokens)(source)
        return source_tokens, self.tokenizer.tokens(target), weights


def check_one_stream(form: Form, config: GenerationConfig) -> None:
    """Raises a ValueError if one text's translation can't come piece by piece."""
    if form.is_list or form.log_probs or config.num_beams > 1:
        raise ValueError(
            "expected no beams, several samples or scores along with one text to stream: its pieces come before the "
            "end is known; translate gives them"
        )
