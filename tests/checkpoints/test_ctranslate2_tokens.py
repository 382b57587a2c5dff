"""Every architecture and quantization of CTranslate2: its converter writes folders, and tokens are compared with it.

    pip install ctranslate2==4.8.5 && pytest -m slow tests/checkpoints/test_ctranslate2_tokens.py

The other files compare small folders that are stored in `tests/foreign`, without CTranslate2.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.checkpoints.argos import load_package
from fastformer.checkpoints.ctranslate2 import load_transformer, read_vocabularies
from fastformer.generation import generate
from tests.foreign.ctranslate2_folders import CASES, DECODERS, SIZES, convert, convert_argos, convert_decoder

QUANTIZATIONS = [
    "float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"
]  # fmt: skip
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    **{name: (convert, kind, options) for name, kind, options, _ in CASES},
    "mbart": (convert, "MBart", {"scale_embedding": True, "tokenizer_class": "MBart50Tokenizer", **SIZES}),
    **{name: (convert_decoder, kind, options) for name, kind, options, _ in DECODERS},
}
COUNT, MOST = 200, 16
_NOISE = 1e-6  # of weights, relative: fp32 has 6e-8, and a sum of products several times as much


def searched(model: Any, rows: list[list[int]], beams: int) -> list[list[int]]:
    """Returns new tokens, without EOS."""
    rules: dict[str, Any] = {"beam_rules": "transformers", "length_penalty": 1.0, "early_stopping": True}
    precision = "fp32" if next(model.parameters()).dtype == torch.float32 else None
    options = {"num_beams": beams, "max_new_tokens": MOST, **(rules if beams > 1 else {})}
    found = generate(model, rows, precision=precision, **options)
    assert isinstance(found, torch.Tensor)
    begin = max(map(len, rows)) if type(model).__name__ == "GPT" else 0
    end = model.config.special_ids.first_eos
    new = [row[begin:] for row in found.tolist()]
    return [row[: row.index(end)] if end in row else row for row in new]


def is_near_tie(model: Any, row: list[int], tokens: list[int], beams: int) -> bool:
    """Returns whether a search in fp64 finds the tokens with weights that differ by rounding errors."""
    for seed in range(32):
        noisy = copy.deepcopy(model).double()
        noisy.precision = None  # what an int8 file asks for
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in noisy.parameters():
                parameter.mul_(1 + _NOISE * torch.randn_like(parameter))
        if searched(noisy, [row], beams) == [tokens]:
            return True
    return False


def compare(model: Any, rows: list[list[int]], expected: Sequence[list[int]], beams: int, record: Any) -> None:
    found = searched(model, rows, beams)
    different = [i for i in range(COUNT) if found[i] != expected[i]]
    record("different", len(different))
    assert len(different) <= COUNT // 50
    assert all(is_near_tie(model, rows[i], expected[i], beams) for i in different)
    assert len({*map(str, found)}) > 5


@pytest.mark.slow
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_ctranslate2(name: str, quantization: str, tmp_path: Path, record_property: Any) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="the ctranslate2 library is not installed")
    write, kind, options = MODELS[name]
    tokens, draw = write(tmp_path / name, kind, options, quantization), random.Random(11)
    options = {"device": "cpu", "compute_type": "float32", "intra_threads": 1}
    words = [token for token in tokens if token.startswith("t")]
    texts = [draw.choices(words, k=draw.randint(1, 12)) for _ in range(COUNT)]
    if write is convert:
        texts = [[*text, "</s>"] for text in texts]
        model, engine = load_transformer(tmp_path / name)[0], ctranslate2.Translator(str(tmp_path / name), **options)
    else:
        model, engine = (
            load_model(tmp_path / name, ("GPT",), dtype=torch.float32)[0],
            ctranslate2.Generator(str(tmp_path / name), **options),
        )
    rows = [[tokens.index(token) for token in text] for text in texts]
    for beams in (1, 4):
        if write is convert:
            search: dict[str, Any] = {"beam_size": beams, "max_decoding_length": MOST, "min_decoding_length": 0}
            results = [each.hypotheses[0] for each in engine.translate_batch(texts, **search)]
        else:  # one by one: a batch with a window is an error there
            search = {"beam_size": beams, "max_length": MOST, "include_prompt_in_result": False, "end_token": "</s>"}
            results = [engine.generate_batch([text], **search)[0].sequences[0] for text in texts]
        expected = [[tokens.index(token) for token in result] for result in results]
        compare(model.float(), rows, expected, beams, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_tokens_of_packages_are_those_of_ctranslate2(quantization: str, tmp_path: Path, record_property: Any) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="the ctranslate2 library is not installed")
    pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
    convert_argos(tmp_path, quantization)
    draw, (tokens, _) = random.Random(11), read_vocabularies(tmp_path / "model")
    texts = [draw.choices(tokens[4:], k=draw.randint(1, 12)) for _ in range(COUNT)]
    rows = [[tokens.index(token) for token in text] for text in texts]
    engine = ctranslate2.Translator(str(tmp_path / "model"), device="cpu", compute_type="float32", intra_threads=1)
    for beams in (1, 4):
        results = engine.translate_batch(texts, beam_size=beams, max_decoding_length=MOST, min_decoding_length=0)
        expected = [[tokens.index(token) for token in each.hypotheses[0]] for each in results]
        compare(load_package(tmp_path)[0].float(), rows, expected, beams, record_property)
