"""`GenerationConfig`: every option of a search, with its type, bounds, default and help."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, get_args

from fastformer.generation.constraints import Constraint, ConstraintKind
from fastformer.generation.foreign_options import check_names, with_config
from fastformer.settings import Amount, Convert, Count, Positive, Range, as_ids, as_integer, as_tuple, check_settings

logger = logging.getLogger("fastformer")

BeamRules: TypeAlias = Literal["tensor2tensor", "transformers"]  # `BeamSearch` and `TransformersBeamSearch`
EarlyStopping: TypeAlias = bool | Literal["never"]
Window: TypeAlias = Literal["stop", "slide"]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "int8", "int4"]
CacheDtype: TypeAlias = Literal["int8"]
Processor: TypeAlias = Callable[[Any, Any], Any]  # of tensors: see the module `processors`
StoppingCriterion: TypeAlias = Callable[..., Any]  # see `processors.make_stop`
AboveZero: TypeAlias = Annotated[float, Range(above=0)]


def _sorted_ids(name: str, values: Any) -> tuple[int, ...]:
    return tuple(sorted(set(as_ids(name, values))))


def _end_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    one = as_integer(value)
    ids = as_ids(name, [one] if isinstance(one, int) and not isinstance(one, bool) else value)
    if not ids:
        raise ValueError(f"expected {name} to be an id or several, got none")
    return tuple(dict.fromkeys(ids))


def _sequences(name: str, values: Any) -> tuple[tuple[int, ...], ...]:
    sequences = tuple(as_ids(name, value) for value in as_tuple(name, values))
    if not all(sequences):
        raise ValueError(f"expected each of {name} to hold ids, got an empty one")
    return sequences


def _texts(name: str, values: Any) -> tuple[str, ...]:
    texts = (values,) if isinstance(values, str) else as_tuple(name, values)
    for one in texts:
        if not isinstance(one, str) or not one:
            raise ValueError(f"expected {name} to hold texts that aren't empty, got {one!r:.60}")
    return texts


def _functions(name: str, given: Any) -> tuple[Callable[..., Any], ...]:
    # Hugging Face's lists of functions are callable; they are treated as lists all the same.
    functions = (given,) if callable(given) and not isinstance(given, list) else as_tuple(name, given)
    for function in functions:
        if not callable(function):
            raise ValueError(f"expected {name} to hold functions of (input_ids, scores), got {function!r:.60}")
    return functions


def _schema(name: str, value: Any) -> str | None:
    if value is None:
        return None
    make = getattr(value, "model_json_schema", None)
    try:
        schema = make() if callable(make) else json.loads(value) if isinstance(value, str) else value
        text = json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
    except (TypeError, ValueError) as error:  # json's error is a ValueError
        raise ValueError(f"expected {name} as a mapping or a text in JSON, got {value!r:.60} ({error})") from error
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"expected {name} to be an object, got {text:.60}")
    return text


def _pattern(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"expected {name} as a text that isn't empty, got {value!r:.60}")
    return value


@dataclass(frozen=True)
class GenerationConfig:
    """The options of `generate`, a `Translator` and the commands. It is checked when it is created, and is immutable.

        config = GenerationConfig(num_beams=4, max_new_tokens=64)
        generate(model, input_ids, config)
        translator.translate(texts, config=config, length_penalty=1.0)  # as config, with another length_penalty

    The first sentence about an option is the help text of its flag.

    Attributes:
        max_new_tokens: the most new tokens; by default the source's length + 100, or the room that the model's max_len
            leaves after a prompt. For a batch of prompts that is the room of the longest one.
        min_new_tokens: the number of new tokens before which an output can't end. If it is above max_new_tokens, every
            output ends there.
        max_length: the most tokens, counting the tokens that an output begins with too. These are the prompt (with the
            length of the longest one in a batch), or the start token and the decoder_input_ids. max_new_tokens
            overrides this option.
        min_length: the number of tokens, counted as for max_length, before which an output can't end. min_new_tokens
            overrides this option.
        num_beams: the number of hypotheses that a beam search follows; 1 means no beam search.
        beam_rules: the rules of the beam search; transformers stands for those of Hugging Face's generate.
            "tensor2tensor" is `BeamSearch`, "transformers" is `TransformersBeamSearch`: they penalise lengths
            differently, and stop at different times.
        length_penalty: the alpha of ((5 + length) / 6) ** alpha, or of length ** alpha by transformers' rules, which
            divides the score of beams; by default 0.6, or 1.0 by transformers' rules. The length counts new tokens, EOS
            included.
        early_stopping: true stops when num_beams hypotheses are finished, even if better ones are possible; never, for
            transformers' rules only, continues while a better one is possible. By tensor2tensor's rules, False
            continues while a better one is possible. By transformers' rules, False continues while the best unfinished
            one, at its present length, beats the worst finished one; "never" compares the score that it could reach at
            max_new_tokens.
        do_sample: draw from the distribution instead of choosing the best token. temperature, top_k and top_p shape the
            distribution.
        temperature: the temperature of the sampling; below 1 sharpens the distribution.
        top_k: draw from the k best tokens; 0 is all.
        top_p: draw from the smallest set of tokens that has this probability.
        repetition_penalty: a factor that, above 1, discourages tokens that have occurred. New tokens count, and so do
            those that the output begins with: the prompt, or the start token and the decoder_input_ids.
        no_repeat_ngram_size: no n-gram of this length occurs twice; 0 is off. The same tokens count as for
            repetition_penalty.
        num_return_sequences: the number of results for each input: the best hypotheses of a beam search, at most
            num_beams, or samples. Finished hypotheses come first, then those cut at max_new_tokens, each group best
            first. By transformers' rules both groups are sorted together. If fewer exist, the rest is only PAD, with
            score -inf.
        num_beam_groups: the number of groups of beams, which avoid each other's tokens; with a diversity_penalty. For
            tensor2tensor's rules only; see `BeamSearch`.
        diversity_penalty: the cost of a token for each time that an earlier group has just chosen it.
        suppress_tokens: ids that are never generated.
        bad_words_ids: sequences of ids that are never generated. A sequence that is only an id of eos is ignored; use
            suppress_tokens to forbid it.
        shortlist: if it isn't empty, only these ids are generated, and those that end a row and forced ones.
            Log-probabilities are normalised over these ids. The engine "cpp" computes no others, which is faster.
        forced_bos_token_id: the first new token, which is forced only after exactly one id: a start token, or a prompt
            of one token.
        forced_eos_token_id: the new token at the limit.
        logits_processor: functions of (input_ids, scores) that return scores, called in turn after all others for each
            input. See `processors`.
        renormalize_logits: normalise the outputs of the processors to log-probabilities; by default true, or false by
            transformers' rules. False uses the outputs as the scores of beams, without redistributing the share of
            forbidden tokens, and is for transformers' rules only.
        stopping_criteria: functions of (input_ids, scores) that return which rows end, as Hugging Face's do. See
            `processors.make_stop`.
        stop_strings: texts that end a row. A row ends with the token that completes one of them in the text of its new
            tokens. The ids of the row contain the stop string, its text doesn't. A beam that ends so counts as one that
            ends in EOS. `generate` needs a tokenizer for them.
        schema: the new tokens are JSON that this JSON schema allows: a mapping, its JSON text, or a pydantic model. It
            is stored as JSON. With schema, regex, choices and grammar, of which there can be one, every complete text
            matches; one that is cut by max_new_tokens is the beginning of a text that matches. They need llguidance
            (`pip install 'fastformer[structured]'`), and `generate` needs a tokenizer. They are for prompts, and not
            for beams. A part of one that llguidance can't enforce is an error.
        regex: the new tokens match this regular expression as a whole, in the syntax of Rust's regex crate.
        choices: the new tokens are one of these texts.
        grammar: the new tokens match this context-free grammar, in the syntax of Lark, or in llama.cpp's GBNF.
        window: the action when a text fills the model's positions: stop ends the text; slide forgets the older half of
            the tokens that the model sees and continues, up to max_new_tokens. With slide, the model reads only the end
            of a longer prompt. Whenever max_len tokens are full, the model reads the last max_len // 2 of them again,
            as if the text began there. Outputs, and options that depend on them, contain the whole text. It is for
            prompts, and not for beams.
        prompt_lookup_num_tokens: the most tokens to draft at a time from the text itself: what followed the last tokens
            where they occurred before, in the source, the prompt or the new text. The model checks all of them in one
            pass, which makes texts that repeat faster, and changes no result. Fewer are drafted, or none, while few are
            accepted, or many rows are decoded together. By default nothing is drafted. Only the engine "cpp" drafts,
            and neither for beams nor for several samples of one input.
        adapter: the name of a LoRA adapter with which the model decodes, one that a `Generator`, a `Chat` or an
            `AsyncGenerator` has loaded; by default none. Each request may have another one.
        max_time: the seconds after which decoding ends with the results so far. Inputs that haven't begun by then have
            no result.
        eos_token_id: the ids that end a row; by default the model's.
        pad_token_id: the padding id of inputs and outputs; by default the model's. It may be an id that ends a row, as
            is usual with GPT-2. In this case it pads the outputs, and without an attention_mask no id in input_ids is
            padding.
        decoder_start_token_id: the first input of the decoder in a model that reads sources; by default the model's.
            Outputs don't contain it.
        use_cache: cache keys and values; if False, everything is recomputed for each token.
        engine: one of `engines.ENGINES`; by default the fastest that can decode the model on its device: on a GPU
            "graph" (steps as CUDA graphs), unless it can't capture the model.
        precision: the precision of the computation; by default the model's. That is "int8" or "int4" if the model was
            quantised (`model.quantize()`), else its dtype, or autocast's. The engine "cpp" computes a model in fp32 or
            bf16 in each of fp32, bf16, int8 and int4. The other engines compute only in the model's dtype.
        cache_dtype: the dtype of cached keys and values; by default that of the computation. "int8" rounds each of them
            to 8 bits with a scale for each token and head, which takes half of the memory of bf16 and a quarter of that
            of fp32, and makes long contexts faster. Only the engine "cpp" does.
        seed: the seed of the sampling; by default it is drawn from PyTorch's default generator.

    Raises:
        ValueError: an option has another type, is NaN or out of its range, or two options contradict each other.
    """

    max_new_tokens: Positive | None = None
    min_new_tokens: Count = 0
    max_length: Positive | None = None
    min_length: Count = 0
    num_beams: Positive = 1
    beam_rules: BeamRules = "tensor2tensor"
    length_penalty: float | None = None
    early_stopping: EarlyStopping = False
    do_sample: bool = False
    temperature: AboveZero = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    repetition_penalty: AboveZero = 1.0
    no_repeat_ngram_size: Count = 0
    num_return_sequences: Positive = 1
    num_beam_groups: Positive = 1
    diversity_penalty: Amount = 0.0
    suppress_tokens: Annotated[Sequence[int], Convert(as_ids)] = ()
    bad_words_ids: Annotated[Sequence[Sequence[int]], Convert(_sequences)] = ()
    shortlist: Annotated[Sequence[int], Convert(_sorted_ids)] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    logits_processor: Annotated[Processor | Sequence[Processor], Convert(_functions)] = ()
    renormalize_logits: bool | None = None
    stopping_criteria: Annotated[StoppingCriterion | Sequence[StoppingCriterion], Convert(_functions)] = ()
    stop_strings: Annotated[str | Sequence[str], Convert(_texts)] = ()
    schema: Annotated[Mapping[str, Any] | str | bool | type[Any] | None, Convert(_schema)] = None
    regex: Annotated[str | None, Convert(_pattern)] = None
    choices: Annotated[Sequence[str], Convert(_texts)] = ()
    grammar: Annotated[str | None, Convert(_pattern)] = None
    window: Window = "stop"
    prompt_lookup_num_tokens: Positive | None = None
    adapter: str | None = None
    max_time: AboveZero | None = None
    eos_token_id: Annotated[int | Sequence[int] | None, Convert(_end_ids)] = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    use_cache: bool = True
    engine: str | None = None
    precision: Precision | None = None
    cache_dtype: CacheDtype | None = None
    seed: Annotated[int, Range(-(2**63), most=2**64 - 1)] | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], config: GenerationConfig | None = None) -> GenerationConfig:
        """Makes a config from keyword arguments.

        Args:
            options: fields by name. "generation_config", transformers' or a mapping, supplies the fields that aren't
                named.
            config: the config that the options change; None: the defaults.

        Raises:
            ValueError: an unknown name (the nearest one is suggested), or an error of the class.
        """
        if config is not None and not isinstance(config, GenerationConfig):
            got = f"{type(config).__module__}.{type(config).__qualname__}"  # transformers' class has the same name
            raise ValueError(
                f"expected config to be a fastformer.generation.GenerationConfig, got {got}: give a mapping, or a "
                "config of transformers, as generation_config"
            )
        if not isinstance(options, Mapping):
            raise ValueError(f"expected options as a mapping of names to values, got {type(options).__name__}")
        if not options:
            return config or _DEFAULT
        if not options.keys() <= _KNOWN:
            check_names(options, (*OPTIONS, "generation_config"))
        if options.get("generation_config") is not None and config is not None:
            raise ValueError("expected config or generation_config, got both")
        if "generation_config" in options:
            options = with_config(options, OPTIONS)
        if config is None:
            return cls(**options)
        changed = copy.copy(config)
        vars(changed).update(options)
        check_settings(changed, options)  # the others were checked before
        changed._check_combinations()
        return changed

    def __post_init__(self) -> None:
        if check_settings(self):
            self._check_combinations()

    @property
    def constraint(self) -> Constraint | None:
        """What new tokens must match, or None."""
        choices = json.dumps(self.choices) if self.choices else None
        assert self.schema is None or isinstance(self.schema, str)  # as `_schema` stores it
        texts: dict[ConstraintKind, str | None]
        texts = {"schema": self.schema, "regex": self.regex, "choices": choices, "grammar": self.grammar}
        return next((Constraint(kind, text) for kind, text in texts.items() if text is not None), None)

    @property
    def samples(self) -> int:
        """The number of independent rows for an input."""
        return self.num_return_sequences if self.num_beams == 1 else 1

    @property
    def alpha(self) -> float:
        """The length penalty: the option's value, or the default of the rules."""
        if self.length_penalty is not None:
            return self.length_penalty
        return 1.0 if self.beam_rules == "transformers" else 0.6

    def least_tokens(self, begun: int) -> int:
        """Returns the minimum number of new tokens after `begun` ids, the start token included."""
        return self.min_new_tokens or max(0, self.min_length - begun)

    @property
    def keeps_scores(self) -> bool:
        """Whether beams use the outputs of processors as scores, without normalising them to log-probabilities."""
        if self.renormalize_logits is None:
            return self.num_beams > 1 and self.beam_rules == "transformers"
        return self.num_beams > 1 and not self.renormalize_logits

    def check_model(self, vocab_size: int) -> None:
        """Checks the ids and the number of beams against a model's vocabulary.

        Raises:
            ValueError: an id outside of the vocabulary, or more beams than tokens.
        """
        for name in _IDS:
            value = getattr(self, name)
            if value is None or value == ():
                continue
            for token in (value,) if isinstance(value, int) else value:
                for one in (token,) if isinstance(token, int) else token:
                    if not 0 <= one < vocab_size:
                        raise ValueError(
                            f"expected {name} from 0 to {vocab_size - 1}, as the model's vocabulary has, got {one}"
                        )
        if self.num_beams > vocab_size:
            raise ValueError(f"expected num_beams of at most the vocabulary's {vocab_size}, got {self.num_beams}")

    def check_engine(
        self, owner: object, engine: str, precision: Precision | None, cache_dtype: CacheDtype | None
    ) -> None:
        """Checks that an object which decodes all its requests with one engine can apply the options.

        Args:
            owner: the object.
            engine: the name of its engine.
            precision: the precision of its engine; None: the model's own.
            cache_dtype: the dtype of its engine's keys and values; None: that of the computation.

        Raises:
            ValueError: the options ask for another engine, precision or cache_dtype.
        """
        as_made = f"as chosen for all requests of this {type(owner).__name__}"
        if self.precision not in (None, precision):
            expected = "the model's own precision" if precision is None else f"precision {precision!r}"
            raise ValueError(f"expected {expected}, {as_made}, got {self.precision!r}")
        if self.cache_dtype not in (None, cache_dtype):
            raise ValueError(f"expected cache_dtype {cache_dtype!r}, {as_made}, got {self.cache_dtype!r}")
        if self.engine not in (None, engine):
            raise ValueError(f"expected engine {engine!r}, {as_made}, got {self.engine!r}")
        if not self.use_cache:
            raise ValueError(f"expected use_cache=True, {as_made}, got False")

    def _check_combinations(self) -> None:
        beams, groups, by_transformers_rules = self.num_beams, self.num_beam_groups, self.beam_rules == "transformers"
        if (constraint := self.constraint) is not None:
            named = [name for name in get_args(ConstraintKind) if getattr(self, name) not in (None, ())]
            if len(named) > 1:
                raise ValueError(f"expected one of schema, regex, choices and grammar, got {' and '.join(named)}")
            if beams > 1:
                raise ValueError(
                    f"expected num_beams 1 with {constraint.kind}, got {beams}: decode greedily, or sample"
                )
            for name in ("forced_bos_token_id", "forced_eos_token_id"):
                if getattr(self, name) is not None:
                    raise ValueError(f"expected {name} or {constraint.kind}, got both")
        if self.engine is not None and not self.use_cache:
            raise ValueError(f"expected engine or use_cache=False, got both: engine={self.engine!r}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            logger.warning(
                "min_new_tokens %d is above max_new_tokens %d: everything ends at the latter",
                self.min_new_tokens,
                self.max_new_tokens,
            )
        if self.do_sample and beams > 1:
            raise ValueError("expected do_sample or num_beams > 1, got both")
        if beams % groups:
            raise ValueError(f"expected num_beams to be a multiple of num_beam_groups, got {beams} and {groups}")
        if (groups > 1) != (self.diversity_penalty > 0):
            raise ValueError(
                "expected num_beam_groups > 1 together with a diversity_penalty > 0, got "
                f"{groups} and {self.diversity_penalty}"
            )
        if by_transformers_rules and groups > 1:
            raise ValueError(
                f"expected beam_rules='tensor2tensor' with num_beam_groups {groups}: transformers' rules have no groups"
            )
        if not by_transformers_rules and self.early_stopping == "never":
            raise ValueError(
                "expected beam_rules='transformers' with early_stopping='never': by tensor2tensor's rules False never "
                "stops while a better hypothesis is possible"
            )
        if not by_transformers_rules and self.renormalize_logits is False:
            raise ValueError(
                "expected beam_rules='transformers' with renormalize_logits=False: by tensor2tensor's rules scores are "
                "log-probabilities"
            )
        if self.num_return_sequences > beams and not self.do_sample:
            advice = "; use num_beams or do_sample for more" if beams == 1 else ""
            raise ValueError(
                f"expected num_return_sequences of at most num_beams {beams}, got {self.num_return_sequences}{advice}"
            )
        if self.window == "slide" and self.max_new_tokens is None:
            raise ValueError("expected max_new_tokens along with window='slide': max_len ends nothing then")
        if self.window == "slide" and beams > 1:
            raise ValueError(f"expected num_beams 1 with window='slide', got {beams}: decode greedily, or sample")
        for name, neutral in () if self.do_sample else (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"expected do_sample=True with {name} {getattr(self, name)}: nothing is drawn without it"
                )


class GenerationOptions(TypedDict, total=False):
    """The fields of `GenerationConfig` as keyword arguments, for type checkers; a test compares the two."""

    max_new_tokens: int | None
    min_new_tokens: int
    max_length: int | None
    min_length: int
    num_beams: int
    beam_rules: BeamRules
    length_penalty: float | None
    early_stopping: EarlyStopping
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    num_return_sequences: int
    num_beam_groups: int
    diversity_penalty: float
    suppress_tokens: Sequence[int]
    bad_words_ids: Sequence[Sequence[int]]
    shortlist: Sequence[int]
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None
    logits_processor: Processor | Sequence[Processor]
    renormalize_logits: bool | None
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion]
    stop_strings: str | Sequence[str]
    schema: Mapping[str, Any] | str | bool | type[Any] | None
    regex: str | None
    choices: Sequence[str]
    grammar: str | None
    window: Window
    prompt_lookup_num_tokens: int | None
    adapter: str | None
    max_time: float | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    decoder_start_token_id: int | None
    use_cache: bool
    engine: str | None
    precision: Precision | None
    cache_dtype: CacheDtype | None
    seed: int | None


GenerationSettings = GenerationConfig  # the former name of the class
OPTIONS = tuple(field.name for field in dataclasses.fields(GenerationConfig))
_IDS = ("eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
        "suppress_tokens", "shortlist", "bad_words_ids")  # fmt: skip
_KNOWN = {*OPTIONS, "generation_config"}
_DEFAULT = GenerationConfig()
