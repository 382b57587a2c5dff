"""Tests Translator.from_pretrained and its precisions."""

from __future__ import annotations

import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import ByteTokenizer
from fastformer.generation import Translator, request_builder
from fastformer.generation.engines.cpp_support import why_no_cpp_engine
from fastformer.models import GPT, Transformer
from fastformer.models.pretrained import save_model
from tests.generation.small import tiny

TEXTS = ["a", "a longer text", "mid size", "b" * 40, "x"]
FEW = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny().train()


@pytest.mark.parametrize("precision", [None, "fp32", "bf16"])
@pytest.mark.parametrize("kind", [Transformer, LSTMSeq2Seq])
def test_from_pretrained_needs_only_the_folder(kind, precision, tmp_path) -> None:
    model = tiny(kind)
    save_model(model, tmp_path, ByteTokenizer())
    translator = Translator.from_pretrained(tmp_path, precision=precision, device="cpu")
    assert {p.dtype for p in translator.model.parameters()} == {
        torch.bfloat16 if precision == "bf16" else torch.float32
    }
    found = translator.translate(TEXTS, num_beams=2, **FEW)
    if precision != "bf16":
        assert found == Translator(model, ByteTokenizer()).translate(TEXTS, num_beams=2, **FEW)
    assert translator.attention("a")[2].dtype == torch.float32


def test_an_engine_never_replaces_the_requested_precision(model, tmp_path, calls_of) -> None:
    calls = calls_of(request_builder, "choose_engine")

    def made() -> tuple[str, str | None]:
        call = calls.pop()
        return call.result.name, call.args[2]

    model.save_pretrained(tmp_path / "plain", ByteTokenizer())
    model.quantize().save_pretrained(tmp_path / "int8", ByteTokenizer())
    for folder, given, asked in (
        ("plain", None, None),
        ("plain", "fp32", None),  # the dtype of the weights says it
        ("plain", "int8", "int8"),
        ("int8", None, None),
        ("int8", "int8", "int8"),
        ("int8", "fp32", "fp32"),
    ):
        translator = Translator.from_pretrained(tmp_path / folder, precision=given)
        assert translator.precision == asked
        if asked != "int8" or why_no_cpp_engine() is None:
            translator.translate("a", **FEW)
            assert made()[1] == asked
            list(translator.stream("a", **FEW))
            assert made()[1] == asked
    translator = Translator(model.train(), ByteTokenizer(), precision="int8")
    for options in ({}, {"num_beams": 2}):  # in training mode too: it is set to evaluation while it translates
        if why_no_cpp_engine() is None:
            translator.translate("a", **options, **FEW)
            assert made() == ("cpp", "int8")
    assert model.training
    translator.translate("a", precision="fp32", engine="kv_cache", **FEW)
    assert made() == ("kv_cache", "fp32")
    model.encoder.layers[0].register_forward_hook(lambda module, args, out: None)
    try:
        with pytest.raises(ValueError, match="'cpp'.*int8"):
            translator.translate("a", **FEW)
    finally:
        model.encoder.layers[0]._forward_hooks.clear()
    with pytest.raises(ValueError, match=r"\bprecision\b.*'int2'"):
        Translator(model, ByteTokenizer(), precision="int2")


def test_errors_of_from_pretrained_say_what_is_wrong(tmp_path) -> None:
    tiny(GPT).save_pretrained(tmp_path, ByteTokenizer())
    with pytest.raises(ValueError, match="'GPT'"):
        Translator.from_pretrained(tmp_path)
    for bad in ("int2", "INT8", 8, torch.float32):
        with pytest.raises(ValueError, match=r"\bprecision\b"):
            Translator.from_pretrained(tmp_path, precision=bad)


@pytest.mark.parametrize("wrong", [None, 5])
def test_a_folder_is_a_path_or_a_list_of_paths(wrong) -> None:
    with pytest.raises(ValueError, match="folder"):
        Translator.from_pretrained(wrong)
