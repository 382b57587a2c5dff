"""Builds requests from ids and a config. Each input is checked against the model before it joins a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fastformer.generation.config import GenerationConfig
from fastformer.generation.constraints import LateMatcher, Matcher, Triggers, Vocabulary
from fastformer.generation.drafts import source_text
from fastformer.generation.engines import Engine, Prompt, choose_engine
from fastformer.generation.model_protocols import Model, is_decoder_only
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.processors import any_of, does_search, make_processors, make_stop
from fastformer.generation.requests import Request, window_end
from fastformer.generation.search import BeamSearch, RowSearch, Sampling, Search, Stop, TransformersBeamSearch
from fastformer.generation.streaming import Detokenizer, StopTexts, TextPieces, behind_ends
from fastformer.ops import _extension
from fastformer.special_ids import SpecialIds

EXTRA_LENGTH = 100  # a translation may be this much longer than its source (tensor2tensor)


class CheckedInput(NamedTuple):
    """An input that the model can take; see `RequestBuilder.check`.

    Attributes:
        row: the ids of a source, or of a prompt.
        prefix: what the output of a source begins with, without the start token.
        limit: the most new tokens.
        least: the number of new tokens before which the output can't end.
        num_language_tokens: the number of tokens at the beginning of the prefix that name the language. By
            transformers' rules these are forced new tokens.
    """

    row: Sequence[int]
    prefix: Sequence[int]
    limit: int
    least: int = 0
    num_language_tokens: int = 0


def check_vocabulary(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises a ValueError for ids outside of a vocabulary; `name` is the kind of ids, such as "source"."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"expected {name} ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}: was another tokenizer used?"
        )


class DecodingIds(NamedTuple):
    """The special ids of a search.

    Attributes:
        pad: the id that fills outputs after their end.
        eos: the ids that end a row.
        start: the first id of the decoder's input in a model that reads sources; outputs don't show it.
    """

    pad: int
    eos: tuple[int, ...]
    start: int

    @property
    def marks_padding(self) -> bool:
        """Whether pad in an input is always padding: False if pad may also end a sequence, or no id ends one."""
        return bool(self.eos) and self.pad not in self.eos


class ModelFacts(NamedTuple):
    """What all requests of a model and an engine share, so that it is asked once.

    Attributes:
        is_prompted: whether inputs are prompts; if not, they are sources.
        special: the model's special ids.
        runs_searches: whether the engine advances native searches.
        drafts: whether the engine can read drafts.
    """

    is_prompted: bool
    special: SpecialIds
    runs_searches: bool
    drafts: bool

    @classmethod
    def of(cls, engine: Engine, special: SpecialIds, *, is_prompted: bool) -> ModelFacts:
        runs_searches = engine.runs_searches() and _extension.module() is not None
        return cls(is_prompted, special, runs_searches, engine.step_bytes > 0)


class RequestBuilder:
    """Builds the requests of one model and one config.

    Args:
        model: the model that decodes.
        config: the options of the search.
        log_probs: whether scores are needed.
        engine: the engine for the requests; None: the one that the config names, or the fastest that can decode the
            model.
        facts: those of the model and the engine; None: they are asked for.
        tokenizer: the tokenizer of the outputs, if the config has stop_strings.
        num_alternatives: the number of likeliest tokens to record at each position, with their log-probabilities; only
            without beams.
        triggers: texts behind which outputs are under a constraint, if the config has none.

    Attributes:
        engine: the engine for the requests.
        is_prompted: whether inputs are prompts; if not, they are sources.
        ids: the special ids of the model, or those that the config names.
        anchor: under a constraint, the id behind which new tokens are decoded; see `Vocabulary`.

    Raises:
        ValueError: the model can't apply an option.
    """

    def __init__(
        self,
        model: Model,
        config: GenerationConfig,
        *,
        log_probs: bool = True,
        engine: Engine | None = None,
        facts: ModelFacts | None = None,
        tokenizer: Detokenizer | None = None,
        num_alternatives: int = 0,
        triggers: Triggers | None = None,
    ) -> None:
        self.is_prompted = is_decoder_only(model) if facts is None else facts.is_prompted
        config.check_model(model.config.vocab_size)
        if never := getattr(model.config, "suppress_tokens", ()):  # what the model itself forbids
            config = replace(config, suppress_tokens=tuple(dict.fromkeys((*config.suppress_tokens, *never))))
        if config.stop_strings and not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
            raise ValueError(
                f"expected tokenizer=, with encode and decode, along with stop_strings, got {type(tokenizer).__name__}"
            )
        if config.window == "slide" and not self.is_prompted:
            raise ValueError(
                f"expected window='stop' for {type(model).__name__}, which reads a source: split what is longer than "
                "its max_len"
            )
        if self.is_prompted and config.decoder_start_token_id is not None:
            raise ValueError(
                f"expected no decoder_start_token_id for {type(model).__name__}: its prompts are the beginning"
            )
        self.model, self.config, self._tokenizer = model, config, tokenizer
        self._special = SpecialIds.of(model.config) if facts is None else facts.special
        if num_alternatives and config.num_beams > 1:
            raise ValueError(f"expected num_beams 1 along with num_alternatives, got {config.num_beams}")
        self._matcher: Matcher | LateMatcher | None = None
        self.anchor: Sequence[int] = ()
        if (constraint := config.constraint) is not None:
            vocabulary = self._vocabulary(constraint.kind)
            self.anchor = vocabulary.anchor
            self._matcher = vocabulary.matcher(constraint, special_ids(self._special, config).eos)
        elif triggers is not None:
            vocabulary = self._vocabulary("triggers")
            self._matcher = vocabulary.late_matcher(triggers, special_ids(self._special, config).eos)
        self._num_alternatives = min(num_alternatives, model.config.vocab_size)
        self.log_probs = log_probs or config.num_beams > 1 or num_alternatives > 0
        self.ids = special_ids(self._special, config)
        name = config.engine if config.use_cache else "recompute"
        self.engine: Engine = engine or choose_engine(model, name, config.precision, config.cache_dtype)
        facts = facts or ModelFacts.of(self.engine, self._special, is_prompted=self.is_prompted)
        self._adapter = None if config.adapter is None else self.engine.adapter(config.adapter)
        self._has_shortlist = False
        if engine is None and config.shortlist:  # the engine is this builder's own, so it may be changed
            self._has_shortlist = self.engine.limit_to(sorted({*config.shortlist, *self.ids.eos}))
        # The caller's processors may give scores above 0 if they aren't normalised; fastformer's processors don't.
        self._may_rise = bool(config.logits_processor) and config.keeps_scores
        # A search with a feature that the C++ searches lack runs in Python, step by step.
        self._is_native = (
            facts.runs_searches
            and not (config.do_sample or config.num_beam_groups > 1)
            and not (
                config.stop_strings or config.stopping_criteria or self._may_rise or num_alternatives or self._matcher
            )
        )
        self._drafts = facts.drafts
        unsaid = {*config.suppress_tokens, *self.ids.eos}
        allowed = len({*config.shortlist} - unsaid) if config.shortlist else model.config.vocab_size - len(unsaid)
        self._leaves_words = allowed > 0
        # Each input draws its own numbers, which depend only on the seed and its position.
        self._seed = config.seed
        if config.do_sample and config.seed is None:
            self._seed = int(torch.randint(2**62, (), device="cpu"))
        self._built = 0
        self._ends = frozenset(self.ids.eos)

    def _vocabulary(self, kind: str) -> Vocabulary:
        """Returns the vocabulary of the tokenizer, for a constraint of some kind."""
        if not self.is_prompted:
            raise ValueError(f"expected no {kind} for {type(self.model).__name__}, which reads a source")
        if self._tokenizer is None:
            raise ValueError(f"expected tokenizer=, whose tokens have known bytes, along with {kind}")
        return Vocabulary.of(self._tokenizer, self.model.config.vocab_size)

    def check(
        self, row: Sequence[int], prefix: Sequence[int] = (), *, width: int | None = None, num_language_tokens: int = 0
    ) -> CheckedInput:
        """Checks an input against the model.

        The model doesn't check ids on a GPU, and in a batch its error would end every request.

        Args:
            row: the ids of a source, or of a prompt.
            prefix: what the output of a source begins with, without the start token.
            width: the width of the batch that contains a prompt, after which its new tokens come; None: the prompt's
                length.
            num_language_tokens: see `CheckedInput`.

        Raises:
            ValueError: ids outside of the vocabulary, a source that is too long, or no room for a new token.
        """
        config = self.model.config
        if self.is_prompted:
            limit = most_new_tokens(self.model, len(row), self.config, width, is_prompted=True)
            check_vocabulary(row, config.vocab_size, "token")
            return CheckedInput(row, (), limit, self.config.least_tokens(len(row) if width is None else width))
        if len(row) > config.max_len:
            raise ValueError(
                f"expected source sequences of at most max_len = {config.max_len} tokens, got {len(row)}: cut them, or "
                "configure the model with a larger max_len"
            )
        limit = most_new_tokens(self.model, len(row), self.config, prefix=len(prefix), is_prompted=False)
        check_vocabulary(row, getattr(config, "source_vocab_size", None) or config.vocab_size, "source")
        check_vocabulary(prefix, config.vocab_size, "target")
        least = self.config.least_tokens(1 + len(prefix))
        if num_language_tokens and self.config.beam_rules == "transformers":
            limit -= num_language_tokens if self.config.max_new_tokens is not None else 0
            least = max(0, least - num_language_tokens) if self.config.min_new_tokens else least
            if limit < 1:
                raise ValueError(
                    f"expected max_new_tokens above {num_language_tokens} by transformers' rules, where the language "
                    f"counts, got {self.config.max_new_tokens}"
                )
        return CheckedInput(row, prefix, limit, least, num_language_tokens)

    def build_all(self, rows: Sequence[list[int]], prefixes: Sequence[Sequence[int]]) -> list[Request]:
        """Builds the requests of a batch: one for each input or, with sliding windows, one for each of its samples."""
        width = max(map(len, rows))
        checked = [self.check(row, prefix, width=width) for row, prefix in zip(rows, prefixes, strict=True)]
        samples: Sequence[int | None] = range(self.config.samples) if self.config.window == "slide" else (None,)
        return [self.build(one, place=place, sample=k) for place, one in enumerate(checked) for k in samples]

    def build(
        self,
        checked: CheckedInput,
        *,
        place: int | None = None,
        sample: int | None = None,
        kind: Callable[..., Request] = Request,
    ) -> Request:
        """Builds the request for an input.

        Args:
            checked: the result of `check`.
            place: the input's position, which determines its random numbers; None: the next after the last one built.
            sample: the index of the sample that the request is for; None: all samples.
            kind: the class of the request, or a function with its arguments.
        """
        config, limit = self.config, checked.limit
        window, max_len = None, self.model.config.max_len
        if self.is_prompted:
            begin = list(checked.row)
            prompt = Prompt(None, begin, self._adapter)
            if config.window == "slide" and len(begin) + limit > max_len:
                prompt, window = prompt._replace(tokens=window_end(begin, max_len)), max_len
        else:
            begin = [self.ids.start, *checked.prefix]
            prompt = Prompt(list(checked.row), begin)
        place = self._built if place is None else place
        self._built = place + 1
        processors = make_processors(
            config, self.ids.eos, len(begin), limit, min_tokens=checked.least, has_shortlist=self._has_shortlist
        )
        num_lookup_tokens = config.prompt_lookup_num_tokens or 0 if self._drafts else 0
        return kind(
            prompt,
            self._search_maker(checked, begin, place, sample, is_native=self._is_native and window is None),
            processors=processors,
            search_suffices=bool(processors) and self._leaves_words and does_search(config, processors),
            keeps_scores=bool(processors) and config.keeps_scores,
            log_probs=self.log_probs,
            max_time=config.max_time,
            window=window,
            before=begin,
            stop_strings=config.stop_strings,
            num_lookup_tokens=num_lookup_tokens,
            lookup_text=source_text(prompt, self.model.config) if num_lookup_tokens else (),
        )

    def _search_maker(
        self, checked: CheckedInput, begin: Sequence[int], place: int, sample: int | None, *, is_native: bool
    ) -> Callable[[], Search]:
        """Builds the function that makes a request's search; every call makes the same search."""
        config, limit = self.config, checked.limit
        num_language_tokens = (
            checked.num_language_tokens if config.beam_rules == "transformers" and config.num_beams > 1 else 0
        )
        if is_native:
            return lambda: self._native_search(limit, checked.least, num_language_tokens)
        stop = make_stop(config.stopping_criteria, begin, self.engine.device)
        before = checked.row if self.is_prompted else checked.prefix
        if config.num_beams > 1:
            return lambda: self._beam_search(limit, any_of(stop, self._text_stop(before)), num_language_tokens)
        rows, sampling = config.samples, None
        if config.do_sample:
            seed = random.Random(f"{self._seed} {place}").getrandbits(64)
            sampling = Sampling(config.temperature, config.top_k, config.top_p, seed)
            if sample is not None:
                sampling, rows = replace(sampling, sample=sample, num_samples=rows), 1
        make_end = (lambda: self._end_of_text(before)) if config.stop_strings else None
        noted = self._num_alternatives
        matcher = self._matcher
        return lambda: RowSearch(
            limit, self._ends, rows, sampling, make_end, stop=stop, num_alternatives=noted, matcher=matcher
        )

    def _native_search(self, limit: int, least: int, num_language_tokens: int) -> Search:
        config = self.config
        if config.num_beams == 1:
            return NativeSearch.greedy(limit, self._ends, min_tokens=least, suppressed=config.suppress_tokens)
        return NativeSearch.beams(
            limit, self._ends, config.num_beams, beam_rules=config.beam_rules, alpha=config.alpha,
            num_return=config.num_return_sequences, early_stopping=config.early_stopping, min_tokens=least,
            suppressed=config.suppress_tokens, begun=num_language_tokens, keeps_shares=config.keeps_scores,
        )  # fmt: skip

    def _beam_search(self, limit: int, stop: Stop | None, num_language_tokens: int) -> Search:
        config = self.config
        first, returned = (limit, self._ends, config.num_beams), config.num_return_sequences
        if config.beam_rules == "transformers":
            return TransformersBeamSearch(
                *first, alpha=config.alpha, num_return=returned, early_stopping=config.early_stopping,
                may_rise=self._may_rise, stop=stop, begun=num_language_tokens,
            )  # fmt: skip
        return BeamSearch(
            *first, alpha=config.alpha, num_return=returned, early_stopping=config.early_stopping is True,
            num_groups=config.num_beam_groups, diversity_penalty=config.diversity_penalty, stop=stop,
        )  # fmt: skip

    def _text_stop(self, before: Sequence[int]) -> Stop | None:
        """Returns the function that ends beams at a stop text, or None."""
        return StopTexts(self._pieces(before)) if self.config.stop_strings else None

    def _end_of_text(self, before: Sequence[int]) -> Callable[[int], bool]:
        """Returns a function that takes each new token of a row, and returns whether it completes a stop text."""
        pieces = self._pieces(before)

        def is_end(token: int) -> bool:
            pieces.add([token])
            return pieces.is_stopped

        return is_end

    def _pieces(self, before: Sequence[int]) -> TextPieces:
        assert self._tokenizer is not None
        return TextPieces(
            self._tokenizer, behind_ends(before, self._special.eos), is_told=True, stop=self.config.stop_strings
        )


def special_ids(model_ids: SpecialIds, config: GenerationConfig) -> DecodingIds:
    """Returns a model's special ids, with those that the config names in their place."""
    pad_id = model_ids.pad if config.pad_token_id is None else config.pad_token_id
    eos = config.eos_token_id
    ends = model_ids.eos if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    start = model_ids.start if config.decoder_start_token_id is None else config.decoder_start_token_id
    if config.pad_token_id is None and pad_id in ends and pad_id not in model_ids.eos:
        raise ValueError(
            f"expected two ids for eos_token_id and pad_token_id, got {pad_id} for both, which is the model's pad: "
            f"with pad_token_id={pad_id} too, nothing in an input is padding unless an attention_mask says so"
        )
    return DecodingIds(pad_id, ends, start)


def most_new_tokens(
    model: Model,
    seqlen: int,
    config: GenerationConfig,
    width: int | None = None,
    prefix: int = 0,
    *,
    is_prompted: bool,
) -> int:
    """Returns the most new tokens of an input: the config's limit, or a default that depends on the input's length.

    Args:
        model: the model that decodes.
        seqlen: the length of the input.
        config: the options of the search.
        width: the width of the batch; None: seqlen.
        prefix: the number of tokens that the output of a source begins with.
        is_prompted: whether the input is a prompt.

    Raises:
        ValueError: the model's max_len leaves too little room.
    """
    if config.window == "slide" and config.max_new_tokens is not None:
        return config.max_new_tokens
    max_len, width = model.config.max_len, seqlen if width is None else width
    if not is_prompted:
        room = max_len - prefix
        default, behind = min(seqlen + EXTRA_LENGTH, room), f" after a prefix of {prefix}" if prefix else ""
    else:
        room = default = max_len - width
        behind = f" after a prompt of {width}"
    if room < 1 and not is_prompted:
        raise ValueError(
            f"expected a prefix of fewer tokens than the model's max_len {max_len}, got {prefix}: there is no room for "
            "a new token"
        )
    if room < 1:
        raise ValueError(
            f"expected prompts of fewer tokens than the model's max_len {max_len}, got {width}: there is no room for a "
            "new token; cut the prompt, or pass window='slide' and max_new_tokens, so that the model sees only its end"
        )
    advice = "; with window='slide', it continues, and sees only the end of the text" if is_prompted else ""
    begun = 1 + prefix if not is_prompted else width
    wanted = config.max_new_tokens
    name, more = "max_new_tokens", 0
    if wanted is None and config.max_length is not None:
        name, more = "max_length", begun  # max_length counts the tokens before the new ones
        wanted = config.max_length - begun
        if wanted < 1:
            raise ValueError(
                f"expected max_length of more than the {begun} that outputs begin with, got {config.max_length}; "
                "max_new_tokens doesn't count them"
            )
    least = 0
    if wanted is None:  # only then the minimum has to fit; else the output ends at the wanted number
        least = config.least_tokens(begun)
        name, more = ("min_new_tokens", 0) if config.min_new_tokens else ("min_length", begun)
    value = least if wanted is None else wanted
    if value > room:
        raise ValueError(
            f"expected {name} of at most {room + more}{behind}, because the model's max_len is {max_len}; "
            f"got {value + more}{advice}"
        )
    return wanted or max(default, least)
