"""The settings of a training run in one class; `training.sections` defines them. Their names are also the flags and the
keys of the YAML file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from fastformer.data.backend import UserTokens
from fastformer.data.filters import Filters, PairFilter
from fastformer.data.tables import paths_of as paths_of
from fastformer.models.pretrained import config_from_dict
from fastformer.settings import LEAST_WEIGHT, check_settings, suggestion, why_not
from fastformer.special_ids import SpecialIds
from fastformer.training.sections import (
    ARCHITECTURES,
    OF_TOKENIZER,
    SEVERAL,
    SOURCES,
    SPECIAL_IDS,
    TASKS,
    VALIDATED_BY,
    Data,
    Machine,
    Model,
    Optimisation,
    Tokens,
    Validation,
)


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
        if self.init_from is None:  # with init_from, the run that it names decides
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
        if self.cuda_graphs is True and (reason := why_no_graphs(self)) is not None:
            raise ValueError(reason)
        if self.average_last > 1 and not self.save_every:
            raise ValueError(f"expected save_every above 0, for average_last {self.average_last} needs checkpoints")

    def _check_sources(self) -> None:
        """Checks the settings of data against each other and the model; those that the run doesn't use are errors."""
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
            if names and kind != "shards" and self.init_from is None and (kind == "text") != (self.model == "gpt"):
                hint = "; did you mean --model gpt?" if kind == "text" else ""
                wanted = "train_text" if self.model == "gpt" else "pairs of texts"
                raise ValueError(f"expected {wanted} for model {self.model}, got {names[0]}{hint}")

        counts = {name: len(paths_of(getattr(self, name))) for names in given.values() for name in names}
        for one, other in (("train_source", "train_target"), ("val_source", "val_target")):
            if counts.get(one) != counts.get(other):
                raise ValueError(f"expected as many files as {one} in {other}, got {counts[one]} and {counts[other]}")
        corpora = max((counts[name] for name in trained), default=1)
        # The number of the shards' sources is only known when they are opened.
        if self.data_weights is not None and len(self.weights()) != corpora and not self.train_data:
            raise ValueError(f"expected data_weights for {corpora} corpora, got {self.data_weights!r}")

    def data_flags(self) -> str:
        """Lists the flags that name the data, with their values: "--train_tsv a.tsv, --val_tsv b.tsv"."""
        names = [name for names in SOURCES.values() for name in names if getattr(self, name)]
        return ", ".join(f"--{name} {getattr(self, name)}" for name in names)

    def weights(self) -> list[float]:
        """Returns how often an epoch contains each example of a corpus, one number per corpus; empty: once.

        Raises:
            ValueError: weights that are not numbers or not in the allowed range.
        """
        try:
            weights = [float(word) for word in split_at_commas(self.data_weights)]
        except ValueError:
            weights = [math.nan]
        if not all(LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT for weight in weights):
            raise ValueError(
                f"expected data_weights from {LEAST_WEIGHT} to {1 / LEAST_WEIGHT:g}, one for each corpus with commas "
                f"between them, got {self.data_weights!r}"
            )
        return weights

    def pair_filter(self) -> PairFilter:
        """Makes the filter of training pairs."""
        return PairFilter(**{f.name: getattr(self, f.name) for f in fields(PairFilter)})

    def model_config(
        self,
        vocab_size: int,
        max_len: int | None = None,
        special_ids: SpecialIds = SpecialIds(),
        source_vocab_size: int | None = None,
    ) -> Any:
        """Returns the settings of the model: the preset's, overridden by those that were given.

        Args:
            vocab_size: the size of the tokenizer's vocabulary.
            max_len: the longest sequence, unless the settings say otherwise.
            special_ids: the special ids of the tokenizer.
            source_vocab_size: the size of a separate source vocabulary; None: both sides share one.

        Raises:
            ValueError: an unknown preset or setting (the nearest one is suggested), or one that is not allowed.
        """
        config_class, presets = ARCHITECTURES[self.model]
        if self.preset not in presets:
            hint = suggestion(self.preset, presets)
            raise ValueError(f"expected a preset of {self.model} in {sorted(presets)}, got {self.preset!r}{hint}")
        longest = {} if max_len is None else {"max_len": max_len}
        sides: dict[str, Any] = {}
        if source_vocab_size is not None:
            if self.model != "transformer":
                raise ValueError(f"expected model transformer for two vocabularies (shared_vocab), got {self.model}")
            if self.settings.get("tie_embeddings"):
                raise ValueError("expected model.tie_embeddings false for two vocabularies (shared_vocab), got true")
            sides = {"source_vocab_size": source_vocab_size, "tie_embeddings": False}
        of_tokenizer = {"vocab_size": vocab_size, "special_ids": special_ids, **asdict(special_ids), **sides}
        known = {f.name for f in fields(config_class)}
        of_tokenizer = {name: value for name, value in of_tokenizer.items() if name in known}
        values = {**presets[self.preset], **longest, **self.settings, **of_tokenizer}
        return config_from_dict(config_class, values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Builds a config from plain values, as a YAML file holds them; the model may be a mapping or only a name.

        A built-in task sets the values in `TASKS` for the settings that are not given.

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
        return cls(**nested, **flat, settings=plain_values(settings))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for YAML and JSON, which `from_dict` reads."""
        values = asdict(self)
        model = {"name": values.pop("model"), "preset": values.pop("preset"), **values.pop("settings")}
        return {"model": model, **values}


def plain_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's settings with lists for tuples, as YAML and JSON give them back, also within mappings."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return plain_values(value)  # YAML writes no subclasses of dict
        return [*value] if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in settings.items()}


def split_at_commas(text: str | None) -> list[str]:
    """Splits the value of a setting that takes several values; None has no values."""
    return [] if text is None else [value.strip() for value in text.split(",")]


def _suited(nested: dict[str, Any]) -> dict[str, Any]:
    """Returns the values, with the task's own values as defaults."""
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
    """Returns the values overridden by the changes, also within the mapping of the model.

    A change removes the settings that it contradicts: epochs removes steps, and data of one kind those of another kind.
    """
    before, after = _nested(values), _nested(changes)
    rivals = _rivals(after)
    before = {name: value for name, value in before.items() if name not in rivals}
    model = {**before.get("model", {}), **after.get("model", {})}
    return {**before, **after, **({"model": model} if model else {})}


def _rivals(changes: dict[str, Any]) -> set[str]:
    """Returns the names of the settings that contradict the changes."""
    rivals: set[str] = set()
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if changes.get(one) and other not in changes:
            rivals.add(other)
    trained = {kind for kind, names in SOURCES.items() for name in names if changes.get(name) and name[:4] != "val_"}
    if trained:
        rivals |= {name for kind, names in SOURCES.items() if kind not in trained for name in names}
    return rivals - {name for name, value in changes.items() if value}


def unused(config: TrainConfig, given: Iterable[str]) -> list[str]:
    """Lists the given settings that have no effect, each with the reason.

    Args:
        config: the settings of the training.
        given: the names of the settings that the user gave.
    """
    gpt, trained_bpe = config.model == "gpt", config.tokenizer == "bpe" and config.init_from is None
    of_shards = "the shards were prepared without it; give it to fastformer prepare" if config.train_data else ""
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
        "shards_at_once": "" if config.train_data else "there is no train_data",
    }
    if of_shards:
        reasons |= dict.fromkeys(
            ("skip_bad_lines", "held_out", *(f.name for f in fields(Filters)), *(f.name for f in fields(Tokens))),
            of_shards,
        )
        reasons["tokenizer"] = ""  # it is compared with that of the shards
    return [f"{name} is not used: {reasons[name]}" for name in given if reasons.get(name) and getattr(config, name)]


def _why_nothing_is_drawn(config: TrainConfig) -> str:
    if config.model == "gpt":
        return "the last tenth of a text is held out"
    if config.task:
        return "the built-in task has numbers of its own for validation"
    return "there are validation data" if config.val_source or config.val_tsv else ""


def check_names(values: dict[str, Any]) -> None:
    """Checks that settings of the given names exist.

    Raises:
        ValueError: an unknown name; the message suggests the nearest one.
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
    """Turns `model: gpt` and `preset: tiny` into `model: {name: gpt, preset: tiny}`."""
    rest = {key: _joined(key, value) for key, value in values.items() if key not in ("model", "preset")}
    model = values.get("model", {})
    model = dict(model) if isinstance(model, dict) else {"name": model}
    if "preset" in values:
        model["preset"] = values["preset"]
    return {"model": model, **rest} if model else rest


def whole_numbers(nested: dict[str, Any]) -> dict[str, Any]:
    """Converts 1e3 and the like, which YAML reads as floats, to integers for settings that are integers."""
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


def _joined(key: str, value: object) -> object:
    """Joins a list, or a single number, from YAML to the text with commas that the flag expects.

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


def why_no_graphs(config: TrainConfig) -> str | None:
    """Returns the setting for which updates can't be CUDA graphs, as a message, or None."""
    for name, fits in (("batching", ("packed",)), ("precision", ("fp32", "bf16")), ("checkpointing", (False,))):
        if getattr(config, name) not in fits:
            expected = " or ".join(str(value) for value in fits)
            return f"expected {name} {expected} for cuda_graphs, got {getattr(config, name)}"
    if config.dropout_seeds == "batch":
        return "expected dropout_seeds run for cuda_graphs, which replay a whole update, got batch"
    return None
