"""Which of a run's models is the best, by what measure, and since when."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastformer.training.config import TrainConfig
from fastformer.training.evaluate import Scores, corpus_metrics, words_hint

logger = logging.getLogger("fastformer")

_ZERO = 0.005  # a BLEU below it is shown as 0.00
_SHOWN = {"nll": "nll {:.4f}", "bleu": "BLEU {:.2f}", "chrf": "chrF {:.2f}", "exact_match": "exact match {:.4f}"}


def choose_measure(config: TrainConfig, references: Sequence[str] = ()) -> str:
    """What "better" means in a run: the setting best_by, and for "auto" what fits the task.

    Numbers are right or wrong: exact match. Translations: BLEU, or chrF where BLEU finds no words. Where nothing is
    translated (language models, val_examples 0, no sacrebleu): the likelihood.

    Args:
        config: the settings.
        references: the right translations in validation.

    Raises:
        ImportError: a package that bleu_tokenize needs is not installed.
        ValueError: a measure that this run can't take.
    """
    asked = config.best_by
    measure = asked if asked != "auto" else "exact_match" if config.task == "numbers" else "bleu"
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
            logger.warning("%s%s", hint, "" if asked == "bleu" else "; the best model is chosen by chrF")
        return "bleu" if hint is None or asked == "bleu" else "chrf"
    if asked == "auto":
        return "nll"
    raise ValueError(f"best_by {asked} needs {missing}; give --best_by nll or auto to do without")


@dataclass(frozen=True)
class Record:
    """The scores of one validation.

    Attributes:
        step: the update whose model it was.
        data: the fingerprint of the validation examples.
        translated: how many of them were translated, for all scores but nll.
    """

    step: int
    data: str
    translated: int
    nll: float
    bleu: float | None
    chrf: float | None
    exact_match: float | None

    @classmethod
    def of(cls, step: int, scores: Scores, data: str, translated: int) -> Record:
        """The record of a validation's scores."""
        return cls(step, data, translated, scores.nll, scores.bleu, scores.chrf, scores.exact_match)

    def beats(self, other: Record, measure: str) -> bool:
        """Whether it is better. Scores are compared with scores of the same kind on the same data only: where the
        measure is missing on a side, or alike on both (a BLEU that is shown as 0.00 is), the likelihood decides."""
        if self.data != other.data:
            return True  # nothing is known of the other on this data
        is_zero = measure == "bleu" and max(self.bleu or 0.0, other.bleu or 0.0) < _ZERO
        for name in ("nll",) if is_zero else (measure, "nll"):
            ours, theirs = self._higher_is_better(name), other._higher_is_better(name)
            if ours is None or theirs is None or (name != "nll" and self.translated != other.translated):
                continue
            if ours != theirs:
                return ours > theirs
        return False

    def show(self, measure: str) -> str:
        """ "BLEU 35.10, nll 1.5290": the measure, where it was taken, and the likelihood."""
        names = [measure, "nll"] if measure != "nll" and getattr(self, measure) is not None else ["nll"]
        return ", ".join(_SHOWN[name].format(getattr(self, name)) for name in names)

    def _higher_is_better(self, name: str) -> float | None:
        value: float | None = getattr(self, name)
        if value is None:
            return None
        value = -value if name == "nll" else value
        return -math.inf if math.isnan(value) else value


class Best:
    """The best validation so far, and how many in a row were not better.

    Args:
        measure: of `choose_measure`.
        data: the fingerprint of the validation examples.
        translated: how many of them are translated.
    """

    def __init__(self, measure: str, data: str, translated: int) -> None:
        self.measure, self.data, self.translated = measure, data, translated
        self.record: Record | None = None
        self.bad_validations = 0

    def add(self, step: int, scores: Scores) -> bool:
        """Takes note of a validation. True if it is the best so far; one that is only as good is not."""
        record = self.of(step, scores)
        if self.record is None or record.beats(self.record, self.measure):
            self.record, self.bad_validations = record, 0
            return True
        self.bad_validations += 1
        return False

    def of(self, step: int, scores: Scores) -> Record:
        """The record of a validation, which takes no part in the contest."""
        return Record.of(step, scores, self.data, self.translated)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"record": asdict(self.record) if self.record else None, "bad_validations": self.bad_validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.record = None if state["record"] is None else Record(**state["record"])
        self.bad_validations = int(state["bad_validations"])
