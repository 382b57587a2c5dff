"""Each argument of `open_service` is taken or refused by name, for a folder of each kind."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.serving import open_service
from tests.audio import speech
from tests.covering import each
from tests.serving import models

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

BEAMS = {"num_beams", "length_penalty"}
# Another value of each argument but the folder, and of decoding options.
ARGUMENTS: dict[str, Any] = {
    "precision": "fp32", "device": "cpu", "engine": "kv_cache", "cache_dtype": "int8", "source_lang": "en",
    "target_lang": "de", "max_batch_size": 2, "max_batch_bytes": 1 << 20, "draft": "{generator}", "adapters": {"a": ""},
    "calibration": ["a bird", "two birds"], "num_beams": 2, "length_penalty": 2.0, "max_new_tokens": 3,
}  # fmt: skip
OF_DECODING = {"engine", "cache_dtype", "max_batch_bytes", "max_new_tokens", *BEAMS}
OF_GENERATORS, LANGUAGES = {"draft", "adapters"}, {"source_lang", "target_lang"}
# What a kind refuses.
REFUSED = {
    "speech": {*OF_DECODING, *OF_GENERATORS, *LANGUAGES, "calibration"},
    "encoder": {*OF_DECODING, *OF_GENERATORS, *LANGUAGES, "max_batch_size"},
    "generator": {*BEAMS, *LANGUAGES, "calibration"},
    "translator": {*OF_GENERATORS, "calibration"},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("services")
    speech.folder(folder / "speech")
    makers = {"encoder": models.encoder, "generator": models.generator, "translator": models.translator}
    return {"speech": folder / "speech", **{kind: make(folder / kind) for kind, make in makers.items()}}


@pytest.mark.parametrize("kind", REFUSED)
@each("name", ARGUMENTS)
def test_an_argument_is_taken_or_refused_by_name(kind, name, places) -> None:
    value = places["generator"] if name == "draft" else ARGUMENTS[name]
    is_option = name in (*BEAMS, "max_new_tokens")
    given = {"options": {name: value}} if is_option else {name: value}
    if name in REFUSED[kind]:
        with pytest.raises(ValueError, match=f"expected (no )?(\\w+ and )*{name}"):
            open_service(places[kind], **given)
    elif name == "adapters":  # its folder is read
        with pytest.raises(ValueError, match="adapter_config"):
            open_service(places[kind], adapters={"a": places[kind]})
    else:
        open_service(places[kind], **given)


def test_a_precision_reaches_each_kind_of_model(places, tmp_path) -> None:
    more = (models.classifier(tmp_path / "ranker", 1), models.multi_vector(tmp_path / "multi-vector"))
    for folder in (*places.values(), *more):
        with pytest.raises(ValueError, match="int9"):
            open_service(folder, precision="int9")


@pytest.mark.filterwarnings("ignore:.*which is a no-op:UserWarning")
def test_a_device_reaches_each_kind_of_model(places, tmp_path) -> None:
    for kind in ("generator", "translator"):  # which have a search, that needs numbers
        with pytest.raises(ValueError, match="device meta"):
            open_service(places[kind], device=torch.device("meta"))
    more = (models.classifier(tmp_path / "ranker", 1), models.multi_vector(tmp_path / "multi-vector"))
    for folder in (places["encoder"], *more):
        service: Any = open_service(folder, device=torch.device("meta"))
        assert {each.device.type for each in service.encoder.model.parameters()} == {"meta"}, folder


def test_every_argument_has_a_row() -> None:
    assert {*inspect.signature(open_service).parameters} - {"folder", "limits", "options"} <= {*ARGUMENTS}
