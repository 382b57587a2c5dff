"""Every setting of a training run, with its default. The same names are flags and keys of the YAML file.

To add a setting, add a field to the section where a reader would look for it, and its line to the docstring: the flag,
its help, the check of its type and bounds and the key of the YAML file follow from these two.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, get_type_hints

from fastformer.baseline.lstm import LSTMConfig
from fastformer.data.bpe import MAX_TOKEN_LENGTH, Normalization, Spaces
from fastformer.data.filters import PairFilter
from fastformer.data.user_tokens import UserTokens
from fastformer.models import GPT, GPTConfig, Transformer, TransformerConfig
from fastformer.models.pretrained import config_from_dict
from fastformer.settings import (
    Amount,
    BleuTokenize,
    Count,
    Positive,
    Probability,
    Range,
    Seed,
    check_settings,
    suggestion,
    why_not,
)
from fastformer.special_ids import SpecialIds

Architecture = Literal["transformer", "gpt", "lstm"]
# The settings of each architecture, and its presets.
ARCHITECTURES: dict[Architecture, tuple[type[Any], dict[str, dict[str, Any]]]] = {
    "transformer": (TransformerConfig, Transformer.presets),
    "gpt": (GPTConfig, GPT.presets),
    "lstm": (LSTMConfig, {"tiny": {}}),
}
# The settings of a model that its tokenizer decides on. The LSTM has its special ids as fields of its own.
SPECIAL_IDS = {"special_ids", *(f.name for f in fields(SpecialIds))}
OF_TOKENIZER = {"vocab_size", "source_vocab_size", *SPECIAL_IDS}

# What suits a built-in task, in place of the defaults; what a person gives goes before both.
TASKS: dict[str, dict[str, Any]] = {
    # Exact match 0.99 on numbers of up to nine digits, within a minute on two cores. Every answer is a function of its
    # source, so there is nothing to regularise.
    "numbers": {
        "vocab_size": 200,
        "max_len": 64,
        "batching": "bucketed",
        "max_tokens": 2048,
        "steps": 900,
        "lr": 3e-3,
        "warmup": 100,
        "log_every": 100,
        "model": {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    },
}


@dataclass
class Model:
    """The model.

    Attributes:
        model: the architecture: "transformer", "gpt" or "lstm" (the classic baseline).
        preset: which sizes it begins from: "tiny", "base", "base-paper" or "big" for a transformer, "tiny", "small",
            "gpt2" or "llama-small" for a gpt.
        settings: what is set over the preset.
    """

    model: Architecture = "transformer"
    preset: str = "tiny"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Data:
    """The data: `task`, or train_source with train_target, or train_tsv, or (for a gpt) train_text.

    Several corpora are named with commas between them, or as a list in YAML: `--train_tsv news.tsv,talks.tsv`.

    Attributes:
        task: "numbers", the built-in task, with settings that suit it unless others are given; leave it out to train
            on files.
        train_source: a UTF-8 file, one sentence a line, aligned line by line with train_target.
        train_target: its translations.
        val_source: likewise for validation; without it a hundredth of each corpus is held out, at most 500 lines.
        val_target: the translations of val_source.
        train_tsv: a file of source<TAB>target lines instead.
        val_tsv: likewise for validation.
        train_text: plain text, for a gpt: a file, or a folder of *.txt files, each of which is a document.
        val_text: likewise for validation; without it the last tenth of each corpus is held out.
        held_out: which pairs are held out where no validation data are given: "random" ones, which the seed and the
            number of lines decide on, or the "last" ones of each corpus.
        data_weights: how often an epoch has each example of a corpus, one number for each, such as 2,0.5; a fraction
            draws other examples in each epoch. Left out: once.
        skip_bad_lines: leave out lines that are empty, too long or no UTF-8, and count them, instead of stopping.
        seqlen: window of a language model.
        max_len: longer examples are left out, and counted.
    """

    task: Literal["numbers"] | None = None
    train_source: str | None = None
    train_target: str | None = None
    val_source: str | None = None
    val_target: str | None = None
    train_tsv: str | None = None
    val_tsv: str | None = None
    train_text: str | None = None
    val_text: str | None = None
    held_out: Literal["random", "last"] = "random"
    data_weights: str | None = None
    skip_bad_lines: bool = False
    seqlen: Positive = 128
    max_len: Positive = 256


@dataclass
class Filters:
    """Filters of training pairs; the log counts what they leave out by reason. Lengths are in characters.

    Attributes:
        max_length_ratio: the longer side of a pair has at most so many times the length of the shorter one; 0 = any.
        min_chars: the least length of a side; 0 = any.
        max_chars: the greatest length of a side; 0 = any.
        drop_duplicates: leave out a pair that came before, in any corpus.
        drop_identical: leave out a pair whose sides are the same.
    """

    max_length_ratio: Amount = 0.0
    min_chars: Count = 0
    max_chars: Count = 0
    drop_duplicates: bool = False
    drop_identical: bool = False


@dataclass
class Tokens:
    """The tokenizer. It is saved with the model, so that text is read in the same way when the model is used.

    Attributes:
        tokenizer: "bpe" (trained on the training text), "bytes", or the path of a tokenizer: a tokenizer.json, a
            SentencePiece .model, a folder with one of them, a run.
        vocab_size: of a BPE, both languages together; 256 bytes, which spell what no token does, come on top.
        shared_vocab: one vocabulary and one table of embeddings for source and target; false: each side has its own
            (of vocab_size each, or with tokenizer the paths of two, source first, with a comma between them).
        normalization: the form that a BPE brings text to: "nfkc" (Unicode's, which also changes how a text looks: "10²"
            becomes "102", "½" becomes "1⁄2", a no-break space becomes a space), "nfc" (which doesn't), or "none"; with
            "_lower", or as "lower" alone, in lower case. Translations come in that form, too.
        spaces: "collapse": a BPE takes runs of spaces for one and drops those at the ends, in training and use; "keep":
            spaces are text; "auto": collapse for translators, keep for a gpt.
        max_token_length: the most characters of a BPE's token, its space included.
        user_tokens: tokens that you define, with commas between them, such as <2de>,<2fr>: a text that spells one is
            neither split nor normalised there.
        drop_user_tokens: leave them out of what the model writes, as special tokens are.
    """

    tokenizer: str = "bpe"
    vocab_size: Positive = 8000
    shared_vocab: bool = True
    normalization: Normalization = "nfkc"
    spaces: Literal["auto"] | Spaces = "auto"
    max_token_length: Annotated[int, Range(2)] = MAX_TOKEN_LENGTH
    user_tokens: str | None = None
    drop_user_tokens: bool = False


@dataclass
class Optimisation:
    """Batches and optimisation.

    Attributes:
        batching: "packed" (no padding), "bucketed" or "random" (padded).
        max_tokens: of a batch, on the longer side.
        accumulate: batches per update; gradients are weighted by tokens.
        steps: updates.
        epochs: passes over the training data instead of a number of updates; 0 = as steps says.
        max_minutes: ends the training earlier; 0 = no limit.
        schedule: "noam" (the paper), "t2t" (tensor2tensor), "linear", "cosine", "constant"; all with warmup.
        lr: the peak; for noam and t2t the factor in front of the formula (the paper 1, tensor2tensor 2).
        warmup: updates until the peak.
        beta1: decay of AdamW's mean of gradients.
        beta2: decay of AdamW's mean of squared gradients.
        eps: added to AdamW's denominator.
        weight_decay: of AdamW.
        clip: the largest gradient norm; 0 = off.
        label_smoothing: in training; validation reports the plain NLL.
        smooth_others: spread it over the other classes, as tensor2tensor does.
        init_from: a run folder whose model and tokenizer the training begins with (fine-tuning): its best model, or its
            average, with a new optimizer, rates from the beginning, and no update done.
    """

    batching: Literal["packed", "bucketed", "random"] = "packed"
    max_tokens: Positive = 4096
    accumulate: Positive = 1
    steps: Positive = 1000
    epochs: Amount = 0.0
    max_minutes: Amount = 0.0
    schedule: Literal["noam", "t2t", "linear", "cosine", "constant"] = "linear"
    lr: Amount = 2e-3
    warmup: Count = 200
    beta1: Probability = 0.9
    beta2: Probability = 0.98
    eps: Amount = 1e-9
    weight_decay: Amount = 0.0
    clip: Amount = 1.0
    label_smoothing: Probability = 0.0
    smooth_others: bool = False
    init_from: str | None = None


@dataclass
class Validation:
    """Validating and saving.

    Attributes:
        ema: decay of a running average of the weights, which validation and the result then use; 0 = off.
        average_last: the result averages the weights of the last checkpoints; 1 = off.
        val_every: updates between validations; 0 = at the end only.
        save_every: updates between checkpoints; 0 = at the end only.
        log_every: updates between lines of the log.
        keep_last: checkpoints that stay, besides the best model.
        patience: stop after so many validations without a better one; 0 = never.
        val_examples: decoded for exact match and BLEU; 0 = none.
        bleu_tokenize: how BLEU cuts text into words: "13a", for languages with spaces; "zh", "ja-mecab", "ko-mecab",
            "char" or "flores200" for others. "flores101", "flores200" and "spBLEU-1K" need their model in sacreBLEU's
            folder.
        samples: translations in the log.
        best_by: what "the best model" means: "nll", "bleu", "chrf", "exact_match", or "auto", which fits the task.
    """

    ema: Probability = 0.0
    average_last: Positive = 1
    val_every: Count = 500
    save_every: Count = 500
    log_every: Positive = 50
    keep_last: Positive = 3
    patience: Count = 0
    val_examples: Count = 200
    bleu_tokenize: BleuTokenize = "13a"
    samples: Count = 3
    best_by: Literal["auto", "nll", "bleu", "chrf", "exact_match"] = "auto"


@dataclass
class Machine:
    """The machine.

    Attributes:
        precision: "fp32", or autocast in "bf16" or "fp16".
        checkpointing: recompute the layers in backward instead of keeping what is inside.
        cuda_graphs: launch an update at once, as a CUDA graph, instead of by thousands of calls, which a GPU waits for
            when models or batches are small. Packed batches are rounded up to a few sizes, by at most a sixteenth.
        seed: of the weights, the data order and dropout.
        device: "auto", "cpu", "cuda".
    """

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpointing: bool = False
    cuda_graphs: bool = False
    seed: Seed = 0
    device: str = "auto"


# The settings that name data, by kind, and what validates which.
SOURCES = {
    "task": ("task",),
    "pairs": ("train_source", "train_target", "val_source", "val_target"),
    "tsv": ("train_tsv", "val_tsv"),
    "text": ("train_text", "val_text"),
}
VALIDATED_BY = {
    "train_source": "val_source and val_target",
    "train_tsv": "val_tsv",
    "train_text": "val_text",
}

# The settings that take several values, with commas between them.
SEVERAL = {
    *(name for kind, names in SOURCES.items() if kind != "task" for name in names),
    "data_weights",
    "user_tokens",
}

WORDS = ("bpe", "bytes")  # what the tokenizer may be, besides paths
_LEAST_WEIGHT = 0.001

# In the order in which `fastformer train --help` shows them.
SECTIONS = (Model, Data, Filters, Tokens, Optimisation, Validation, Machine)


@dataclass
class TrainConfig(Machine, Validation, Optimisation, Tokens, Filters, Data, Model):
    """The settings of `fastformer train`: those of all sections, as one flat list of keywords."""

    def __post_init__(self) -> None:
        check_settings(self)
        for name in (*(name for names in SOURCES.values() for name in names), "tokenizer", "init_from"):
            if getattr(self, name) == "":
                raise ValueError(f"expected {name} to name a file, got an empty text")
        self._check_sources()
        UserTokens(split_at_commas(self.user_tokens))
        if self.model == "gpt" and self.spaces == "collapse":
            raise ValueError("expected spaces keep or auto for a gpt, which learns spaces and line ends, got collapse")
        for name in sorted(OF_TOKENIZER & self.settings.keys()):
            raise ValueError(f"expected no {name} among the model's settings: the tokenizer decides on it")
        if self.init_from is None:  # else the run that it names decides
            size = max(self.vocab_size, 2)
            self.model_config(vocab_size=size, source_vocab_size=None if self.shared_vocab else size)
            bound, longest = ("seqlen", self.seqlen) if self.model == "gpt" else ("max_len", self.max_len)
            positions = self.settings.get("max_len", longest)
            if positions < longest:
                raise ValueError(f"expected model.max_len of at least {bound}, which is {longest}, got {positions}")
        if self.model == "lstm" and self.batching == "packed":
            raise ValueError(
                "expected batching bucketed or random for the LSTM, which reads padded batches, got packed"
            )
        if self.cuda_graphs:
            for name, fits in (("batching", ("packed",)), ("precision", ("fp32", "bf16")), ("checkpointing", (False,))):
                if getattr(self, name) not in fits:
                    expected = " or ".join(str(value) for value in fits)
                    raise ValueError(f"expected {name} {expected} for cuda_graphs, got {getattr(self, name)}")
        if self.average_last > 1 and not self.save_every:
            raise ValueError(f"expected save_every above 0, for average_last {self.average_last} needs checkpoints")

    def _check_sources(self) -> None:
        """Holds the named data against each other and the model: what is given is used, or the settings are wrong."""
        for pair in (("train_source", "train_target"), ("val_source", "val_target")):
            alone = [name for name in pair if getattr(self, name)]
            if len(alone) == 1:
                raise ValueError(f"expected {pair[0]} and {pair[1]} together, got {alone[0]} alone")
        given = {kind: [name for name in names if getattr(self, name)] for kind, names in SOURCES.items()}
        trained = [names[0] for names in given.values() if names and not names[0].startswith("val_")]
        if len(trained) > 1:
            raise ValueError(f"expected one kind of training data, got {trained[0]} and {trained[1]}: leave one out")
        for kind, names in given.items():
            if names and names[0].startswith("val_") and trained:
                expected = VALIDATED_BY.get(trained[0], "none")
                raise ValueError(
                    f"expected validation data as {trained[0]} has it ({expected}), got {names[0]}: leave it out"
                )
            if names and self.init_from is None and (kind == "text") != (self.model == "gpt"):
                hint = "; did you mean --model gpt?" if kind == "text" else ""
                wanted = "train_text" if self.model == "gpt" else "pairs of texts"
                raise ValueError(f"expected {wanted} for model {self.model}, got {names[0]}{hint}")

        counts = {name: len(paths_of(getattr(self, name))) for names in given.values() for name in names}
        for one, other in (("train_source", "train_target"), ("val_source", "val_target")):
            if counts.get(one) != counts.get(other):
                raise ValueError(f"expected as many files as {one} in {other}, got {counts[one]} and {counts[other]}")
        corpora = max((counts[name] for name in trained), default=1)
        if self.data_weights is not None and len(self.weights()) != corpora:
            raise ValueError(f"expected data_weights for {corpora} corpora, got {self.data_weights!r}")

    def data_flags(self) -> str:
        """The flags that name the data, with their values: "--train_tsv a.tsv, --val_tsv b.tsv"."""
        names = [name for names in SOURCES.values() for name in names if getattr(self, name)]
        return ", ".join(f"--{name} {getattr(self, name)}" for name in names)

    def weights(self) -> list[float]:
        """How often an epoch has each example, for each corpus; empty: once.

        Raises:
            ValueError: no numbers, or some that make no sense.
        """
        try:
            found = [float(word) for word in split_at_commas(self.data_weights)]
        except ValueError:
            found = [math.nan]
        if not all(_LEAST_WEIGHT <= weight <= 1 / _LEAST_WEIGHT for weight in found):
            raise ValueError(
                f"expected data_weights from {_LEAST_WEIGHT} to {1 / _LEAST_WEIGHT:g}, one for each corpus with commas "
                f"between them, got {self.data_weights!r}"
            )
        return found

    def pair_filter(self) -> PairFilter:
        """What training pairs have to be."""
        return PairFilter(**{f.name: getattr(self, f.name) for f in fields(PairFilter)})

    def model_config(
        self,
        vocab_size: int,
        max_len: int | None = None,
        special_ids: SpecialIds = SpecialIds(),
        source_vocab_size: int | None = None,
    ) -> Any:
        """The settings of the model: the preset's, and over them those that were given.

        Args:
            vocab_size: of the tokenizer.
            max_len: the longest sequence, unless the settings say otherwise.
            special_ids: of the tokenizer.
            source_vocab_size: of a tokenizer with a vocabulary for each side; None: it has one for both.

        Raises:
            ValueError: an unknown preset or setting (the nearest one is suggested), or one that is not allowed.
        """
        config_class, presets = ARCHITECTURES[self.model]
        if self.preset not in presets:
            hint = suggestion(self.preset, presets)
            raise ValueError(f"expected a preset of {self.model} out of {sorted(presets)}, got {self.preset!r}{hint}")
        longest = {} if max_len is None else {"max_len": max_len}
        sides: dict[str, Any] = {}
        if source_vocab_size is not None:
            if self.model != "transformer":
                raise ValueError(f"expected model transformer for two vocabularies (shared_vocab), got {self.model}")
            if self.settings.get("tie_embeddings"):
                raise ValueError("expected model.tie_embeddings false for two vocabularies (shared_vocab), got true")
            sides = {"source_vocab_size": source_vocab_size, "tie_embeddings": False}
        of_tokenizer = {"vocab_size": vocab_size, "special_ids": special_ids, **asdict(special_ids), **sides}
        own = {f.name for f in fields(config_class)}
        of_tokenizer = {name: value for name, value in of_tokenizer.items() if name in own}
        values = {**presets[self.preset], **longest, **self.settings, **of_tokenizer}
        return config_from_dict(config_class, values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """A config from plain values, as a YAML file holds them; the model may be a mapping or its name alone.

        A built-in task brings what `TASKS` has for it, where nothing else is given.

        Raises:
            ValueError: an unknown key (the nearest one is suggested) or a value that is not allowed.
        """
        if not isinstance(values, dict):
            raise ValueError(f"expected settings as a mapping of names to values, got {type(values).__name__}")
        nested = whole_numbers(_nested(values))
        check_names(nested)
        if values.get("epochs") and "steps" in values:
            raise ValueError(f"expected steps or epochs, got both: {values['steps']!r} and {values['epochs']!r}")
        nested = _suited(nested)
        settings = nested.pop("model", {})
        flat = {name: settings.pop(key) for key, name in (("name", "model"), ("preset", "preset")) if key in settings}
        return cls(**nested, **flat, settings=settings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON: what `from_dict` reads."""
        values = asdict(self)
        model = {"name": values.pop("model"), "preset": values.pop("preset"), **values.pop("settings")}
        return {"model": model, **values}


def split_at_commas(text: str | None) -> list[str]:
    """The values of a setting that takes several; none for None."""
    return [] if text is None else [value.strip() for value in text.split(",")]


def paths_of(text: str) -> list[str]:
    """The paths of a setting that takes several; one that exists as a whole may have a comma in its name."""
    return [text] if os.path.exists(text) else split_at_commas(text)


def _suited(nested: dict[str, Any]) -> dict[str, Any]:
    """The values, and behind them what suits their task."""
    task = nested.get("task")
    suits = dict(TASKS.get(task, {})) if isinstance(task, str) else {}
    model = nested.get("model", {})
    of_model = suits.pop("model", {}) if model.get("name", Model.model) == Model.model else {}
    if nested.get("epochs"):
        suits.pop("steps", None)
    if nested.get("init_from"):  # sizes, tokenizer and rates of dropout come from that run
        suits.pop("vocab_size", None)
        of_model = {}
    return {**suits, **nested, "model": {**of_model, **model}}


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values with the changes over them, within the mapping of the model too.

    A change takes away what it contradicts: epochs the steps, data of one kind those of another.
    """
    before, after = _nested(values), _nested(changes)
    rivals = _rivals(after)
    before = {name: value for name, value in before.items() if name not in rivals}
    model = {**before.get("model", {}), **after.get("model", {})}
    return {**before, **after, **({"model": model} if model else {})}


def _rivals(changes: dict[str, Any]) -> set[str]:
    """The settings that contradict changes which are made."""
    rivals: set[str] = set()
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if changes.get(one) and other not in changes:
            rivals.add(other)
    trained = {kind for kind, names in SOURCES.items() for name in names if changes.get(name) and name[:4] != "val_"}
    if trained:
        rivals |= {name for kind, names in SOURCES.items() if kind not in trained for name in names}
    return rivals - {name for name, value in changes.items() if value}


def unused(config: TrainConfig, given: Iterable[str]) -> list[str]:
    """What was asked for and changes nothing, each with the reason.

    Args:
        config: the settings of the training.
        given: the names of those that a person gave.
    """
    gpt, trained_bpe = config.model == "gpt", config.tokenizer == "bpe" and config.init_from is None
    of_bytes = config.tokenizer == "bytes" and config.init_from is None
    reasons = {
        "seqlen": "" if gpt else "it is the window of a gpt; max_len bounds the examples of a translator",
        "max_len": "it bounds the examples of a translator; seqlen is the window of a gpt" if gpt else "",
        "vocab_size": "" if trained_bpe else "only a BPE that this run trains has a size to choose",
        "val_examples": "only translations are compared with references" if gpt else "",
        "samples": "nothing is translated in validation" if gpt or not config.val_examples else "",
        "bleu_tokenize": "nothing is translated in validation" if gpt or not config.val_examples else "",
        "smooth_others": "" if config.label_smoothing else "label_smoothing is 0",
        "patience": "" if config.val_every else "val_every is 0, so that nothing is validated before the end",
        "skip_bad_lines": "the built-in task has none" if config.task else "",
        "held_out": _why_nothing_is_drawn(config),
        "user_tokens": "" if trained_bpe or of_bytes else "only a BPE that this run trains, and bytes, take them",
        "drop_user_tokens": "" if config.user_tokens else "there are no user_tokens",
        **dict.fromkeys(
            ("normalization", "spaces", "max_token_length"),
            "" if trained_bpe else "only a BPE that this run trains takes it",
        ),
        **dict.fromkeys(
            (f.name for f in fields(Filters)),
            "only training pairs from files are filtered" if config.task or gpt else "",
        ),
        "data_weights": "the built-in task is one corpus" if config.task else "",
    }
    return [f"{name} is not used: {reasons[name]}" for name in given if reasons.get(name) and getattr(config, name)]


def _why_nothing_is_drawn(config: TrainConfig) -> str:
    if config.model == "gpt":
        return "the last tenth of a text is held out"
    if config.task:
        return "the built-in task has numbers of its own for validation"
    return "there are validation data" if config.val_source or config.val_tsv else ""


def check_names(values: dict[str, Any]) -> None:
    """Holds the names of settings against those that exist.

    Raises:
        ValueError: an unknown one; the nearest one is suggested.
    """
    nested = _nested(values)
    known = [f.name for f in fields(TrainConfig) if f.name not in ("preset", "settings")]
    of_models = {f.name for config_class, _ in ARCHITECTURES.values() for f in fields(config_class)}
    for key in nested:
        if key in of_models - SPECIAL_IDS - set(known):
            raise ValueError(f"unknown setting {key!r}: it belongs to the model; did you mean `model: {{{key}: ...}}`?")
        if key not in known:
            raise ValueError(f"unknown setting {key!r}{suggestion(key, [*known, 'preset'])}")
    for key in nested.get("model", {}):
        if key not in of_models | {"name", "preset"}:
            hint = suggestion(key, [*sorted(of_models), "name", "preset"])
            raise ValueError(f"unknown setting {key!r} of the model{hint}")


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """`model: gpt` and `preset: tiny` as `model: {name: gpt, preset: tiny}`."""
    rest = {key: _joined(key, value) for key, value in values.items() if key not in ("model", "preset")}
    model = values.get("model", {})
    model = dict(model) if isinstance(model, dict) else {"name": model}
    if "preset" in values:
        model["preset"] = values["preset"]
    return {"model": model, **rest} if model else rest


def whole_numbers(nested: dict[str, Any]) -> dict[str, Any]:
    """The values, with 1e3 as an integer where an integer is asked for: YAML reads it as a number with a fraction."""
    model = nested.get("model")
    kinds = [get_type_hints(TrainConfig, include_extras=True)]
    if isinstance(model, dict):
        of_models = [get_type_hints(config_class, include_extras=True) for config_class, _ in ARCHITECTURES.values()]
        nested = {**nested, "model": {name: _as_integer(value, name, of_models) for name, value in model.items()}}
    return {name: _as_integer(value, name, kinds) for name, value in nested.items()}


def _as_integer(value: Any, name: str, kinds: list[dict[str, Any]]) -> Any:
    if isinstance(value, float) and value.is_integer():
        hints = [hints[name] for hints in kinds if name in hints]
        if any(why_not(int(value), hint) is None and why_not(value, hint) is not None for hint in hints):
            return int(value)
    return value


def _joined(key: str, value: Any) -> Any:
    """A list, or a number for one corpus, as YAML may have it, as the text with commas that a flag has.

    Raises:
        ValueError: a value that has a comma itself.
    """
    if key == "data_weights" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if key not in SEVERAL or not isinstance(value, list):
        return value
    words = [str(word) for word in value]
    if len(words) > 1 and any("," in word for word in words):
        raise ValueError(f"expected {key} to be values without commas, got {value!r}")
    return ",".join(words)
