"""Tokenizers that an earlier version saved load with the ids that they had, and are saved as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastformer.data import load_tokenizer

pytest.importorskip("sentencepiece", reason="of the extra sentencepiece")

EARLIER: dict[str, Any] = json.loads(Path(__file__).with_name("tokenizers_of_an_earlier_version.json").read_text())
TEXT = "two <x> three </s> one漢"


@pytest.mark.parametrize("kind", EARLIER)
def test_a_tokenizer_of_an_earlier_version(kind, tmp_path) -> None:
    expected, file = EARLIER[kind], tmp_path / "tokenizer.json"
    file.write_text(json.dumps(expected["file"]))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert ids == expected["ids"] == tokenizer.encode_batch([TEXT, ""])[0]
    outputs = expected.get("target_ids", ids)
    assert tokenizer.decode(outputs) == expected["text"] and tokenizer.tokens(outputs) == expected["tokens"]
    assert tokenizer.encode_target(TEXT) == outputs
    if "prompt_ids" in expected:
        assert tokenizer.encode_prompt(TEXT) == expected["prompt_ids"]
    if "pair" in expected:
        assert [*tokenizer.encode_pair(TEXT, "a b")] == expected["pair"]
    else:
        with pytest.raises(ValueError, match="encoder"):
            tokenizer.encode_pair(TEXT, "a b")
    if tokenizer.role not in ("prompts", "encoder"):
        with pytest.raises(ValueError, match="language model"):
            tokenizer.encode_template(TEXT)
    tokenizer.save(tmp_path)
    assert json.loads(file.read_text()) == expected["file"]
