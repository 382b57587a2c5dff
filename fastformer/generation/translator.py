"""Text in, text out: a model, its tokenizer, and a batch that is kept full."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fastformer.generation.alignment import Aligner, Alignment, Unit, align_texts, check_attention, cross_attention
from fastformer.generation.config import CacheDtype, GenerationConfig, Precision
from fastformer.generation.engines import Engine, rounded_for_steps
from fastformer.generation.ensemble import Ensemble, Mean
from fastformer.generation.evaluation import evaluating
from fastformer.generation.model_protocols import (
    DTYPES,
    Model,
    as_model,
    asked_precision,
    check_precision,
    is_decoder_only,
    why_not_by_modules,
)
from fastformer.generation.pair_encoder import Joined, PairEncoder, Part, PartSource, whole_texts
from fastformer.generation.request_builder import RequestBuilder, most_new_tokens
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, new_scheduler
from fastformer.generation.scoring import MAX_TOKENS, score_texts
from fastformer.generation.session import READ_AHEAD, Session
from fastformer.generation.streaming import TextPieces
from fastformer.generation.text_io import (
    Answer,
    ErrorPolicy,
    ForEach,
    Item,
    IterableSource,
    Source,
    TextCodec,
    TextError,
    TextOptions,
    as_pairs,
    check_request,
)
from fastformer.generation.text_io import Scored as Scored
from fastformer.generation.text_io import TokenScored as TokenScored
from fastformer.settings import Positive, check_value, shows_fields

# Options of `generate` that have other names here.
_INSTEAD = {
    "return_dict_in_generate": "return_scores=True",
    "streamer": "Translator.stream",
    "decoder_input_ids": "target_prefix",
}


class _PlainOptions(TypedDict, total=False):
    """Options with which answers are texts."""

    target_prefix: ForEach
    source_lang: ForEach
    target_lang: ForEach
    on_error: str
    skip_long: bool
    split: bool
    return_scores: Literal[False]
    return_token_scores: Literal[False]


class _ScoreOptions(TypedDict, total=False):
    on_error: str
    skip_long: bool
    max_tokens: int


class _AlignOptions(TypedDict, total=False):
    unit: Unit
    layer: int | None
    head: int | None
    on_error: str
    skip_long: bool


class Translator(PairEncoder):
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
        cache_dtype: the default dtype of keys and values: "int8", or None, that of the computation. See
            `GenerationConfig`.
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
        cache_dtype: CacheDtype | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> None:
        check_precision(precision)
        check_value("cache_dtype", cache_dtype, CacheDtype | None)
        for name, value in (("max_batch_size", max_batch_size), ("max_batch_bytes", max_batch_bytes)):
            check_value(name, value, Positive | None)
        if not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode", "tokens")):
            raise ValueError(f"expected a tokenizer with encode, decode and tokens, got {type(tokenizer).__name__}")
        checked = as_model(model)
        if is_decoder_only(checked):
            raise ValueError(
                f"expected a model that reads a source, got {type(model).__name__}: see fastformer.generate"
            )
        self.max_batch_size, self.max_batch_bytes = max_batch_size, max_batch_bytes
        self.precision, self.cache_dtype = precision, cache_dtype
        super().__init__(checked, tokenizer, source_lang, target_lang)

    @classmethod
    def from_pretrained(
        cls,
        run: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: TextCodec | None = None,
        *,
        device: torch.device | str | None = None,
        precision: Precision | None = None,
        cache_dtype: CacheDtype | None = None,
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
                they are loaded as they were saved, and the C++ engine rounds them; on a GPU, `model.quantize` does, in
                bf16 if they were saved in fp32. None: as they were saved, including int8 and int4. Logits and scores
                are always fp32.
            ensemble_weights, ensemble_mean: for several folders; see `Ensemble`.
            cache_dtype, max_batch_size, max_batch_bytes, source_lang, target_lang: see the class.

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
        models, of_folder = load_models(runs, ("Transformer", "LSTMSeq2Seq"), device=device, dtype=dtype)
        models = [rounded_for_steps(one, precision) for one in models]
        model = models[0] if is_one else Ensemble(models, ensemble_weights, ensemble_mean)
        return cls(
            model,
            tokenizer or of_folder,
            max_batch_size=max_batch_size,
            max_batch_bytes=max_batch_bytes,
            precision=next(filter(None, (asked_precision(one, precision) for one in models)), None),
            cache_dtype=cache_dtype,
            source_lang=source_lang,
            target_lang=target_lang,
        )

    @overload  # a str is also an iterable of str: the first overload that fits counts
    def translate(self, texts: str, **options: Unpack[_PlainOptions]) -> str: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, texts: Iterable[str], **options: Unpack[_PlainOptions]) -> list[str]: ...

    @overload
    def translate(
        self, texts: str | Iterable[str], *, config: GenerationConfig | None = ..., **options: Any
    ) -> Any: ...

    @shows_fields(TextOptions)
    def translate(self, texts: str | Iterable[str], *, config: GenerationConfig | None = None, **options: Any) -> Any:
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
        text_options = TextOptions.taken_from(options)
        config, errors = self.settings(options, config), text_options.errors()
        self.check_languages(text_options.source_lang, text_options.target_lang)
        form, items, split = text_options.form(config), text_options.items(texts), text_options.split
        deadline = None if config.max_time is None else time.monotonic() + config.max_time
        builder = self._builder(config, form.log_probs)
        # All texts are read first, so that an invalid one is reported before any work.
        numbered = enumerate(items, 1)
        parts = [
            part for number, item in numbered
            for part in self.parts(item, number, builder, split=split, errors=errors)
        ]  # fmt: skip

        def build(index: int) -> Request | None:
            return self._build(parts[index], builder, index, deadline)

        # The longest come first, so that few rows are left to decode alone at the end.
        lengths = [0 if part.checked is None else len(part.checked.row) for part in parts]
        order = sorted(range(len(parts)), key=lambda index: -lengths[index])
        values: list[Any] = [None] * len(parts)
        for pairs in self._session(builder, is_endless=False).map(IterableSource(order), build):
            for index, request in pairs:
                check_request(request, parts[index].name)
                answer = Answer(self.tokenizer, request, parts[index].space)
                values[index] = answer if split else form.of(answer)
        if split:
            values = [form.of(Joined(answers)) for answers in whole_texts(zip(parts, values, strict=True))]
        errors.report(len(values))
        return values[0] if isinstance(texts, str) else values

    @overload
    def stream(
        self, texts: str | Iterable[str], *, read_ahead: int = ..., **options: Unpack[_PlainOptions]
    ) -> Iterator[str]: ...

    @overload
    def stream(
        self,
        texts: str | Iterable[str],
        *,
        read_ahead: int = ...,
        config: GenerationConfig | None = ...,
        **options: Any,
    ) -> Iterator[Any]: ...

    @shows_fields(TextOptions)
    def stream(
        self,
        texts: str | Iterable[str],
        *,
        read_ahead: int = READ_AHEAD,
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
        text_options = TextOptions.taken_from(options)
        config, errors = self.settings(options, config), text_options.errors()
        self.check_languages(text_options.source_lang, text_options.target_lang)
        form, split = text_options.form(config, streams=isinstance(texts, str)), text_options.split
        check_value("read_ahead", read_ahead, Positive)
        items = text_options.items(texts)
        if isinstance(texts, str) and not split:
            return self._pieces(next(iter(items)), config, errors)
        source = IterableSource(items)
        if isinstance(texts, str):
            parts = self._parts(source, config, errors, False, read_ahead, split=True)
            return (text for ready in parts for _, answer in ready if (text := answer.spaced()))
        answers = self.answers(source, config, errors, log_probs=form.log_probs, read_ahead=read_ahead, split=split)
        return (form.of(answer) for ready in answers for answer in ready)

    def answers(
        self,
        source: Source[Item],
        settings: GenerationConfig,
        errors: ErrorPolicy,
        *,
        log_probs: bool = False,
        read_ahead: int = READ_AHEAD,
        split: bool = False,
    ) -> Iterator[list[Answer]]:
        """Translates the texts of a source, in order; `stream` and the command use this.

        Args:
            source: the texts.
            settings: the config of the search, a result of `settings`.
            errors: the policy for texts that can't be translated; it reports at the end.
            log_probs: whether to compute scores.
            read_ahead: the most texts, or with split sentences, that are in memory; see `stream`.
            split: see `translate`; `TextOptions.form` has accepted it.

        Yields:
            The answers that come next in the order, as soon as they are complete.
        """
        parts = self._parts(source, settings, errors, log_probs, read_ahead, split)
        if not split:
            return ([answer for _, answer in ready] for ready in parts)
        pairs = itertools.chain.from_iterable(parts)
        return ([Joined(answers)] for answers in whole_texts(pairs))

    def _parts(
        self,
        source: Source[Item],
        settings: GenerationConfig,
        errors: ErrorPolicy,
        log_probs: bool,
        read_ahead: int,
        split: bool,
    ) -> Iterator[list[tuple[Part, Answer]]]:
        """Yields the parts of texts with their answers, in order; see `answers`."""
        builder, places = self._builder(settings, log_probs), itertools.count()

        def encode(item: Item, number: int) -> list[Part]:
            if isinstance(item.text, str) and not item.text.strip() and not split:
                return [Part(str(number), None, "", True)]
            return self.parts(item, number, builder, split=split, errors=errors)

        def build(part: Part) -> Request | None:
            return self._build(part, builder, next(places))

        def parts() -> Iterator[list[tuple[Part, Answer]]]:
            total, session = 0, self._session(builder, is_endless=True)
            for ready in session.map(PartSource(source, encode), build, read_ahead=read_ahead):
                answers: list[tuple[Part, Answer]] = []
                for part, request in ready:
                    if answers and request is not None and request.error is not None:
                        yield answers  # those before the error
                    total += part.is_last
                    check_request(request, part.name)
                    answers.append((part, Answer(self.tokenizer, request, part.space)))
                yield answers
            errors.report(total)

        return parts()

    @staticmethod
    def _build(part: Part, builder: RequestBuilder, place: int, deadline: float | None = None) -> Request | None:
        """Builds the request of a part; a deadline replaces that of the config's max_time."""
        if part.checked is None:
            return None
        request = builder.build(part.checked, place=place)
        request.deadline = deadline or request.deadline
        return request

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
            request = builder.build(checked)
            text = TextPieces(self.tokenizer, checked.prefix, stop=config.stop_strings)
            for tokens in self._session(builder, is_endless=False).tokens(request):
                if piece := text.add(tokens):
                    yield piece
            check_request(request, 1)
            if piece := text.end():
                yield piece

        return pieces()

    def _builder(self, config: GenerationConfig, log_probs: bool) -> RequestBuilder:
        # The engine is chosen in evaluation mode, in which the model will decode.
        with evaluating(self.model):
            return RequestBuilder(self.model, config, log_probs=log_probs, tokenizer=self.tokenizer)

    def _session(self, builder: RequestBuilder, *, is_endless: bool) -> Session[Request]:
        """Makes the session of a call, whose requests run in the caller's thread."""
        return Session(self.model, lambda: self.new_scheduler(builder.engine, is_endless=is_endless))

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
        config = GenerationConfig.from_options(options, config)
        precision, cache_dtype = config.precision or self.precision, config.cache_dtype or self.cache_dtype
        if (precision, cache_dtype) != (config.precision, config.cache_dtype):
            config = replace(config, precision=precision, cache_dtype=cache_dtype)
        config.check_model(self.model.config.vocab_size)
        most_new_tokens(self.model, 1, config, is_prompted=False)
        return config

    @overload  # a str is also an iterable of str: the first overload that fits counts
    def score(  # type: ignore[overload-overlap]
        self, texts: str, translations: str, **options: Unpack[_ScoreOptions]
    ) -> TokenScored: ...

    @overload
    def score(
        self, texts: Iterable[str], translations: Iterable[str], **options: Unpack[_ScoreOptions]
    ) -> list[TokenScored]: ...

    def score(
        self,
        texts: str | Iterable[str],
        translations: str | Iterable[str],
        *,
        on_error: str = "stop",
        skip_long: bool = False,
        max_tokens: int = MAX_TOKENS,
    ) -> TokenScored | list[TokenScored]:
        """Scores given translations by forced decoding.

        The model's modules compute the scores, in their own precision. For a translation that `translate` found by
        greedy decoding, the result equals `return_scores` up to rounding, if the text is tokenized to the tokens that
        the model generated.

        Args:
            texts: a text, or texts, as in `translate`.
            translations: a str for a str, else one for each text. The translation of an empty text has to be empty. An
                empty translation of another text is scored as EOS alone.
            on_error: "stop", or "skip": a pair that can't be scored (an empty text, a side longer than the model's
                max_len) gets the score -inf, and a warning with its number.
            skip_long: skip pairs that are only too long.
            max_tokens: the most tokens in a batch, on its longer side, padding included.

        Returns:
            A `TokenScored(text, score, tokens)` for a str, else a list with one for each text: the translation; its
            log-probability, without a length penalty; and its tokens, EOS included, each with its log-probability. It
            also has `per_token` and `perplexity`. If text and translation are empty, there are no tokens, and the score
            is 0.

        Raises:
            ValueError: an item isn't a text, the numbers of texts and translations differ, or a pair can't be scored
                (the message has its number, from 1).
        """
        # Only modules compute the scores. Those of a quantised model hold its rounded weights.
        reason = why_not_by_modules(self.model, self.precision)
        if reason is not None:
            raise ValueError(f"expected a precision that the model's modules have, to score in: {reason}")
        errors = ErrorPolicy(on_error, skip_long, ("its score at -inf", "their scores are -inf"))
        scores = list(score_texts(self, as_pairs(texts, translations), errors, max_tokens))
        return scores[0] if isinstance(texts, str) else scores

    @overload  # a str is also an iterable of str: the first overload that fits counts
    def align(  # type: ignore[overload-overlap]
        self, texts: str, translations: str, **options: Unpack[_AlignOptions]
    ) -> Alignment: ...

    @overload
    def align(
        self, texts: Iterable[str], translations: Iterable[str], **options: Unpack[_AlignOptions]
    ) -> list[Alignment]: ...

    def align(
        self,
        texts: str | Iterable[str],
        translations: str | Iterable[str],
        *,
        unit: Unit = "words",
        layer: int | None = None,
        head: int | None = None,
        on_error: str = "stop",
        skip_long: bool = False,
    ) -> Alignment | list[Alignment]:
        """Aligns each word of a translation with a word of its text, using the decoder's cross-attention.

        Args:
            texts, translations: as in `score`.
            unit: align "words", which are separated by whitespace, or "tokens", without EOS.
            layer: the decoder layer, from 1, whose attention is used; None: the last but one, or the only one.
            head: the head of that layer, from 1; None: the mean of all heads.
            on_error: "stop", or "skip": a pair that `score` can't score gets an empty alignment and a warning.
            skip_long: skip pairs that are only too long.

        Returns:
            For a str, pairs of a source and a target place, from 0, in the order of the target: each target word has
            one, see `Aligner`. The list is empty if either side has no words. Else a list of such lists, one for each
            text.

        Raises:
            ValueError: see `score`; the model has no `attention_maps`, an unknown unit, or a missing layer or head.
        """
        aligner = Aligner(self, unit, layer, head)
        errors = ErrorPolicy(on_error, skip_long, ("its alignment empty", "their alignments are empty"))
        alignments = align_texts(aligner, as_pairs(texts, translations), errors)
        return alignments[0] if isinstance(texts, str) else alignments

    def attention(self, text: str) -> tuple[list[str], list[str], Tensor]:
        """Returns the cross-attention of each token of a translation to the source tokens.

        Returns:
            The source tokens, the target tokens, and the weights, (num_layers, num_heads, target, source) fp32.

        Raises:
            ValueError: the text can't be translated, or the model has no `attention_maps`.
        """
        check_attention(self.model)
        source = self.encode(text)
        with torch.inference_mode():
            builder = self._builder(self.settings({}), False)
            begin = self.language_ids().begin
            request = builder.build(builder.check(source, begin, num_language_tokens=len(begin)))
            self._session(builder, is_endless=False).run([request])
        target = [*begin, *request.results[0].tokens]
        (weights,) = cross_attention(self.model, [(source, target)])
        source_tokens = getattr(self.tokenizer, "source_tokens", self.tokenizer.tokens)(source)
        return source_tokens, self.tokenizer.tokens(target), weights
