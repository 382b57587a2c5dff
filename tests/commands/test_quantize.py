"""`fastformer quantize` writes a folder that all other commands accept."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.checkpoints.gguf.file import read_gguf
from fastformer.cli import main
from fastformer.data import ByteTokenizer
from fastformer.generation import Translator
from fastformer.generation.engines.cpp_support import why_no_cpp_engine
from fastformer.models import GPT, Transformer
from tests.encoding.folders import bert
from tests.foreign.gguf_files import FOLDER
from tests.generation.small import tiny

FEW = ["--max_new_tokens", "6", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("quantize") / "run"
    tiny(max_len=40, tie_embeddings=False).save_pretrained(folder, ByteTokenizer())
    return str(folder)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_folder_translates_with_the_rounded_weights(precision, run, tmp_path, ran) -> None:
    out = str(tmp_path / "small")
    said = ran("quantize", run, out, *(["--precision", precision] if precision != "int8" else [])).out
    assert said.startswith(f"wrote {out}: 0.") and "MiB of weights instead of 0." in said
    model, tokenizer = load_model(out)
    expected = Transformer.from_pretrained(run).quantize(precision)
    assert model.precision == precision
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    bf16, _ = load_model(out, dtype=torch.bfloat16)
    assert {p.dtype for p in bf16.parameters()} == {torch.bfloat16} and bf16.precision == precision
    due = Translator(expected, tokenizer).translate("abc", max_new_tokens=6) + "\n"
    for flags in ([], ["--precision", precision] if why_no_cpp_engine() is None else []):
        assert ran("translate", out, "abc", *flags, *FEW).out == due
    # Explicitly in fp32: the rounded weights, and nothing else is rounded.
    plain = Translator(expected, tokenizer).translate("abc", max_new_tokens=6, engine="kv_cache")
    assert ran("translate", out, "abc", "--precision", "fp32", *FEW).out == plain + "\n"


def test_an_unknown_precision_writes_nothing(run, tmp_path, capsys) -> None:
    assert main(["quantize", run, str(tmp_path / "none"), "--precision", "int2"]) in (1, 2)
    assert "int4" in capsys.readouterr().err and not (tmp_path / "none").exists()
    for precision in ("q8_0", "q4_0"):  # those of a file
        assert main(["quantize", "nowhere", str(tmp_path / "none"), "--precision", precision]) == 1
        assert precision in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_language_model_too(tmp_path, ran) -> None:
    tiny(GPT, max_len=40).save_pretrained(tmp_path / "run", ByteTokenizer())
    assert main(["quantize", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert ran("generate", str(tmp_path / "out"), "a", "--greedy", *FEW).out.splitlines()[1].startswith("a")


@pytest.mark.parametrize(("flags", "kind"), [((), "Q8_0"), (("--precision", "int8"), "Q8_0"),
                                             (("--precision", "q4_0"), "Q4_0")])  # fmt: skip
def test_the_precision_of_a_gguf_file(flags, kind, tmp_path, ran) -> None:
    out = tmp_path / "small.gguf"
    said = ran("quantize", str(FOLDER / "llama.gguf"), str(out), *flags).out
    assert str(out) in said and f"{out.stat().st_size / 2**20:.1f} MiB" in said
    assert kind in {tensor.kind.name for tensor in read_gguf(out).tensors.values()}


@pytest.mark.parametrize("options", [None, {}, {"num_beams": 2}])
def test_the_folder_keeps_the_options_of_a_search(options, run, tmp_path) -> None:
    """Even without any, a folder with such a file has transformers' defaults; a run folder has none."""
    folder = shutil.copytree(run, tmp_path / "run")
    if options is not None:
        (folder / "generation_config.json").write_text(json.dumps(options))
    assert main(["quantize", str(folder), str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "generation_config.json"
    assert (json.loads(file.read_text()) if file.is_file() else None) == options


def test_existing_files_stay(run, tmp_path, ran) -> None:
    (tmp_path / "mine").write_text("x")
    for out in (run, str(tmp_path), str(tmp_path / "mine")):
        assert "expected a new or an empty folder" in ran("quantize", run, out, code=1).err
    assert Transformer.from_pretrained(run).precision is None
    (tmp_path / "encoder").mkdir()
    bert(tmp_path / "encoder")
    for folder in (tmp_path, tmp_path / "encoder"):
        assert main(["quantize", str(folder), str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()
