"""Settings check their types and bounds, however they are made."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal, get_type_hints

import pytest

from fastformer.baseline.lstm import LSTMConfig
from fastformer.models import GPT, GPTConfig, Transformer, TransformerConfig
from fastformer.settings import Range, check_settings, describe, suggestion, why_not
from fastformer.training.config import TrainConfig
from fastformer.training.sections import ARCHITECTURES, SECTIONS
from tests.covering import each

CONFIGS = (TransformerConfig, GPTConfig, LSTMConfig)


@dataclass
class SampleSettings:
    count: Annotated[int, Range(1)] = 1
    share: Annotated[float, Range(0, below=1)] = 0.5
    part: Annotated[float, Range(0, most=1)] = 0.5
    rate: Annotated[float, Range(above=0)] = 0.5
    kind: Literal["one", "two"] = "one"
    on: bool = True
    size: Annotated[int, Range(0)] | None = None
    path: str | None = None


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("count", (0, 1.0, "1", True, None)),
        ("share", (1, -1e-9, math.nan, math.inf, False)),
        ("part", (1.0000001,)),
        ("rate", (0, 0.0, -1e-9)),
        ("kind", ("tow", None)),
        ("on", ("no", 1)),
        ("size", (-1, "x")),
        ("path", (3,)),
    ],
)
def test_parts_that_do_not_fit_are_refused(name, wrong) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=rf"\b{name}\b.*{re.escape(repr(value))}"):
            check_settings(SampleSettings(**{name: value}))


@pytest.mark.parametrize(
    "values",
    [
        {"count": 1, "share": 0, "part": 1, "size": 0, "path": "x"},
        {"share": math.nextafter(1, 0), "part": 0, "rate": 1e-300, "size": None, "kind": "two", "on": False},
    ],
)
def test_sizes_up_to_the_bounds_are_accepted(values) -> None:
    example = SampleSettings(**values)
    check_settings(example)
    assert {name: getattr(example, name) for name in values} == values
    assert isinstance(example.share, float) and isinstance(example.part, float)


def test_words_for_types() -> None:
    assert describe(Annotated[int, Range(3)] | None) == "an integer or null"
    assert describe(Literal["a", "b"]) == "'a' or 'b'" and describe(Literal["a"]) == "'a'"
    assert describe(Annotated[int, Range(3)] | int) == "an integer"
    assert why_not({"a": 1}, dict[str, int]) is None and why_not(3, dict[str, int]) == "to be a mapping"
    assert suggestion("droput", ["dropout", "d_ff"]) == "; did you mean 'dropout'?"
    assert suggestion("zzz", ["dropout"]) == ""


WRONG = [
    (TransformerConfig, {"num_decoder_layers": 0}, "num_decoder_layers"),
    (TransformerConfig, {"window_size": -1}, "window_size"),
    (TransformerConfig, {"norm_first": "no"}, "norm_first"),
    (TransformerConfig, {"activation": "rleu"}, "'relu'"),
    (TransformerConfig, {"dropout": math.nan}, "dropout"),
    (TransformerConfig, {"attention_dropout": 2}, "attention_dropout"),
    (TransformerConfig, {"d_model": 12, "num_heads": 8}, "num_heads"),
    (TransformerConfig, {"num_heads": 6, "d_model": 12, "num_kv_heads": 4}, "num_kv_heads"),
    (TransformerConfig, {"d_model": 9, "num_heads": 3}, "d_model"),
    (TransformerConfig, {"vocab_size": 1}, "vocab_size"),
    (TransformerConfig, {"max_len": 0}, "max_len"),
    (TransformerConfig, {"layer_norm_eps": -1e-9}, "layer_norm_eps"),
    (TransformerConfig, {"source_vocab_size": 7}, "tie_embeddings"),
    *((TransformerConfig, {"suppress_tokens": ids}, "suppress_tokens") for ids in ([-1], [1.5], [True], "3", 3)),
    (GPTConfig, {"num_layers": 0}, "num_layers"),
    (GPTConfig, {"bias": None}, "bias"),
    (GPTConfig, {"rotary_base": 0}, "rotary_base"),
    (GPTConfig, {"positions": "rotary", "d_model": 12, "num_heads": 4}, "heads"),
    (GPTConfig, {"positions": "sinusoidal", "d_model": 9, "num_heads": 3}, "d_model"),
    (LSTMConfig, {"d_model": 15}, "d_model"),
    (LSTMConfig, {"d_model": "16"}, "d_model"),
    (LSTMConfig, {"num_layers": 0}, "num_layers"),
    (LSTMConfig, {"vocab_size": 1}, "vocab_size"),
    (LSTMConfig, {"score": "dots"}, "score"),
    (LSTMConfig, {"dropout": math.nan}, "dropout"),
]


@each("config, values, named", WRONG)
def test_a_model_refuses_settings_that_it_cannot_have(config, values, named) -> None:
    with pytest.raises(ValueError, match=named):
        config(**{"vocab_size": 9, **values})


def test_settings_in_a_saved_model_are_checked_too(tmp_path) -> None:
    GPT(GPTConfig(9, d_model=8, num_heads=2, num_layers=1)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    wrong = (("dropout", 2), ("window_size", -1), ("bias", "no"), ("d_model", None), ("num_heads", 3), ("num_head", 3))
    for name, value in wrong:
        file.write_text(json.dumps(saved | {name: value}))
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            GPT.from_pretrained(tmp_path)
    del saved["vocab_size"]
    file.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="vocab_size"):
        GPT.from_pretrained(tmp_path)


def test_every_preset_is_a_config() -> None:
    for model, config in ((Transformer, TransformerConfig), (GPT, GPTConfig)):
        for name, settings in model.presets.items():
            assert asdict(config(5, **settings)).items() >= settings.items(), name


def test_every_setting_is_documented_and_has_a_checked_type() -> None:
    from docstring_parser import parse

    for config in (*CONFIGS, *SECTIONS):
        texts = {p.arg_name for p in parse(config.__doc__ or "").params if p.description}
        assert texts == {f.name for f in fields(config)}, config
        assert set(get_type_hints(config)) == texts
    assert {config for config, _ in ARCHITECTURES.values()} == set(CONFIGS)
    assert {f.name for f in fields(TrainConfig)} == {f.name for section in SECTIONS for f in fields(section)}
