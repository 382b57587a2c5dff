"""What a search is asked to do: every option of `generate`, checked once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RUNGS = ("naive", "encoder_once", "cross_cached", "cached")
_SEEDS = range(-(2**63), 2**64)  # what torch.Generator takes

_INTEGERS = (
    "max_new_tokens",
    "min_new_tokens",
    "num_beams",
    "top_k",
    "no_repeat_ngram_size",
    "num_return_sequences",
    "eos_token_id",
    "pad_token_id",
    "seed",
)
_NUMBERS = ("length_penalty", "temperature", "top_p", "repetition_penalty")
_SWITCHES = ("early_stopping", "do_sample", "use_cache")
_OPTIONAL = ("max_new_tokens", "seed", "rung")  # None says something


@dataclass(frozen=True)
class GenerationSettings:
    """The options of a search; `generate` says what each does.

    Raises:
        ValueError: an option of another type, NaN or out of its range, or two that contradict each other.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 0.6
    early_stopping: bool = False
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    num_return_sequences: int = 1
    eos_token_id: int = 1
    pad_token_id: int = 0
    use_cache: bool = True
    rung: str | None = None
    seed: int | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> GenerationSettings:
        """The settings that keyword arguments name.

        Raises:
            ValueError: a name that is no option (the nearest one is suggested), or what the class raises.
        """
        if not isinstance(options, Mapping):
            raise ValueError(f"expected options as a mapping of names to values, got {type(options).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
                raise ValueError(f"there is no option {name!r} here{hint}")
        return cls(**options)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_combinations()

    @property
    def copies(self) -> int:
        """How often an input is decoded: once for each sample. The beams of a search share theirs."""
        return self.num_return_sequences if self.num_beams == 1 else 1

    @property
    def memory_rung(self) -> str:
        """One of RUNGS: what `rung` says, else what `use_cache` means."""
        return self.rung or ("cached" if self.use_cache else "naive")

    def check_model(self, vocab_size: int) -> None:
        """Holds the ids and the beams against a model's vocabulary.

        Raises:
            ValueError: an id that the vocabulary doesn't have, more beams than tokens.
        """
        for name in ("eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < vocab_size:
                raise ValueError(
                    f"expected {name} from 0 to {vocab_size - 1}, as the model's vocabulary has, "
                    f"got {getattr(self, name)}"
                )
        if self.num_beams > vocab_size:
            raise ValueError(f"expected num_beams of at most the vocabulary's {vocab_size}, got {self.num_beams}")

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
                object.__setattr__(self, name, int(value))

    def _check_ranges(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens of at least 1, got {self.max_new_tokens}")
        if self.min_new_tokens < 0:
            raise ValueError(f"expected min_new_tokens of at least 0, got {self.min_new_tokens}")
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
        if self.rung is not None and self.rung not in RUNGS:
            raise ValueError(f"expected a rung out of {RUNGS}, got {self.rung!r}")

    def _check_combinations(self) -> None:
        beams, returned = self.num_beams, self.num_return_sequences
        if self.eos_token_id == self.pad_token_id:
            raise ValueError(f"expected two ids for eos_token_id and pad_token_id, got {self.eos_token_id} for both")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"expected min_new_tokens of at most max_new_tokens {self.max_new_tokens}, got {self.min_new_tokens}"
            )
        if self.do_sample and beams > 1:
            raise ValueError("expected do_sample or num_beams > 1, got both")
        if beams > 1 and returned > beams:
            raise ValueError(f"expected num_return_sequences of at most num_beams {beams}, got {returned}")
        if beams == 1 and returned > 1 and not self.do_sample:
            raise ValueError("expected num_return_sequences 1 for greedy decoding; use num_beams or do_sample for more")
        if not self.do_sample:
            for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
                if getattr(self, name) != neutral:
                    raise ValueError(
                        f"expected do_sample=True with {name} {getattr(self, name)}: without it nothing is drawn"
                    )


def _is_integer(value: object) -> bool:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:  # a tensor or an array has it, and may hold a float or several numbers
        return abs(operator.index(value)) < 2**128
    except TypeError:
        return False
