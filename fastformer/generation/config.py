"""What a search is asked to do: every option of `generate`, checked once."""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from fastformer.generation.foreign_options import check_names, with_config
from fastformer.generation.precisions import check_precision

if TYPE_CHECKING:
    from fastformer.generation.processors import Processor
    from fastformer.generation.stopping import StoppingCriterion

logger = logging.getLogger("fastformer")

BeamRules: TypeAlias = Literal["tensor2tensor", "transformers"]  # `BeamSearch` and `TransformersBeamSearch`
EarlyStopping: TypeAlias = bool | Literal["never"]
Window: TypeAlias = Literal["stop", "slide"]  # what becomes of a text that fills the model's positions

_SEEDS = range(-(2**63), 2**64)  # what torch.Generator takes

_INTEGERS = (
    "max_new_tokens",
    "min_new_tokens",
    "max_length",
    "min_length",
    "num_beams",
    "top_k",
    "no_repeat_ngram_size",
    "num_return_sequences",
    "num_beam_groups",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "seed",
)
_NUMBERS = ("length_penalty", "temperature", "top_p", "repetition_penalty", "diversity_penalty", "max_time")
_SWITCHES = ("do_sample", "use_cache", "renormalize_logits")
_OPTIONAL = (  # None says something
    "max_new_tokens",
    "max_length",
    "max_time",
    "length_penalty",
    "seed",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
)


@dataclass(frozen=True)
class GenerationConfig:
    """The options of a search; `generate` says what each does.

    Raises:
        ValueError: an option of another type, NaN or out of its range, or two that contradict each other.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    max_length: int | None = None
    min_length: int = 0
    num_beams: int = 1
    beam_rules: BeamRules = "tensor2tensor"
    length_penalty: float | None = None
    early_stopping: EarlyStopping = False
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    num_return_sequences: int = 1
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    suppress_tokens: Sequence[int] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    shortlist: Sequence[int] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    logits_processor: Processor | Sequence[Processor] = ()
    renormalize_logits: bool = True
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] = ()
    stop_strings: str | Sequence[str] = ()
    window: Window = "stop"
    max_time: float | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    use_cache: bool = True
    engine: str | None = None
    precision: str | None = None
    seed: int | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> GenerationConfig:
        """The settings that keyword arguments name.

        Raises:
            ValueError: a name that is no option (the nearest one is suggested), or what the class raises.
        """
        if not isinstance(options, Mapping):
            raise ValueError(f"expected options as a mapping of names to values, got {type(options).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        check_names(options, [*known, "generation_config"])
        return cls(**with_config(options, known))

    def __post_init__(self) -> None:
        self._check_lists()
        self._check_types()
        self._check_ranges()
        self._check_combinations()

    @property
    def samples(self) -> int:
        """How many rows an input has that know nothing of each other."""
        return self.num_return_sequences if self.num_beams == 1 else 1

    @property
    def alpha(self) -> float:
        """The length penalty: the one that was asked for, or what the rules have by default."""
        if self.length_penalty is not None:
            return self.length_penalty
        return 1.0 if self.beam_rules == "transformers" else 0.6

    def least_tokens(self, begun: int) -> int:
        """How many new tokens come before an end, in an output that begins with so many, its start token included."""
        return self.min_new_tokens or max(0, self.min_length - begun)

    @property
    def keeps_scores(self) -> bool:
        """Whether beams take what the processors give as it is, and make no log-probabilities of it."""
        return self.num_beams > 1 and not self.renormalize_logits

    def check_model(self, vocab_size: int) -> None:
        """Holds the ids and the beams against a model's vocabulary.

        Raises:
            ValueError: an id that the vocabulary doesn't have, more beams than tokens.
        """
        named = {
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "decoder_start_token_id": self.decoder_start_token_id,
            "forced_bos_token_id": self.forced_bos_token_id,
            "forced_eos_token_id": self.forced_eos_token_id,
            "suppress_tokens": self.suppress_tokens,
            "shortlist": self.shortlist,
            "bad_words_ids": [token for word in self.bad_words_ids for token in word],
        }
        for name, value in named.items():
            for token in value if isinstance(value, Sequence) else () if value is None else (value,):
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"expected {name} from 0 to {vocab_size - 1}, as the model's vocabulary has, got {token}"
                    )
        if self.num_beams > vocab_size:
            raise ValueError(f"expected num_beams of at most the vocabulary's {vocab_size}, got {self.num_beams}")

    def _check_lists(self) -> None:
        """Lists become tuples, so that nobody changes them afterwards."""
        eos = self.eos_token_id
        if eos is not None:
            ends = (_id("eos_token_id", eos),) if _is_integer(eos) else _ids("eos_token_id", eos)
            self._set("eos_token_id", tuple(dict.fromkeys(ends)))
            if not self.eos_token_id:
                raise ValueError("expected eos_token_id to be an id or some, got none")
        self._set("suppress_tokens", _ids("suppress_tokens", self.suppress_tokens))
        self._set("shortlist", tuple(sorted(set(_ids("shortlist", self.shortlist)))))
        words = _listed("bad_words_ids", self.bad_words_ids)
        self._set("bad_words_ids", tuple(_ids("bad_words_ids", word) for word in words))
        if not all(self.bad_words_ids):
            raise ValueError("expected each of bad_words_ids to hold ids, got an empty one")
        strings = self.stop_strings
        self._set("stop_strings", (strings,) if isinstance(strings, str) else _listed("stop_strings", strings))
        for one in self.stop_strings:
            if not isinstance(one, str) or not one:
                raise ValueError(f"expected stop_strings to hold texts that aren't empty, got {one!r:.60}")
        for name in ("logits_processor", "stopping_criteria"):
            given = getattr(self, name)
            # Hugging Face's lists of them can be called themselves; they are lists all the same.
            is_one = callable(given) and not isinstance(given, list)
            functions = (given,) if is_one else _listed(name, given)
            self._set(name, functions)
            for function in functions:
                if not callable(function):
                    raise ValueError(f"expected {name} to hold functions of (input_ids, scores), got {function!r:.60}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        for name in (*_INTEGERS, *_NUMBERS, *_SWITCHES):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if name in _SWITCHES:
                good, kind = isinstance(value, bool), "True or False"
            elif name in _INTEGERS:
                good, kind = _is_integer(value), "an integer"
            else:
                good, kind = _is_integer(value) or isinstance(value, float), "a number"
                if good and not math.isfinite(value):
                    good, kind = False, "a finite number"
            if not good:
                raise ValueError(f"expected {name} to be {kind}, got {value!r}")
            if name in _INTEGERS:  # NumPy's become Python's
                self._set(name, int(value))

        if self.beam_rules not in get_args(BeamRules):
            raise ValueError(f"expected beam_rules to be 'tensor2tensor' or 'transformers', got {self.beam_rules!r}")
        if self.window not in get_args(Window):
            raise ValueError(f"expected window to be 'stop' or 'slide', got {self.window!r}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"expected early_stopping to be True, False or 'never', got {self.early_stopping!r}")

    def _check_ranges(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens of at least 1, got {self.max_new_tokens}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"expected max_length of at least 1, got {self.max_length}")
        for name, least in (("min_new_tokens", self.min_new_tokens), ("min_length", self.min_length)):
            if least < 0:
                raise ValueError(f"expected {name} of at least 0, got {least}")
        if min(self.num_beams, self.num_return_sequences) < 1:
            raise ValueError(
                "expected num_beams and num_return_sequences of at least 1, got "
                f"{self.num_beams} and {self.num_return_sequences}"
            )
        if self.temperature <= 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                "expected temperature > 0, top_p in (0, 1] and top_k >= 0, got "
                f"{self.temperature}, {self.top_p} and {self.top_k}"
            )
        if self.repetition_penalty <= 0 or self.no_repeat_ngram_size < 0:
            raise ValueError(
                "expected repetition_penalty > 0 and no_repeat_ngram_size >= 0, got "
                f"{self.repetition_penalty} and {self.no_repeat_ngram_size}"
            )
        if self.seed is not None and self.seed not in _SEEDS:
            raise ValueError(f"expected a seed from -2**63 to 2**64 - 1, got {self.seed}")
        if self.engine is not None and not isinstance(self.engine, str):
            raise ValueError(f"expected engine to be a name, got {self.engine!r}")
        check_precision(self.precision)
        if self.max_time is not None and self.max_time <= 0:
            raise ValueError(f"expected max_time in seconds, more than 0, got {self.max_time}")
        if self.num_beam_groups < 1 or self.diversity_penalty < 0:
            raise ValueError(
                "expected num_beam_groups of at least 1 and diversity_penalty of at least 0, got "
                f"{self.num_beam_groups} and {self.diversity_penalty}"
            )

    def _check_combinations(self) -> None:
        beams, returned = self.num_beams, self.num_return_sequences
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
        groups = self.num_beam_groups
        if beams % groups:
            raise ValueError(f"expected num_beams to be a multiple of num_beam_groups, got {beams} and {groups}")
        if (groups > 1) != (self.diversity_penalty > 0):
            raise ValueError(
                "expected num_beam_groups > 1 together with a diversity_penalty > 0, got "
                f"{groups} and {self.diversity_penalty}"
            )
        if self.beam_rules == "transformers" and groups > 1:
            raise ValueError(
                f"expected beam_rules='tensor2tensor' with num_beam_groups {groups}: transformers' rules have no groups"
            )
        if self.beam_rules == "tensor2tensor" and self.early_stopping == "never":
            raise ValueError(
                "expected beam_rules='transformers' with early_stopping='never': by tensor2tensor's rules False never "
                "stops while a better hypothesis is possible"
            )
        if self.beam_rules == "tensor2tensor" and not self.renormalize_logits:
            raise ValueError(
                "expected beam_rules='transformers' with renormalize_logits=False: by tensor2tensor's rules scores are "
                "log-probabilities"
            )
        if beams > 1 and returned > beams:
            raise ValueError(f"expected num_return_sequences of at most num_beams {beams}, got {returned}")
        if beams == 1 and returned > 1 and not self.do_sample:
            raise ValueError("expected num_return_sequences 1 for greedy decoding; use num_beams or do_sample for more")
        if self.window == "slide" and self.max_new_tokens is None:
            raise ValueError(
                "expected max_new_tokens along with window='slide': the model's positions end nothing then"
            )
        if self.window == "slide" and beams > 1:
            raise ValueError(f"expected num_beams 1 with window='slide', got {beams}: decode greedily, or sample")
        if not self.do_sample:
            for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
                if getattr(self, name) != neutral:
                    raise ValueError(
                        f"expected do_sample=True with {name} {getattr(self, name)}: without it nothing is drawn"
                    )


GenerationSettings = GenerationConfig  # its name until 0.1


def _is_integer(value: object) -> bool:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:  # a tensor or an array has it, and may hold a float or several numbers
        return abs(operator.index(value)) < 2**128
    except TypeError:
        return False


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    error = ValueError(f"expected {name} to be a list, got {values!r:.60}")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise error
    try:
        return tuple(values)
    except TypeError:  # a tensor or an array is an Iterable, and one of no dimension can't be iterated over
        raise error from None


def _ids(name: str, values: Any) -> tuple[int, ...]:
    return tuple(_id(name, value) for value in _listed(name, values))


def _id(name: str, value: Any) -> int:
    if not _is_integer(value):
        raise ValueError(f"expected {name} to hold integers, got {value!r:.60}")
    return operator.index(value)
