"""Every setting of a training run, with its default. The same names are flags and keys of the YAML file."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MODELS = ("transformer", "gpt", "lstm")
SCHEDULES = ("noam", "t2t", "linear", "cosine", "constant")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass
class TrainConfig:
    """Settings of `fastformer train`. Data: `task`, or train_source with train_target, or train_tsv, or train_text.

    Attributes:
        model: "transformer", "gpt" or "lstm" (the classic baseline).
        preset: of the model's sizes: "tiny", "base", "base-paper", "big" (transformer).
        settings: fields of the model's config, over the preset's: {"d_model": 256, "dropout": 0.2}.
        task: "numbers", the built-in task; leave it out to train on files.
        train_source, train_target: two UTF-8 files aligned line by line; val_source, val_target likewise.
        train_tsv, val_tsv: source<TAB>target lines.
        train_text, val_text: plain text, for "gpt"; without val_text the last tenth is held out.
        tokenizer: "bpe" (trained on the training text), "bytes", or the path of a tokenizer.json.
        vocab_size: of a BPE, both languages together.
        seqlen: window of a language model.
        max_len: longer examples are left out, and counted.
        batching: "packed" (no padding), "bucketed" or "random" (padded).
        max_tokens: of a batch, on the longer side.
        accumulate: batches per update; gradients are weighted by tokens.
        steps: updates; max_minutes ends earlier.
        schedule: "noam" (the paper), "t2t" (tensor2tensor), "linear", "cosine", "constant"; all with warmup.
        lr: the peak; for noam and t2t the factor in front of the formula.
        beta1, beta2, eps, weight_decay: of AdamW.
        clip: the largest gradient norm; 0 = off.
        label_smoothing: in training; validation reports the plain NLL.
        smooth_others: spread it over the other classes, as tensor2tensor does.
        precision: "fp32", or autocast in "bf16" or "fp16".
        checkpointing: recompute the layers in backward instead of keeping what is inside.
        ema: decay of an average of the weights that validation and the result use; 0 = off.
        average_last: the result averages the weights of the last checkpoints; 1 = off.
        val_every, save_every, log_every: in updates; 0 = at the end only.
        keep_last: checkpoints that stay, besides the best.
        patience: stop after so many validations without a better one; 0 = never.
        val_examples: decoded for exact match and BLEU; 0 = none.
        samples: translations in the log.
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
    val_every: int = 0
    save_every: int = 0
    log_every: int = 50
    keep_last: int = 3
    patience: int = 0
    val_examples: int = 200
    samples: int = 3
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("model", self.model, MODELS),
            ("schedule", self.schedule, SCHEDULES),
            ("precision", self.precision, PRECISIONS),
            ("batching", self.batching, ("random", "bucketed", "packed")),
        ):
            if value not in allowed:
                raise ValueError(f"expected {name} out of {allowed}, got {value!r}{suggestion(value, allowed)}")
        for name in (
            "steps",
            "accumulate",
            "max_tokens",
            "max_len",
            "seqlen",
            "keep_last",
            "average_last",
            "log_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"expected label_smoothing in [0, 1), got {self.label_smoothing}")
        if not 0.0 <= self.ema < 1.0:
            raise ValueError(f"expected ema in [0, 1), got {self.ema}")
        if self.task not in (None, "numbers"):
            raise ValueError(f'expected task "numbers" or none, got {self.task!r}')

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
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return asdict(self)


def suggestion(word: str, known: Any) -> str:
    """ "; did you mean 'x'?" for the nearest known word, or nothing."""
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
