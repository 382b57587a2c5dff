"""From ids and settings to requests, each held against the model before others share a batch with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines import Engine, Prompt, choose_engine
from fastformer.generation.model_protocols import Model, is_decoder_only
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.processors import SEARCH_RULES, make_processors
from fastformer.generation.requests import Request, window_end
from fastformer.generation.search import BeamSearch, RowSearch, Sampling, Search, Stop, TransformersBeamSearch
from fastformer.generation.stopping import any_of, make_stop
from fastformer.generation.streaming import Detokenizer, StopTexts, TextPieces
from fastformer.ops import _extension
from fastformer.special_ids import SpecialIds

EXTRA_LENGTH = 100  # a translation may be this much longer than its source (tensor2tensor)


class CheckedInput(NamedTuple):
    """An input that the model can take; see `RequestBuilder.check`.

    Attributes:
        row: the ids of a source, or of a prompt.
        prefix: what the output of a source begins with, without the start token.
        limit: how many new tokens it may get.
        least: no end before so many of them.
    """

    row: Sequence[int]
    prefix: Sequence[int]
    limit: int
    least: int = 0


class DecodingIds(NamedTuple):
    """The ids that mean something to a search.

    Attributes:
        pad: fills outputs behind their end.
        eos: each of them ends a row.
        start: what the outputs of a model that reads sources begin with, unseen.
    """

    pad: int
    eos: tuple[int, ...]
    start: int

    @property
    def marks_padding(self) -> bool:
        """Whether pad in an input says that it is padding: not where it may be the end of a sequence."""
        return self.pad not in self.eos


class RequestBuilder:
    """Makes the requests of one model and one set of settings.

    Args:
        model: what decodes.
        settings: what was asked for.
        log_probs: whether scores are wanted.
        engine: what decodes them; None: the one that the settings name, or the fastest that can.
        tokenizer: of the outputs, where the settings have stop_strings.

    Attributes:
        engine: what decodes them.
        ids: the special ids, the model's or those that the settings name.

    Raises:
        ValueError: settings that the model can't honour.
    """

    def __init__(
        self,
        model: Model,
        settings: GenerationConfig,
        *,
        log_probs: bool = True,
        engine: Engine | None = None,
        tokenizer: Detokenizer | None = None,
    ) -> None:
        settings.check_model(model.config.vocab_size)
        if settings.stop_strings and not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
            raise ValueError(
                f"expected tokenizer=, with encode and decode, along with stop_strings, got {type(tokenizer).__name__}"
            )
        if settings.window == "slide" and not is_decoder_only(model):
            raise ValueError(
                f"expected window='stop' for {type(model).__name__}, which reads a source: split what is longer than "
                "its max_len"
            )
        if is_decoder_only(model) and settings.decoder_start_token_id is not None:
            raise ValueError(
                f"expected no decoder_start_token_id for {type(model).__name__}: its prompts are the beginning"
            )
        self.model, self.settings, self._tokenizer = model, settings, tokenizer
        self.log_probs = log_probs or settings.num_beams > 1
        self.ids = special_ids(model, settings)
        name = settings.engine if settings.use_cache else "recompute"
        self.engine: Engine = engine or choose_engine(model, name, settings.precision)
        self._has_shortlist = False
        if engine is None and settings.shortlist:  # it is this builder's own
            self._has_shortlist = self.engine.limit_to(sorted({*settings.shortlist, *self.ids.eos}))
        # What the searches in C++ don't have, the engine is asked for step by step.
        self._is_native = self.engine.runs_searches() and _extension.module() is not None
        self._is_native = self._is_native and not settings.do_sample and settings.num_beam_groups == 1
        self._is_native = self._is_native and not settings.stop_strings and not settings.stopping_criteria
        # Of what processors give as it is, only those of this library are known to give nothing above 0.
        self._may_rise = settings.keeps_scores and bool(settings.logits_processor)
        self._is_native = self._is_native and not self._may_rise
        unsaid = {*settings.suppress_tokens, *self.ids.eos}
        allowed = len({*settings.shortlist} - unsaid) if settings.shortlist else model.config.vocab_size - len(unsaid)
        self._leaves_words = allowed > 0
        # Each input draws numbers of its own, which depend on the seed and its place alone.
        self._seed = settings.seed
        if settings.do_sample and settings.seed is None:
            self._seed = int(torch.randint(2**62, (), device="cpu"))
        self._made = 0

    def check(self, row: Sequence[int], prefix: Sequence[int] = (), *, width: int | None = None) -> CheckedInput:
        """Holds an input against the model, which may look no more: on a GPU it doesn't, and in a batch of many its
        error would be everybody's.

        Args:
            row: the ids of a source, or of a prompt.
            prefix: what the output of a source begins with, without the start token.
            width: of the batch that a prompt stands in, which its new tokens stand behind; None: its own.

        Raises:
            ValueError: ids out of the vocabulary, a source that is too long, no room for a token.
        """
        config = self.model.config
        if is_decoder_only(self.model):
            limit = most_new_tokens(self.model, len(row), self.settings, width)
            _check_ids(row, config.vocab_size, "token")
            return CheckedInput(row, (), limit, self.settings.least_tokens(len(row) if width is None else width))
        if len(row) > config.max_len:
            raise ValueError(
                f"expected source sequences of at most max_len = {config.max_len} tokens, got {len(row)}: cut them, or "
                "configure the model with a larger max_len"
            )
        limit = most_new_tokens(self.model, len(row), self.settings, prefix=len(prefix))
        _check_ids(row, getattr(config, "source_vocab_size", None) or config.vocab_size, "source")
        _check_ids(prefix, config.vocab_size, "target")
        return CheckedInput(row, prefix, limit, self.settings.least_tokens(1 + len(prefix)))

    def build(
        self,
        checked: CheckedInput,
        *,
        place: int | None = None,
        sample: int | None = None,
        on_token: Callable[[int], object] | None = None,
    ) -> Request:
        """The request of an input.

        Args:
            checked: what `check` gave.
            place: of the input among all, which says what it draws; None: behind the last one made.
            sample: which of its samples the request is for; None: all.
            on_token: is told each new token.
        """
        settings, eos, limit = self.settings, frozenset(self.ids.eos), checked.limit
        begin = list(checked.row) if is_decoder_only(self.model) else [self.ids.start, *checked.prefix]
        prompt, window, max_len = Prompt(list(checked.row), begin), None, self.model.config.max_len
        if is_decoder_only(self.model):
            prompt = Prompt(None, begin)
            if settings.window == "slide" and len(begin) + limit > max_len:
                prompt, window = Prompt(None, window_end(begin, max_len)), max_len
        place = self._made if place is None else place
        self._made = place + 1
        seed = random.Random(f"{self._seed} {place}").getrandbits(64) if settings.do_sample else 0
        is_native = self._is_native and window is None
        before = checked.row if is_decoder_only(self.model) else checked.prefix
        stop = make_stop(settings.stopping_criteria, begin, self.engine.device)

        def make_pieces() -> TextPieces:
            assert self._tokenizer is not None
            return TextPieces(self._tokenizer, before, is_told=True, stop=settings.stop_strings)

        def make_end() -> Callable[[int], bool]:
            pieces = make_pieces()

            def is_end(token: int) -> bool:
                pieces.add([token])
                return pieces.is_stopped

            return is_end

        def make_beam_stop() -> Stop | None:
            return any_of(stop, StopTexts(make_pieces()) if settings.stop_strings else None)

        def make_search() -> Search:
            if is_native and settings.num_beams == 1:
                return NativeSearch.greedy(limit, eos, min_tokens=checked.least, suppressed=settings.suppress_tokens)
            if is_native:
                return NativeSearch.beams(
                    limit,
                    eos,
                    settings.num_beams,
                    beam_rules=settings.beam_rules,
                    alpha=settings.alpha,
                    num_return=settings.num_return_sequences,
                    early_stopping=settings.early_stopping,
                    min_tokens=checked.least,
                    suppressed=settings.suppress_tokens,
                )
            if settings.num_beams > 1 and settings.beam_rules == "transformers":
                return TransformersBeamSearch(
                    limit,
                    eos,
                    settings.num_beams,
                    alpha=settings.alpha,
                    num_return=settings.num_return_sequences,
                    early_stopping=settings.early_stopping,
                    may_rise=self._may_rise,
                    stop=make_beam_stop(),
                )
            if settings.num_beams > 1:
                return BeamSearch(
                    limit,
                    eos,
                    settings.num_beams,
                    alpha=settings.alpha,
                    num_return=settings.num_return_sequences,
                    early_stopping=settings.early_stopping is True,
                    num_groups=settings.num_beam_groups,
                    diversity_penalty=settings.diversity_penalty,
                    stop=make_beam_stop(),
                )
            sampling = None
            if settings.do_sample:
                sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, seed)
            rows = settings.samples
            if sampling is not None and sample is not None:
                sampling, rows = replace(sampling, sample=sample, num_samples=rows), 1
            return RowSearch(limit, eos, rows, sampling, make_end if settings.stop_strings else None, stop=stop)

        processors = make_processors(
            settings,
            self.ids.eos,
            len(begin),
            limit,
            min_tokens=checked.least,
            has_shortlist=self._has_shortlist,
        )
        masks_alone = all(isinstance(one, SEARCH_RULES) for one in processors)
        return Request(
            prompt,
            make_search,
            processors=processors,
            search_suffices=self._leaves_words and masks_alone and not settings.keeps_scores,
            keeps_scores=settings.keeps_scores,
            log_probs=self.log_probs,
            max_time=settings.max_time,
            on_token=on_token,
            window=window,
            before=begin,
            stop_strings=settings.stop_strings,
        )


def special_ids(model: Model, settings: GenerationConfig) -> DecodingIds:
    """The model's special ids, or those that the settings name instead."""
    own = SpecialIds.of(model.config)
    pad_id = own.pad if settings.pad_token_id is None else settings.pad_token_id
    eos = settings.eos_token_id
    ends = own.eos if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    start = own.start if settings.decoder_start_token_id is None else settings.decoder_start_token_id
    if settings.pad_token_id is None and pad_id in ends:
        raise ValueError(
            f"expected two ids for eos_token_id and pad_token_id, got {pad_id} for both, which is the model's pad: "
            f"with pad_token_id={pad_id} too, nothing in an input is padding unless an attention_mask says so"
        )
    return DecodingIds(pad_id, ends, start)


def most_new_tokens(
    model: Model, seqlen: int, settings: GenerationConfig, width: int | None = None, prefix: int = 0
) -> int:
    """How many tokens an input may get: what was asked for, or by default as much as makes sense.

    Args:
        model: what decodes.
        seqlen: of the input.
        settings: what was asked for.
        width: of the batch; None: seqlen.
        prefix: tokens that the output of a source begins with.

    Raises:
        ValueError: the model's max_len leaves too little room.
    """
    if settings.window == "slide" and settings.max_new_tokens is not None:
        return settings.max_new_tokens
    max_len, width = model.config.max_len, seqlen if width is None else width
    if not is_decoder_only(model):
        room = max_len - prefix
        default, behind = min(seqlen + EXTRA_LENGTH, room), f" behind a prefix of {prefix}" if prefix else ""
    else:
        room = default = max_len - width
        behind = f" behind a prompt of {width}"
    if room < 1 and not is_decoder_only(model):
        raise ValueError(
            f"expected a prefix of fewer tokens than the model's max_len {max_len}, got {prefix}: there is no room for "
            "a new one"
        )
    if room < 1:
        raise ValueError(
            f"expected prompts of fewer tokens than the model's max_len {max_len}, got {width}: there is no room for a "
            "new one; cut the prompt, or with window='slide' and max_new_tokens the model sees its end alone"
        )
    advice = "; with window='slide' it goes on, and sees the end of the text alone" if is_decoder_only(model) else ""
    begun = 1 + prefix if not is_decoder_only(model) else width
    wanted, least = settings.max_new_tokens, settings.least_tokens(begun)
    name, more = "max_new_tokens", 0
    if wanted is None and settings.max_length is not None:
        name, more = "max_length", begun  # which counts what stands before the new tokens
        wanted = settings.max_length - begun
        if wanted < 1:
            raise ValueError(
                f"expected max_length of more than the {begun} that outputs begin with, got {settings.max_length}; "
                "max_new_tokens doesn't count them"
            )
    if wanted is None:  # only then it is meant: else everything ends at what was wanted
        name, more = ("min_new_tokens", 0) if settings.min_new_tokens else ("min_length", begun)
    value = least if wanted is None else wanted
    if value > room:
        raise ValueError(
            f"expected {name} of at most {room + more}{behind}, for the model's max_len is {max_len}; "
            f"got {value + more}{advice}"
        )
    return wanted or max(default, least)


def _check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"expected {name} ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}: was another tokenizer used?"
        )
