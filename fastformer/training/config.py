"""Every setting of a training run, with its default. The same names are flags and keys of the YAML file."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fastformer.data.batching import BATCHINGS

MODELS = ("transformer", "gpt", "lstm")
SCHEDULES = ("noam", "t2t", "linear", "cosine", "constant")
PRECISIONS = ("fp32", "bf16", "fp16")
BEST_BY = ("auto", "nll", "bleu", "chrf", "exact_match")
AT_LEAST_ONE = "steps accumulate max_tokens max_len seqlen vocab_size keep_last average_last log_every"
AT_LEAST_ZERO = (  # 0 = off
    "epochs max_minutes lr warmup eps weight_decay clip val_every save_every patience val_examples samples seed"
)


@dataclass
class TrainConfig:
    """Settings of `fastformer train`. Data: `task`, or train_source with train_target, or train_tsv, or train_text.

    Attributes:
        model: "transformer", "gpt" or "lstm" (the classic baseline).
        preset: of the model's sizes: "tiny", "base", "base-paper", "big" (transformer).
        settings: fields of the model's config, over the preset's: {"d_model": 256, "dropout": 0.2}.
        task: "numbers", the built-in task; leave it out to train on files.
        train_source, train_target: two UTF-8 files, aligned line by line.
        val_source, val_target: likewise; without them the last hundredth of the training data is held out.
        train_tsv, val_tsv: a file of source<TAB>target lines instead.
        train_text, val_text: plain text, for "gpt"; without val_text the last tenth is held out.
        tokenizer: "bpe" (trained on the training text), "bytes", or the path of a tokenizer.json.
        vocab_size: of a BPE, both languages together.
        seqlen: window of a language model.
        max_len: longer examples are left out, and counted.
        batching: "packed" (no padding), "bucketed" or "random" (padded).
        max_tokens: of a batch, on the longer side.
        accumulate: batches per update; gradients are weighted by tokens.
        steps: updates.
        epochs: passes over the training data instead of a number of updates; 0 = as steps says.
        max_minutes: ends the training earlier; 0 = no limit.
        schedule: "noam" (the paper), "t2t" (tensor2tensor), "linear", "cosine", "constant"; all with warmup.
        lr: the peak; for noam and t2t the factor in front of the formula (the paper 1, tensor2tensor 2).
        warmup: updates until the peak.
        beta1, beta2, eps, weight_decay: of AdamW.
        clip: the largest gradient norm; 0 = off.
        label_smoothing: in training; validation reports the plain NLL.
        smooth_others: spread it over the other classes, as tensor2tensor does.
        precision: "fp32", or autocast in "bf16" or "fp16".
        checkpointing: recompute the layers in backward instead of keeping what is inside.
        ema: decay of a running average of the weights, which validation and the result then use; 0 = off.
        average_last: the result averages the weights of the last checkpoints; 1 = off.
        val_every, save_every: in updates; 0 = at the end only.
        log_every: in updates.
        keep_last: checkpoints that stay, besides the best model.
        patience: stop after so many validations without a better one; 0 = never.
        val_examples: decoded for exact match and BLEU; 0 = none.
        samples: translations in the log.
        best_by: what "the best model" means: "nll", "bleu", "chrf", "exact_match", or "auto", which fits the task.
        init_from: a run folder whose model and tokenizer the training begins with (fine-tuning).
        seed: of the weights, the data order and dropout.
        device: "auto", "cpu", "cuda".
    """

    model: str = "transformer"
    preset: str = "tiny"
    settings: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    train_source: str | None = None
    train_target: str | None = None
    val_source: str | None = None
    val_target: str | None = None
    train_tsv: str | None = None
    val_tsv: str | None = None
    train_text: str | None = None
    val_text: str | None = None
    tokenizer: str = "bpe"
    vocab_size: int = 8000
    seqlen: int = 128
    max_len: int = 256
    batching: str = "packed"
    max_tokens: int = 4096
    accumulate: int = 1
    steps: int = 1000
    epochs: float = 0.0
    max_minutes: float = 0.0
    schedule: str = "linear"
    lr: float = 2e-3
    warmup: int = 200
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip: float = 1.0
    label_smoothing: float = 0.0
    smooth_others: bool = False
    precision: str = "fp32"
    checkpointing: bool = False
    ema: float = 0.0
    average_last: int = 1
    val_every: int = 500
    save_every: int = 500
    log_every: int = 50
    keep_last: int = 3
    patience: int = 0
    val_examples: int = 200
    samples: int = 3
    best_by: str = "auto"
    init_from: str | None = None
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        for f in fields(self):
            setattr(self, f.name, _typed(f.name, getattr(self, f.name), str(f.type)))
        for name, allowed in (
            ("model", MODELS),
            ("task", (None, "numbers")),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("batching", BATCHINGS),
            ("best_by", BEST_BY),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"expected {name} out of {allowed}, got {value!r}{suggestion(value, allowed)}")
        for names, least in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
            for name in names.split():
                if getattr(self, name) < least:
                    raise ValueError(f"expected {name} of at least {least}, got {getattr(self, name)}")
        for name in ("label_smoothing", "ema", "beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"expected {name} in [0, 1), got {getattr(self, name)}")
        if self.model == "lstm" and self.batching == "packed":
            raise ValueError(
                "expected batching bucketed or random for the LSTM, which reads padded batches, got packed"
            )
        if self.average_last > 1 and not self.save_every:
            raise ValueError(f"expected save_every above 0, for average_last {self.average_last} needs checkpoints")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """A config from plain values, as a YAML file holds them.

        Raises:
            ValueError: an unknown key (the nearest one is suggested) or a value that is not allowed.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"unknown setting {key!r}{suggestion(key, known)}")
        if values.get("epochs") and "steps" in values:
            raise ValueError(f"expected steps or epochs, got both: {values['steps']!r} and {values['epochs']!r}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return asdict(self)


def descriptions() -> dict[str, str]:
    """What each setting means, from the docstring of TrainConfig."""
    found: dict[str, str] = {}
    text = inspect.cleandoc(TrainConfig.__doc__ or "")
    for names, meaning in re.findall(r"^    ([a-z0-9_, ]+): (.*)$", text, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), meaning)
    return found


def _typed(name: str, value: Any, kind: str) -> Any:
    """The value as its field's type. YAML reads 2e-3 (no point) as text, and a person means the number.

    Raises:
        ValueError: it is nothing of the kind.
    """
    kind = kind.partition("[")[0]
    if kind == "dict" and isinstance(value, dict):
        return {key: _plain_number(entry) for key, entry in value.items()}
    if kind == "str | None" and (value is None or isinstance(value, str)):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    number = _plain_number(value)
    if kind == "float" and isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
        return float(number)
    if kind == "int" and isinstance(number, int) and not isinstance(number, bool):
        return number
    expected = {
        "dict": "a mapping such as {d_model: 256}",
        "bool": "true or false",
        "float": "a number",
        "int": "an integer",
    }
    raise ValueError(f"expected {name} to be {expected.get(kind, 'text')}, got {value!r}")


def _plain_number(value: Any) -> Any:
    """The number that a text such as "2e-3" spells, whole ones as int; anything else as it is."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def suggestion(word: str, known: Any) -> str:
    """ "; did you mean 'x'?" for the nearest known word, or nothing."""
    near = difflib.get_close_matches(str(word), [name for name in known if name], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
