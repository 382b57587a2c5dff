"""Every setting of a training changes something: another value gives other numbers, weights or files."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fastformer.training import TrainConfig, start
from fastformer.training.sections import SECTIONS
from tests.training.tiny import PAIRS, SIZES, contents, write_pairs

SIZE = {**SIZES, "d_model": 8, "d_ff": 8}
BASE: dict[str, Any] = {
    "train_tsv": "{pairs}", "val_tsv": "{few}", "settings": SIZE, "tokenizer": "bytes", "max_tokens": 200, "steps": 2,
    "warmup": 1, "log_every": 1, "val_examples": 0, "val_every": 0, "save_every": 0, "max_len": 64, "device": "cpu",
    "eps": 1e-3,
}  # fmt: skip
NO_DATA = {"train_tsv": None, "val_tsv": None}
GPT = {**NO_DATA, "model": "gpt", "settings": {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_layers": 1}}
BPE = {"tokenizer": "bpe", "vocab_size": 30}
SIDES = {**NO_DATA, "train_source": "{source}", "train_target": "{target}"}
DEFAULTS = {each.name: each.default for section in SECTIONS for each in fields(section)}
# Of each setting: what both trainings have, and the two values.
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "model": ({"settings": {"d_model": 8}, "batching": "bucketed"}, "transformer", "lstm"),
    "preset": ({"settings": {}, "max_tokens": 20, "steps": 1}, "tiny", "nonsense"),
    "settings": ({}, SIZE, {**SIZE, "d_ff": 16}),
    "train_source": (SIDES, "{source}", "{target}"),
    "train_target": (SIDES, "{target}", "{source}"),
    "val_source": ({**SIDES, "val_target": "{target}"}, "{source}", "{target}"),
    "val_target": ({**SIDES, "val_source": "{source}"}, "{target}", "{source}"),
    "train_tsv": ({}, "{pairs}", "{few}"),
    "val_tsv": ({}, "{pairs}", "{few}"),
    "train_text": ({**GPT, "seqlen": 16}, "{source}", "{target}"),
    "val_text": ({**GPT, "seqlen": 16, "train_text": "{source}"}, "{source}", "{target}"),
    "held_out": ({"val_tsv": None}, "random", "last"),
    "data_weights": ({"train_tsv": "{pairs},{few}"}, None, "1,9"),
    "skip_bad_lines": ({"train_tsv": "{bad}"}, False, True),
    "seqlen": ({**GPT, "train_text": "{source}"}, 16, 12),
    "max_len": ({}, 64, 8),
    "max_length_ratio": ({}, 0.0, 1.3),
    "min_chars": ({}, 0, 5),
    "max_chars": ({}, 0, 5),
    "drop_duplicates": ({"train_tsv": "{twice}"}, False, True),
    "drop_identical": ({"train_tsv": "{same}"}, False, True),
    "tokenizer": ({"vocab_size": 30}, "bytes", "bpe"),
    "vocab_size": ({"tokenizer": "bpe"}, 30, 24),
    "shared_vocab": (BPE, True, False),
    "normalization": ({**BPE, "train_tsv": "{odd}"}, "nfkc", "none"),
    "spaces": ({**BPE, "train_tsv": "{odd}"}, "collapse", "keep"),
    "max_token_length": ({**BPE, "vocab_size": 40}, 16, 2),
    "user_tokens": (BPE, None, "aa"),
    "drop_user_tokens": ({**BPE, "user_tokens": "aa"}, False, True),
    "batching": ({}, "packed", "random"),
    "max_tokens": ({}, 200, 100),
    "accumulate": ({"max_tokens": 50}, 1, 2),
    "steps": ({}, 2, 3),
    "epochs": ({}, 0.0, 3.0),
    "max_minutes": ({"steps": 9}, 0.0, 1e-9),
    "schedule": ({}, "linear", "constant"),
    "lr": ({}, 2e-3, 1e-3),
    "warmup": ({}, 1, 2),
    "beta1": ({}, 0.9, 0.5),
    "beta2": ({}, 0.98, 0.5),
    "eps": ({}, 1e-3, 1e-2),
    "weight_decay": ({}, 0.0, 0.5),
    "clip": ({}, 1.0, 0.5),
    "label_smoothing": ({}, 0.0, 0.1),
    "smooth_others": ({"label_smoothing": 0.1}, False, True),
    "ema": ({}, 0.0, 0.5),
    "average_last": ({"save_every": 1, "keep_last": 2}, 1, 2),
    "val_every": ({}, 0, 1),
    "save_every": ({}, 0, 1),
    "log_every": ({}, 1, 2),
    "keep_last": ({"save_every": 1}, 3, 1),
    "patience": ({"val_every": 1, "steps": 4, "lr": 0.0}, 0, 1),
    "val_examples": ({"max_len": 20}, 0, 1),
    "bleu_tokenize": ({"val_tsv": "{words}", "val_examples": 1, "max_len": 20}, "13a", "char"),
    "samples": ({"val_examples": 2, "max_len": 20}, 0, 1),
    "report": ({}, False, True),
    "best_by": ({"val_examples": 1, "max_len": 20}, "nll", "chrf"),
    "precision": ({}, "fp32", "bf16"),
    "checkpointing": ({"log_every": 2}, False, "yes"),
    "cuda_graphs": ({"batching": "bucketed"}, False, True),
    "seed": ({}, 0, 1),
    "device": ({}, "cpu", "toaster"),
    "sharding": ({}, "ddp", "nonsense"),
    "dropout_seeds": ({}, "run", "batch"),
    "rank_timeout": ({}, 600, 0),
    "init_from": ({}, None, "{run}"),
}  # fmt: skip
# Settings that are tried elsewhere: they need a folder of shards, or a corpus that is made.
ELSEWHERE = {
    "task": "tests/training/test_kept.py::test_the_measure_fits_the_task",
    "train_data": "tests/training/test_prepared.py::test_a_resumed_run_equals_an_uninterrupted_one",
    "shards_at_once": "tests/training/test_prepared.py::test_a_resumed_run_equals_an_uninterrupted_one",
}
# Settings whose other value is refused: it names no such thing, or it changes only speed, memory or patience.
REFUSED = {"preset", "task", "device", "sharding", "cuda_graphs", "checkpointing", "rank_timeout", "skip_bad_lines"}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Returns the paths of the files in the table."""
    folder = tmp_path_factory.mktemp("settings")
    pairs = {
        "pairs": PAIRS, "few": PAIRS[:8], "twice": [*PAIRS, *PAIRS], "same": [*PAIRS, ("ab c", "ab c")],
        "bad": [*PAIRS, ("", "")], "words": [("a b c d e", "a b c d e")],
        "odd": [(f"{source}  ²", f"{target}  ²") for source, target in PAIRS],
    }  # fmt: skip
    found = {name: write_pairs(folder / name, rows) for name, rows in pairs.items()}
    for place, name in enumerate(("source", "target")):
        (folder / name).write_text("".join(f"{pair[place]}\n" for pair in PAIRS))
        found[name] = str(folder / name)
    found["run"] = str(folder / "run")
    start(config_of({"max_tokens": 50}, found), folder / "run").train()
    return found


def config_of(changes: dict[str, Any], places: dict[str, str]) -> TrainConfig:
    """Returns the config of a tiny training with some changes."""
    values = {**BASE, **changes}
    return TrainConfig(
        **{name: value.format(**places) if isinstance(value, str) else value for name, value in values.items()}
    )


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return {}


def outcome(changes: dict[str, Any], places: dict[str, str], run: Path) -> Any:
    """Returns the numbers of a training, the names of its files, and what its model and tokenizer hold; or an error."""
    try:
        start(config_of(changes, places), run).train()
    except ValueError as error:
        return str(error)
    rates = r'"(tokens_per_second|seconds)": [^,}]*'
    found = {name: data for name, (data, _) in contents(run).items()}
    lines = re.sub(rates, "", found["metrics.jsonl"].decode())
    return lines, sorted(found), found["model.safetensors"], found["tokenizer.json"]


# A case takes two trainings, a second or less; a sample of the cases runs always.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if place % 5 else []) for place, name in enumerate(CASES)]
)
def test_another_value_gives_another_training(name, places, outcomes, tmp_path) -> None:
    both, first, second = CASES[name]
    found = []
    for place, value in enumerate((first, second)):
        changes = {**both, name: value}
        key = repr(sorted({**DEFAULTS, **BASE, **changes}.items()))
        if key not in outcomes:
            outcomes[key] = outcome(changes, places, tmp_path / str(place))
        found.append(outcomes[key])
    assert found[0] != found[1]
    refused = [each for each in found if isinstance(each, str)]
    assert not refused or (name in REFUSED and len(refused) == 1), refused


def test_the_table_is_whole() -> None:
    """Every setting has a row, and no row is of a setting that is gone."""
    assert {*CASES, *ELSEWHERE} == {field.name for section in SECTIONS for field in fields(section)}
    for place in ELSEWHERE.values():
        file, name = place.split("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text(), place
