"""Tracks the best model of a run: the measure, the best validation, and the number of validations since."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastformer.training.config import TrainConfig
from fastformer.training.evaluate import SHOWN, Scores, corpus_metrics, words_hint

logger = logging.getLogger("fastformer")

_ZERO = 0.005  # a lower BLEU is shown as 0.00


def choose_measure(config: TrainConfig, references: Sequence[str] = ()) -> str:
    """Chooses the measure by which models are compared: the setting best_by, or for "auto" one that fits the task.

    "auto" is exact match for the built-in task of numbers, and BLEU for translations, or chrF if BLEU finds no words.
    If nothing is translated (language models, val_examples 0, no sacrebleu), it is the likelihood.

    Args:
        config: the settings.
        references: the right translations in validation.

    Raises:
        ImportError: a package that bleu_tokenize needs is not installed.
        ValueError: a measure that this run can't compute.
    """
    best_by = config.best_by
    measure = best_by if best_by != "auto" else "exact_match" if config.task == "numbers" else "bleu"
    missing = None
    if measure != "nll" and config.model == "gpt":
        missing = "translations, and model gpt makes none"
    elif measure != "nll" and not config.val_examples:
        missing = "val_examples above 0"
    elif measure in ("bleu", "chrf") and importlib.util.find_spec("sacrebleu") is None:
        missing = "sacrebleu: pip install 'fastformer[train]'"
    if missing is None:
        if measure != "bleu":
            return measure
        corpus_metrics(config.bleu_tokenize)  # raises before the first validation
        hint = words_hint(references, config.bleu_tokenize)
        if hint is not None:
            logger.warning("%s%s", hint, "" if best_by == "bleu" else "; the best model is chosen by chrF")
        return "bleu" if hint is None or best_by == "bleu" else "chrf"
    if best_by == "auto":
        return "nll"
    raise ValueError(f"best_by {best_by} needs {missing}; give --best_by nll or auto to do without")


@dataclass(frozen=True)
class ScoreRecord:
    """The scores of one validation.

    Attributes:
        step: the update after which the model was validated.
        data: the fingerprint of the validation examples.
        translated: the number of examples that were translated, for all scores but nll.
    """

    step: int
    data: str
    translated: int
    nll: float
    bleu: float | None
    chrf: float | None
    exact_match: float | None

    def beats(self, other: ScoreRecord, measure: str) -> bool:
        """Returns whether this record is better than another one.

        Only scores of the same kind on the same data are compared. If one record lacks the measure, or if both have the
        same value (any BLEU that is shown as 0.00 counts as the same), the likelihood decides.
        """
        if self.data != other.data:
            return True  # the other record has no scores on this data
        is_zero = measure == "bleu" and max(self.bleu or 0.0, other.bleu or 0.0) < _ZERO
        for name in ("nll",) if is_zero else (measure, "nll"):
            value, other_value = self._higher_is_better(name), other._higher_is_better(name)
            if value is None or other_value is None or (name != "nll" and self.translated != other.translated):
                continue
            if value != other_value:
                return value > other_value
        return False

    def show(self, measure: str) -> str:
        """Formats the measure, if the record has it, and the likelihood: "BLEU 35.10, nll 1.5290"."""
        names = [measure, "nll"] if measure != "nll" and getattr(self, measure) is not None else ["nll"]
        return ", ".join(SHOWN[name].format(getattr(self, name)) for name in names)

    def _higher_is_better(self, name: str) -> float | None:
        value: float | None = getattr(self, name)
        if value is None:
            return None
        value = -value if name == "nll" else value
        return -math.inf if math.isnan(value) else value


class Best:
    """The best validation so far, and the number of validations since.

    Args:
        measure: the one that `choose_measure` returned.
        data: the fingerprint of the validation examples.
        translated: the number of examples to translate.
    """

    def __init__(self, measure: str, data: str, translated: int) -> None:
        self.measure, self.data, self.translated = measure, data, translated
        self.record: ScoreRecord | None = None
        self.bad_validations = 0

    def add(self, step: int, scores: Scores) -> bool:
        """Adds a validation; returns True if it is better than all before it."""
        record = self.of(step, scores)
        if self.record is None or record.beats(self.record, self.measure):
            self.record, self.bad_validations = record, 0
            return True
        self.bad_validations += 1
        return False

    def of(self, step: int, scores: Scores) -> ScoreRecord:
        """Builds the record of a validation without adding it."""
        return ScoreRecord(step, self.data, self.translated, scores.nll, scores.bleu, scores.chrf, scores.exact_match)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        record = asdict(self.record) if self.record else None
        return {"best": {"record": record, "bad_validations": self.bad_validations}}

    def load_state_dict(self, state: dict[str, Any], origin: object = None) -> None:
        """Restores the state that `state_dict` returned."""
        record = state["best"]["record"]
        self.record = None if record is None else ScoreRecord(**record)
        self.bad_validations = int(state["best"]["bad_validations"])
